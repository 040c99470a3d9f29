"""The processes of a pool on Ray: starting them, sending them calls, and explaining their failures and deaths."""

from __future__ import annotations

import itertools
import os
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.annotations import RayDeprecationWarning

from rlcore.errors import RLCoreError, WorkerError
from rlcore.workers.contract import CallArgs, DeclaredResult
from rlcore.workers.event_loop import CANCELLED, has_async_methods, is_async
from rlcore.workers.executor import KERNEL_CACHES
from rlcore.workers.group import Processes
from rlcore.workers.pool import ClassWithInitArgs
from rlcore.workers.progress import STARTS, ProgressWatch, Stall, read_stall, why_hung
from rlcore.workers.ray.call import EncodedCall, encode_calls
from rlcore.workers.ray.future import RayFuture
from rlcore.workers.ray.nodes import ray_resources
from rlcore.workers.ray.pool import RayResourcePool
from rlcore.workers.ray.session import RaySession
from rlcore.workers.ray.store import INLINE_BYTES
from rlcore.workers.ray.worker import HostInfo, WorkerHost
from rlcore.workers.worker import rank_name

DEATH_SECONDS = 3.0
"""After an exception on one rank: seconds to find out whether another rank's death caused it."""
STRAGGLER_SECONDS = 15.0
"""After an exception on one rank: seconds that the others may take to finish the call before they count as hung."""
COROUTINES = {"coroutines": 256}
"""The threads of a process with `async def` methods that wait for their results, and their name. Each waits for one."""
LOG_LINES = 20
"""Last lines of a dead worker's log that its error shows."""


class Stragglers(NamedTuple):
    """Ranks that still run a call which has failed on another rank, by the reference of their reply."""

    ranks: dict[Any, int]
    failure: str
    until: float


class RayProcesses(Processes):
    """One actor per place of the pool. Each holds a worker of every class once `wait_until_started` returns.

    `env` is added to the environment of every process.
    """

    def __init__(
        self,
        pool: RayResourcePool,
        classes: Mapping[str, ClassWithInitArgs],
        name: str,
        *,
        log_dir: Path | None = None,
        distributions: Mapping[str, str] | None = None,
        start_timeout: float = 120.0,
        stall_timeout: float = 0.0,
        inline_bytes: int = INLINE_BYTES,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.world_size = pool.world_size
        self.name = name
        self.session = RaySession()
        self._pool = pool
        self._classes = classes
        self._log_dir = log_dir.absolute() if log_dir else None
        self._start_timeout = start_timeout
        self._stall_timeout = stall_timeout
        self._watch_keys: list[str] = []
        self.meshes = {}
        self._broken: WorkerError | None = None
        self._stragglers: Stragglers | None = None
        self._infos: list[HostInfo] = []
        self.hosts: list[Any] = []
        self._inline_bytes = inline_bytes
        self._runs: dict[tuple[int, bool, int | None], Any] = {}
        self._running: list[weakref.ref[RayFuture]] = []
        self._env = {**(env or {}), **process_environment(pool)}
        try:
            self._create(distributions or {})
        except BaseException:
            self.shutdown()
            raise

    # -- start

    def wait_until_started(self) -> None:
        """Wait for the processes and construct their workers. Raises WorkerError, or a worker's own error."""
        try:
            self._wait_for_hosts()
            self._set_contexts(self._pool.gpus_per_worker)
            self._construct(self._classes)
            _STARTED.add(self)
        except BaseException:
            self.shutdown()
            raise

    def _create(self, distributions: Mapping[str, str]) -> None:
        # Actor names are unique in a Ray job, and a killed actor keeps its name for a while.
        token = os.urandom(3).hex()
        is_async = has_async_methods(class_args.cls for class_args in self._classes.values())
        # Other methods would leave the process's main thread for the sake of threads that are not needed.
        host_cls = ray.remote(concurrency_groups=COROUTINES)(WorkerHost) if is_async else ray.remote(WorkerHost)
        places = self._pool.actor_options()
        self._one_node = sum(node["Alive"] for node in ray.nodes()) == 1
        for rank, options in enumerate(places):
            actor = host_cls.options(
                name=f"{self.name}-{rank}-{token}", runtime_env={"env_vars": self._env}, max_restarts=0, **options
            )
            self._watch_keys.append(f"rlcore-stall/{self.name}-{rank}-{token}")
            watch = ProgressWatch(self._watch_keys[-1], self._stall_timeout)
            host = actor.remote(self.name, rank, distributions, self._inline_bytes, self._one_node, watch, is_async)
            self.hosts.append(host)

    def _wait_for_hosts(self) -> None:
        # One at a time: the error of a failed process must not wait for a slow one.
        logs = [self._log_dir and self._log_dir / f"{self.name}-{rank}.log" for rank in range(self.world_size)]
        # The run folder, which holds the logs, may have been made after the processes.
        waiting = {host.describe.remote(logs[rank]): rank for rank, host in enumerate(self.hosts)}
        infos: dict[int, HostInfo] = {}
        deadline = time.monotonic() + self._start_timeout
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerError(self._not_started(sorted(waiting.values())))
            for ref in ready:
                rank = waiting.pop(ref)
                try:
                    infos[rank] = ray.get(ref)
                except Exception as error:
                    raise self.failure(error, rank, self.name, "start-up", {}) from None
        self._infos = [infos[rank] for rank in range(self.world_size)]

    def _not_started(self, ranks: list[int]) -> str:
        return (
            f"{self.name}: {len(ranks)} of {self.world_size} worker processes (ranks {ranks}) did not start within "
            f"{self._start_timeout:g} s; {ray_resources()}. Their places are reserved, so Python itself or the import "
            "of rlcore is slow or stuck on their node. Ray's own logs are in /tmp/ray/session_latest/logs there. Raise "
            "cluster.start_timeout if the node is just slow."
        )

    def _set_contexts(self, gpus: float) -> None:
        port = self._infos[0].port
        seen: Counter[str] = Counter()
        for host, info in zip(self.hosts, self._infos, strict=True):
            host.set_context.remote(self.world_size, seen[info.node], gpus, (self._infos[0].address, port))
            seen[info.node] += 1

    def _construct(self, classes: Mapping[str, ClassWithInitArgs]) -> None:
        started = []
        for role, class_args in classes.items():
            # Once into the object store, not once per rank into each message.
            stored = ray.put((class_args.cls, class_args.args, class_args.kwargs))
            refs = {host.construct.remote(role, stored): rank for rank, host in enumerate(self.hosts)}
            started.append(RayFuture(self, role, "__init__", refs))
        for future in started:
            future.wait()

    # -- calls

    def submit(
        self,
        role: str,
        method: str,
        calls: Sequence[CallArgs | None],
        declared: Sequence[DeclaredResult | None] | None = None,
    ) -> RayFuture:
        """Send the call. A large argument of several ranks is put into Ray's object store once."""
        self.check_session()
        # Give ranks that still run a failed call the rest of their time, or `check` would call them hung too early.
        if self._stragglers is not None:
            refs = list(self._stragglers.ranks)
            left = max(0.0, self._stragglers.until - time.monotonic())
            ray.wait(refs, num_returns=len(refs), timeout=left + 0.01)  # Ray rounds down to whole milliseconds
        self.check()
        refs_sent: dict[Any, int] = {}
        columns: dict[Any, Mapping[str, Any] | None] = {}
        runs_async = self.is_async(role, method)
        try:
            for rank, sent in enumerate(encode_calls(role, method, calls, declared)):
                if sent is not None:
                    # Processes of other groups on the same place take turns: wait for the last one's calls so far.
                    previous = self._pool.previous_user(self, rank)
                    after = {} if previous is None else {"after": previous[0].ping_one(previous[1])}
                    gives = None if declared is None else declared[rank]
                    ref, column_refs = self._send(rank, sent, gives, after, runs_async)
                    refs_sent[ref], columns[ref] = rank, column_refs
                    self._pool.set_user(self, rank)
        except Exception as error:  # pickling an argument can raise anything
            failure = WorkerError(f"{role}.{method}(): its arguments cannot be sent to the workers: {error}")
            self._broken = failure if refs_sent else None  # ranks that run the call may wait for the others forever
            raise failure from error
        future = RayFuture(self, role, method, refs_sent, columns, is_async=runs_async)
        self._running = [*(weakref.ref(earlier) for earlier in self.running()), weakref.ref(future)]
        return future

    def _send(
        self,
        rank: int,
        sent: EncodedCall,
        declared: DeclaredResult | None,
        after: Mapping[str, Any],
        is_async: bool,
    ) -> tuple[Any, Mapping[str, Any] | None]:
        """Send a rank its call; return the reference of its reply, and those of its large columns if they are known."""
        args: tuple[Any, ...] = (sent.message, *sent.extra)
        if is_async:
            # Begins in the order of the calls; the thread that waits for the result holds up no other call.
            args, after = (self.hosts[rank].begin.remote(*args, **after),), {}
        if declared is None or not self._one_node:
            return self._run(rank, is_async, None).remote(*args, **after), None
        names = declared.may_exceed(self._inline_bytes)
        refs = self._run(rank, is_async, 1 + len(names)).remote(*args, **after)
        reply, *columns = refs if names else [refs]
        return reply, dict(zip(names, columns, strict=True))

    def _run(self, rank: int, is_async: bool, values: int | None) -> Any:
        """Return a rank's `run_declared` with `values` return values; None: its `run`, which yields any number."""
        # Kept, as `options` makes a new object each time.
        key = rank, is_async, values
        if key not in self._runs:
            run = self.hosts[rank].run if values is None else self.hosts[rank].run_declared
            with warnings.catch_warnings():  # store.py says why `dynamic` is needed
                warnings.simplefilter("ignore", RayDeprecationWarning)
                self._runs[key] = run.options(num_returns=values or "dynamic", **_in_threads(is_async))
        return self._runs[key]

    def call(self, rank: int, role: str, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call any method of a rank's worker, and return Ray's reference of its result."""
        self.check()
        options = _in_threads(self.is_async(role, method))
        return self.hosts[rank].call.options(**options).remote(role, method, *args, **kwargs)

    def is_async(self, role: str, method: str) -> bool:
        """Whether a method of a role is `async def`."""
        return role in self._classes and is_async(self._classes[role].cls, method)

    def running(self) -> list[RayFuture]:
        """Return the calls that no caller has waited for yet, in order."""
        return [future for known in self._running if (future := known()) is not None and not future.is_settled]

    def all_started(self) -> set[RayProcesses]:
        """Return these and all other processes that this Python process has started and still holds."""
        return {self, *(processes for processes in _STARTED if processes.session.is_current)}

    def ping(self, but: Iterable[int]) -> dict[Any, int]:
        """Ping all ranks except `but`; return the references of their answers, by rank. A dead rank's answer fails."""
        skipped = set(but)
        return {host.ping.remote(): rank for rank, host in enumerate(self.hosts) if rank not in skipped}

    def spans(self) -> RayFuture:
        """See Processes."""
        self.check_session()
        refs = {host.spans.remote(): rank for rank, host in enumerate(self.hosts)}
        future = RayFuture(self, self.name, "spans", refs)
        return future.collect_with(lambda by_rank: list(itertools.chain.from_iterable(by_rank)))

    def ping_one(self, rank: int) -> list[Any]:
        """Return references that are there once all calls of one rank so far have ended; none after shutdown."""
        refs = [ref for future in self.running() if future.is_async for ref in future.refs_of(rank)]
        return [*refs, *(host.ping.remote() for host in self.hosts[rank : rank + 1])]

    # -- failures

    @property
    def is_usable(self) -> bool:
        """Whether the processes can be called: none is known to have died or to hang."""
        return self._broken is None

    def check_session(self) -> None:
        """Raise WorkerError when the Ray session of the processes has ended."""
        self.session.check(f"{self.name}: the group")

    def check(self) -> None:
        """Raise WorkerError when the processes are unusable: one has died, or hangs because another failed."""
        self.check_session()
        if self._broken is None and self._stragglers is not None:
            ranks, failure, until = self._stragglers
            _, hung = ray.wait(list(ranks), num_returns=len(ranks), timeout=0)
            if not hung:
                self._stragglers = None
            elif time.monotonic() >= until:
                self._broken = WorkerError(
                    f"ranks {sorted(ranks[ref] for ref in hung)} did not come back from a call that failed on another "
                    f"rank, so the group can no longer be used. The failure was: {failure}"
                )
        if self._broken is not None:
            raise self._broken.with_traceback(None)

    def check_progress(self, role: str, method: str, ranks: Sequence[int], ended: Sequence[int]) -> None:
        """Raise WorkerError if a call hangs: none of the `ranks` that still run it makes progress, as `Stall` says.

        Only a start may hang by itself, and not while it computes; of other calls one rank at least has to wait in a
        collective.
        """
        if not self._stall_timeout:
            return
        stalls: list[Stall] = []
        for rank in ranks:
            stall = read_stall(self._watch_keys[rank])
            if stall is None or (stall.role, stall.method) != (role, method) or stall.place == "data":
                return
            stalls.append(stall)
        hung = bool(stalls) and min(stall.seconds for stall in stalls) >= self._stall_timeout
        idle_start = method in STARTS and not any(stall.spins for stall in stalls)
        if hung and (idle_start or any(stall.place == "collective" for stall in stalls)):
            names = [self._name_of(role, rank) for rank in ranks]
            self._broken = WorkerError(why_hung(names, f"{role}.{method}", stalls, ended))
            raise self._broken

    def _name_of(self, role: str, rank: int) -> str:
        mesh = self.meshes.get(role)
        # The coordinate on a mesh of one axis is the rank itself.
        coordinates = mesh.coordinates[rank] if mesh is not None and len(mesh.axes) > 1 else None
        where = f" on {self._infos[rank].address}" if self._infos else ""
        return rank_name(role, rank, self.world_size, coordinates) + where

    def failure(
        self, error: Exception, rank: int, role: str, method: str, waiting: Mapping[Any, int], blocks: bool = True
    ) -> RLCoreError:
        """Return the controller's error for the first failure of a call. `waiting` holds the ranks that still run it.

        `blocks`: they run no other call meanwhile.

        If a process has died, the error is about its death, not about the errors that it caused on other ranks.
        """
        # A rank that died makes its peers fail in their collectives; their errors may arrive first.
        if not isinstance(error, RayActorError):
            rank, error = self._dead(waiting) or (rank, error)
        where = self._name_of(role, rank)
        if isinstance(error, RayActorError) and not self.hosts:
            return WorkerError(f"{where}, in {method}: {CANCELLED}")
        if isinstance(error, RayActorError):
            self._broken = WorkerError(f"{where} died during {method}: {_cause(error)}\n{self._last_lines(rank)}")
            return self._broken
        cause = error.cause if isinstance(error, RayTaskError) else error
        known = (
            cause
            if isinstance(cause, RLCoreError)
            else WorkerError(f"{where}, in {method}: {type(cause).__name__}: {cause}")
        )
        if waiting and blocks:
            self._stragglers = Stragglers(dict(waiting), str(known), time.monotonic() + STRAGGLER_SECONDS)
        return known

    def _dead(self, waiting: Mapping[Any, int]) -> tuple[int, RayActorError] | None:
        watched = dict(waiting) | self.ping(waiting.values())
        deadline = time.monotonic() + DEATH_SECONDS
        while watched and (left := deadline - time.monotonic()) > 0:
            for ref in ray.wait(list(watched), num_returns=1, timeout=left)[0]:
                rank = watched.pop(ref)
                try:
                    ray.get(ref)
                except RayActorError as death:
                    return rank, death
                except Exception:  # alive, with an error of its own; the first error is reported
                    continue
        return None

    def _last_lines(self, rank: int) -> str:
        """Return the end of a rank's log for a message, or the log's path if this machine cannot read it."""
        if not self._infos:
            return "Ray's own logs are in /tmp/ray/session_latest/logs."
        info = self._infos[rank]
        texts = [Path(log) for log in info.logs if Path(log).is_file()]
        if not texts:
            return f"Its log is {' and '.join(info.logs)} on {info.address}."
        tails = [text.read_text(errors="replace").splitlines()[-LOG_LINES:] for text in texts]
        lines = list(itertools.chain.from_iterable(tails))
        return f"Last lines of {' and '.join(info.logs)}:\n" + "\n".join(f"    {line}" for line in lines or ["(empty)"])

    def shutdown(self) -> None:
        """Kill the processes."""
        # Killed, not asked to stop: a rank may hang in a collective. With its session, a process has ended already.
        for host in self.hosts if self.session.is_current else ():
            ray.kill(host)
        if self.hosts:
            self._pool.leave()
        self.hosts.clear()
        self._runs.clear()
        self._running.clear()
        self._broken = WorkerError(f"{self.name}: the group was shut down; start a new one.")


_STARTED: WeakSet[RayProcesses] = WeakSet()
"""All worker processes that this Python process has started and still holds."""


def _in_threads(is_async: bool) -> dict[str, str]:
    """Return the options of a call that waits for a coroutine."""
    return {"concurrency_group": next(iter(COROUTINES))} if is_async else {}


def process_environment(pool: RayResourcePool) -> dict[str, str]:
    """Return the environment variables of each process of a pool."""
    threads = str(pool.cpus_per_worker)
    # Ranks that share cores must not spin while they wait for a thread.
    unless_set = {"OMP_WAIT_POLICY": "PASSIVE", **KERNEL_CACHES}
    env = {name: os.environ.get(name, value) for name, value in unless_set.items()}
    env |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    # A process without a GPU must not create a CUDA context on the others'.
    return env | ({"CUDA_VISIBLE_DEVICES": ""} if pool.gpus_per_worker == 0 else {})


def _cause(error: RayActorError) -> str:
    """Return Ray's account of a death, without the actor's ids and without Ray's list of possible causes."""
    ids = ("class_name:", "actor_id:", "pid:", "name:", "namespace:", "ip:")
    account = " ".join(line.strip() for line in str(error).splitlines() if not line.strip().startswith(ids))
    known, guess, _ = account.partition("Some common causes include")
    return known + ("It was killed, ran out of memory (see dmesg), crashed, or called os._exit." if guess else "")
