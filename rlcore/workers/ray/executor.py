"""The Ray executor: joins a cluster or starts Ray on this machine, and restores the previous state at shutdown."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
from ray._private.node import Node  # its public API cannot start Ray without the processes of UNNEEDED

from rlcore.config.schema import ClusterConfig
from rlcore.errors import ConfigError, WorkerError
from rlcore.workers.executor import Executor, ProcessRequest
from rlcore.workers.group import WorkerGroup
from rlcore.workers.pool import ClassWithInitArgs, ResourcePool
from rlcore.workers.ray.pool import JOIN_SECONDS, RayResourcePool
from rlcore.workers.ray.processes import RayProcesses
from rlcore.workers.ray.session import RaySession

LOGICAL_CPUS = 1024
"""Cores that a Ray started by rlcore is told it has: a small machine then runs all workers, none waits for a core."""
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # rlcore raises the first failure of a call; Ray should not print the others
    "RAY_prestart_worker_first_driver": "0",  # else Ray starts as many idle processes as it has cores
}
"""Ray's settings, set in the environment from start to shutdown unless the user has set them."""
UNNEEDED = ("start_monitor", "start_log_monitor")
"""Methods of Ray's Node, each of which starts a process that runs do without."""
DASHBOARD = "start_api_server"
"""The one that starts the dashboard. Ray's agents ask for its address each second if they are of `ray[default]`."""
SENT_VARIABLES = ("RLCORE_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_")
"""Prefixes of environment variables that a run passes to its workers on a running cluster."""


class RayExecutor(Executor):
    """Runs every rank as a process of a Ray cluster: the one at `cluster.address`, or a new one on this machine.

    If this process is already connected to Ray, the executor uses that connection and leaves it open.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        *,
        log_dir: Path | None = None,
        by_value_modules: Sequence[ModuleType] = (),
        distributions: Mapping[str, str] | None = None,
    ) -> None:
        self._cluster = cluster
        self._log_dir = log_dir
        self._distributions = distributions or {}
        self._by_value = [*by_value_modules]
        self._registered: list[ModuleType] = []
        self._set: list[str] = []
        self._connected = False
        self._session: RaySession | None = None
        self._processes: list[RayProcesses] = []
        self._pools: list[RayResourcePool] = []

    def start(self) -> None:
        """Connect to Ray, or start it. Raises WorkerError when that fails, ConfigError for an unusable address."""
        if self._has_ended():
            self.shutdown()
        for module in self._by_value:
            if module.__name__ not in ray.cloudpickle.list_registry_pickle_by_value():
                ray.cloudpickle.register_pickle_by_value(module)
                self._registered.append(module)
        if ray.is_initialized():
            self._session = RaySession()
            return
        for name, value in SETTINGS.items():
            if name not in os.environ:
                os.environ[name] = value
                self._set.append(name)
        try:
            start_ray(self._cluster.address)
        except BaseException:
            self.shutdown()
            raise
        self._connected, self._session = True, RaySession()

    def _has_ended(self) -> bool:
        """Whether the Ray session of `start` has ended."""
        return self._session is not None and not self._session.is_current

    def _check_session(self) -> None:
        if self._session is not None:
            self._session.check("the executor")

    def resource_pool(
        self,
        workers: int | None = None,
        *,
        cpus_per_worker: int | None = None,
        gpus_per_worker: float | None = None,
        node: str | None = None,
        name: str = "a pool",
    ) -> RayResourcePool:
        """Return places for `workers` processes, on few nodes if possible. Ray reserves them at first use."""
        self._check_session()
        cluster = self._cluster
        own = self._connected and cluster.address is None
        pool = RayResourcePool(
            [cluster.workers if workers is None else workers],
            cpus_per_worker=cluster.cpus_per_worker if cpus_per_worker is None else cpus_per_worker,
            gpus_per_worker=cluster.gpus_per_worker if gpus_per_worker is None else gpus_per_worker,
            node=node,
            start_timeout=cluster.start_timeout,
            join_seconds=0.0 if own else JOIN_SECONDS,  # no node will join a Ray that rlcore started
            spread=True,
            other_pools=self._pools,
            name=name,
        )
        self._pools.append(pool)
        return pool

    def worker_group(self, pool: ResourcePool, classes: Any, name: str = "worker") -> Any:
        """Start the processes and construct their workers; waits until all are ready."""
        roles = {name: classes} if isinstance(classes, ClassWithInitArgs) else dict(classes)
        (groups,) = self.worker_groups([ProcessRequest(pool, roles, name)])
        return groups[name] if isinstance(classes, ClassWithInitArgs) else groups

    def worker_groups(
        self, requests: Sequence[ProcessRequest], *, meanwhile: Callable[[], None] = lambda: None
    ) -> list[dict[str, WorkerGroup]]:
        """Start all sets of processes, call `meanwhile`, and then wait for the processes."""
        # All sets start before the first is waited for: imports take seconds and run at the same time.
        started = [self._start_processes(*request) for request in requests]
        meanwhile()
        for processes in started:
            processes.wait_until_started()
        groups: list[dict[str, WorkerGroup]] = []
        for processes, request in zip(started, requests, strict=True):
            classes = request.classes.items()
            groups.append({role: WorkerGroup(processes, role, class_args.cls) for role, class_args in classes})
        return groups

    def _start_processes(self, pool: ResourcePool, roles: Mapping[str, ClassWithInitArgs], name: str) -> RayProcesses:
        self._check_session()
        if not isinstance(pool, RayResourcePool):
            raise ConfigError(
                f"{pool!r} has no places on Ray; use executor.resource_pool(...) or RayResourcePool(...)."
            )
        processes = RayProcesses(
            pool,
            roles,
            name,
            log_dir=self._log_dir,
            distributions=self._distributions,
            start_timeout=self._cluster.start_timeout,
            stall_timeout=self._cluster.stall_timeout,
            inline_bytes=int(self._cluster.inline_kb * 1000),
            env=self._env(),
        )
        self._processes.append(processes)
        return processes

    def _env(self) -> dict[str, str]:
        """Return the environment variables that workers on a running cluster lack, because it was started elsewhere."""
        if self._cluster.address is None:
            return {}
        secret = {"TOKEN", "KEY", "SECRET"}  # Ray's dashboard shows a worker's environment
        return {
            name: value
            for name, value in os.environ.items()
            if name.startswith(SENT_VARIABLES) and not secret & set(name.split("_"))
        }

    def shutdown(self) -> None:
        """Kill the workers and release their places. End Ray, or the connection to it, if `start` created it."""
        for processes in self._processes:
            processes.shutdown()
        for pool in self._pools:
            pool.release()
        self._processes.clear()
        self._pools.clear()
        for module in self._registered:
            ray.cloudpickle.unregister_pickle_by_value(module)
        self._registered.clear()
        if self._connected and not self._has_ended():
            ray.shutdown()
        self._connected, self._session = False, None
        # The settings would change a later Ray of the same program.
        for name in self._set:
            del os.environ[name]
        self._set.clear()


def start_ray(address: str | None, num_cpus: int = LOGICAL_CPUS) -> None:
    """Connect this process to the Ray at `address`; if it is None, start a new Ray with `num_cpus` logical cores.

    The new Ray ends with this process, even if the process is killed. Raises WorkerError when Ray cannot be reached or
    started, ConfigError for a ray:// address.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options |= {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": _object_store_bytes()}
    else:
        _check_address(address)
    on_terminate = signal.getsignal(signal.SIGTERM)
    # "local" starts a new Ray; without an address Ray would join one that it finds on the machine.
    try:
        with _only_needed_processes():
            ray.init(address=address or "local", **options)
    except Exception as error:
        where = f"the Ray at {address} cannot be joined" if address else "Ray cannot be started on this machine"
        raise WorkerError(
            f"{where}: {type(error).__name__}: {error}. See Ray's logs in /tmp/ray/session_latest/logs and "
            "docs/debugging.md; cluster.executor=in_process works without Ray."
        ) from error
    # ray.init replaces the program's SIGTERM handler. If that was SIG_DFL, Ray's own handler closes its log properly.
    if threading.current_thread() is threading.main_thread() and on_terminate not in (signal.SIG_DFL, None):
        signal.signal(signal.SIGTERM, on_terminate)


@contextmanager
def _only_needed_processes() -> Iterator[None]:
    """Have a new Ray start neither autoscaler nor log monitor nor, without `ray[default]`, dashboard: no run uses them.

    Each imports ray for half a second of the cores that the workers need; `ray.init` has no option to leave them out.
    A version of Ray without one of the methods starts its process as before.
    """
    unneeded = UNNEEDED if importlib.util.find_spec("aiohttp_cors") else (*UNNEEDED, DASHBOARD)
    names = [name for name in unneeded if hasattr(Node, name)]
    whole = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(Node, name, lambda node, *args, **kwargs: None)
    try:
        yield
    finally:
        for name, method in whole.items():
            setattr(Node, name, method)


def _check_address(address: str) -> None:
    if address.startswith("ray://"):
        raise ConfigError(
            f"cluster.address={address} is a Ray Client address, which would bring all results to the client. "
            "Start the run on a node of the cluster with cluster.address=auto, or with `ray job submit`."
        )
    host, _, port = address.rpartition(":")
    if port.isdigit():  # ray.init itself waits for minutes
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise WorkerError(
                f"no Ray answers at cluster.address={address}: {error}. Start it with `ray start --head --port={port}`,"
                " or leave cluster.address out to have one started here."
            ) from error


def _object_store_bytes() -> int:
    """Return the object store's size: 80 % of free shared memory, at most 4 GiB. Ray spills further objects to disk."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"
    return max(80 << 20, min(4 << 30, int(0.8 * shutil.disk_usage(folder).free)))
