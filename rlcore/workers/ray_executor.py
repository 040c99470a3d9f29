"""The Ray executor: joins a cluster or starts Ray on this machine, and leaves it as it was found."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import ray

from rlcore.config.schema import ClusterConfig
from rlcore.errors import ConfigError, WorkerError
from rlcore.workers.executor import Executor, ProcessRequest
from rlcore.workers.group import WorkerGroup
from rlcore.workers.pool import ClassWithInitArgs, ResourcePool
from rlcore.workers.ray_group import RayProcesses
from rlcore.workers.ray_pool import JOIN_SECONDS, RayResourcePool

LOGICAL_CPUS = 1024
"""Cores that a Ray of our own believes in: a small machine then runs every worker, and never waits for a core."""
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # the first failure of a call is raised; Ray need not print the others
    "RAY_prestart_worker_first_driver": "0",  # else Ray starts as many idle processes as it has cores
}
"""Ray's settings, set in the environment from start to shutdown where the user has not set them."""
SENT_VARIABLES = ("RLCORE_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_")
"""How the names of variables begin that a run takes along to the workers of a running cluster."""


class RayExecutor(Executor):
    """Runs every rank as a process of a Ray cluster: the one at `cluster.address`, or one of its own on this machine.

    Where this process is already connected to Ray, that connection is used and left open.
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
        self._processes: list[RayProcesses] = []
        self._pools: list[RayResourcePool] = []

    def start(self) -> None:
        """Connect to Ray, or start it. Raises WorkerError when that fails, ConfigError for an address of no use."""
        for module in self._by_value:
            if module.__name__ not in ray.cloudpickle.list_registry_pickle_by_value():
                ray.cloudpickle.register_pickle_by_value(module)
                self._registered.append(module)
        if ray.is_initialized():
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
        self._connected = True

    def resource_pool(
        self,
        workers: int | None = None,
        *,
        cpus_per_worker: int | None = None,
        gpus_per_worker: float | None = None,
        node: str | None = None,
        name: str = "a pool",
    ) -> RayResourcePool:
        """Return places for `workers` processes, close together where possible. Ray reserves them at first use."""
        cluster = self._cluster
        own = self._connected and cluster.address is None
        pool = RayResourcePool(
            [cluster.workers if workers is None else workers],
            cpus_per_worker=cluster.cpus_per_worker if cpus_per_worker is None else cpus_per_worker,
            gpus_per_worker=cluster.gpus_per_worker if gpus_per_worker is None else gpus_per_worker,
            node=node,
            start_timeout=cluster.start_timeout,
            join_seconds=0.0 if own else JOIN_SECONDS,  # no node joins a Ray of our own
            spread=True,
            other_pools=self._pools,
            name=name,
        )
        self._pools.append(pool)
        return pool

    def worker_group(self, pool: ResourcePool, classes: Any, name: str = "worker") -> Any:
        """Start the processes and make their workers; waits until all are there."""
        roles = {name: classes} if isinstance(classes, ClassWithInitArgs) else dict(classes)
        (groups,) = self.worker_groups([ProcessRequest(pool, roles, name)])
        return groups[name] if isinstance(classes, ClassWithInitArgs) else groups

    def worker_groups(self, requests: Sequence[ProcessRequest]) -> list[dict[str, WorkerGroup]]:
        """Start all processes, and then wait for them."""
        started = [self._start_processes(*request) for request in requests]
        for processes in started:
            processes.wait_until_started()
        return [
            {role: WorkerGroup(processes, role, made.cls) for role, made in request.classes.items()}
            for processes, request in zip(started, requests, strict=True)
        ]

    def _start_processes(self, pool: ResourcePool, roles: Mapping[str, ClassWithInitArgs], name: str) -> RayProcesses:
        if not isinstance(pool, RayResourcePool):
            raise ConfigError(f"{pool!r} is no place on Ray; use executor.resource_pool(...) or RayResourcePool(...).")
        processes = RayProcesses(
            pool,
            roles,
            name,
            log_dir=self._log_dir,
            distributions=self._distributions,
            start_timeout=self._cluster.start_timeout,
            inline_bytes=int(self._cluster.inline_kb * 1000),
            env=self._env(),
        )
        self._processes.append(processes)
        return processes

    def _env(self) -> dict[str, str]:
        """Return the variables that workers of a running cluster, which this process did not start, would not have."""
        if self._cluster.address is None:
            return {}
        secret = {"TOKEN", "KEY", "SECRET"}  # Ray shows a worker's environment to whoever asks
        return {
            name: value
            for name, value in os.environ.items()
            if name.startswith(SENT_VARIABLES) and not secret & set(name.split("_"))
        }

    def shutdown(self) -> None:
        """Kill the workers, give their places back, and end Ray or the connection to it if `start` made it."""
        if ray.is_initialized():
            for processes in self._processes:
                processes.shutdown()
            for pool in self._pools:
                pool.release()
        self._processes.clear()
        self._pools.clear()
        for module in self._registered:
            ray.cloudpickle.unregister_pickle_by_value(module)
        self._registered.clear()
        if self._connected:
            ray.shutdown()
            self._connected = False
        for name in self._set:
            del os.environ[name]
        self._set.clear()


def start_ray(address: str | None, num_cpus: int = LOGICAL_CPUS) -> None:
    """Connect this process to the Ray at `address`, or with None start one of its own with `num_cpus` logical cores.

    A Ray of its own ends with this process, even when that is killed. Raises WorkerError when Ray cannot be reached or
    started, ConfigError for a ray:// address.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options |= {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": _object_store_bytes()}
    else:
        _check_address(address)
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address or "local", **options)
    except Exception as error:
        where = f"the Ray at {address} cannot be joined" if address else "Ray cannot be started on this machine"
        raise WorkerError(
            f"{where}: {type(error).__name__}: {error}. See Ray's logs in /tmp/ray/session_latest/logs and "
            "docs/debugging.md; cluster.executor=in_process works without Ray."
        ) from error
    # ray.init puts a SIGTERM handler of its own over one that the program may have; SIG_DFL would leave Ray's log torn
    if threading.current_thread() is threading.main_thread() and on_terminate not in (signal.SIG_DFL, None):
        signal.signal(signal.SIGTERM, on_terminate)


def _check_address(address: str) -> None:
    if address.startswith("ray://"):
        raise ConfigError(
            f"cluster.address={address} is a Ray Client address, through which results do not stay on the cluster. "
            "Start the run on a node of the cluster with cluster.address=auto, or with `ray job submit`."
        )
    host, _, port = address.rpartition(":")
    if port.isdigit():  # ray.init itself takes minutes to find out
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise WorkerError(
                f"no Ray answers at cluster.address={address}: {error}. Start it with `ray start --head --port={port}`,"
                " or leave cluster.address out to have one started here."
            ) from error


def _object_store_bytes() -> int:
    """Return a size for the object store: up to 4 GiB of what shared memory has free (Ray spills the rest to disk)."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"
    return max(80 << 20, min(4 << 30, int(0.8 * shutil.disk_usage(folder).free)))
