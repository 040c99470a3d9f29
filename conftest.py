"""For the tests of rlcore and of its plugins: a test that takes too long fails, and shows where every process is.

The Ray that tests share is here too.

It is here because pytest reads a conftest.py for the folders below it: tests/conftest.py does not reach
plugins/*/tests, and a plugin in `addopts` must be importable before pytest has set any path.

pytest-timeout decides how long a test may take, with fixtures, and this file what happens then. At the limit a thread
signals every process beneath this one that prints its stacks (rlcore.stacks), and this one. Then SIGALRM fails the test
in the main thread. If the main thread does not come back from C code within GRACE seconds, this process ends: xdist
calls the test failed and starts another process for the rest. If C code also holds the interpreter's lock, Python's own
watchdog prints this process's stacks and ends it after GRACE seconds more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlcore.stacks import FOLDER_VARIABLE, STACK_SIGNAL, register_stacks

RAY_LIMIT = 300.0  # seconds for a test on Ray, whose workers import for five CPU seconds each
GRACE = 30.0  # seconds for a failed test to come back, with the ends of its `with` blocks
ANSWER = 3.0  # seconds at most for the processes to print their stacks
QUIET = 0.2  # seconds without a new line, after which they have been printed
RAY_PROCESSES = ("gcs_server", "raylet")  # of the cluster that a session's tests share

PROC = Path("/proc")
TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds; the kernel rounds a process's start down to it
LIMIT = pytest.StashKey["Limit"]()
CALLED = pytest.StashKey[float]()
WITHIN_PYTEST = re.compile(r'^  File "[^"\n]*/_pytest/(?:.|\n(?!\n))*\n?', re.MULTILINE)  # to the end of a thread
STDERR = pytest.StashKey[int]()
FOLDER = pytest.StashKey[Path]()
CACHE = pytest.StashKey[str | None]()


def pytest_configure(config: pytest.Config) -> None:
    """Give all processes of the session a folder for stacks and caches, and Ray's workers their share of the cores."""
    config.stash[STDERR] = os.dup(2)  # while a test runs, pytest captures 2
    if FOLDER_VARIABLE not in os.environ:  # xdist's processes, and sessions within tests, write to the first one's
        config.stash[FOLDER] = Path(tempfile.mkdtemp(prefix="rlcore-stacks-"))
        os.environ[FOLDER_VARIABLE] = str(config.stash[FOLDER])
        config.stash[CACHE] = os.environ.get("RLCORE_CACHE")
        os.environ["RLCORE_CACHE"] = str(config.stash[FOLDER] / "cache")
    # By Ray's default its workers hardly run beside two busy tests.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray's own name)
    os.environ.setdefault("RLCORE_IMPORT_TIMEOUT", "600")  # torch is slow to import on a busy machine
    register_stacks()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder."""
    if folder := config.stash.get(FOLDER, None):
        del os.environ[FOLDER_VARIABLE], os.environ["RLCORE_CACHE"]
        if (before := config.stash[CACHE]) is not None:
            os.environ["RLCORE_CACHE"] = before
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Start the limit of a test, in the place of pytest-timeout's own."""
    if threading.current_thread() is not threading.main_thread():
        return None  # pytest-timeout's own way
    item.stash[LIMIT] = Limit(item, settings)
    item.stash[LIMIT].start()
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    """End the limit: after the test, and before the traceback of a failure is shown."""
    limit = item.stash.get(LIMIT, None)
    if limit is None:
        return None
    limit.cancel()
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test that took too long also where its own code has caught the failure."""
    __tracebackhide__ = True
    item.stash[CALLED] = _seconds()  # older processes are those of fixtures, which other tests may use
    result, error = None, None
    try:
        result = yield
    except BaseException as raised:
        error = raised
    limit = item.stash.get(LIMIT, None)
    if limit is not None and limit.expired and not isinstance(error, pytest.fail.Exception):
        raise limit.failure() from error  # ray.wait, for one, makes a SystemError of it
    if error is not None:
        raise error
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Limit the fixtures of a failed test too, and kill what a test that took too long has started and left."""
    limit = item.stash.get(LIMIT, None)
    # pytest-timeout ended the limit at the failure.
    if limit is not None and limit.cancelled and not limit.settings.func_only:
        item.stash[LIMIT] = again = Limit(item, limit.settings)
        again.start()
    try:
        return (yield)
    finally:
        if limit is not None and limit.expired and CALLED in item.stash:
            kill([pid for pid in descendants() if _started(pid) >= item.stash[CALLED] - TICK])


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray for all tests of the session: an executor that finds this process connected uses it as it is."""
    from rlcore.config import ClusterConfig
    from rlcore.workers import make_executor

    spec = importlib.util.spec_from_file_location("ray_forks", Path(__file__).parent / "tests" / "ray_forks.py")
    assert spec is not None
    assert spec.loader is not None
    ray_forks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ray_forks)
    with ray_forks.forked_workers(), make_executor(ClusterConfig(executor="ray")):
        yield


@cache
def shares_ray(file: str) -> bool:
    """Whether tests of a file use the Ray that the tests of a session share."""
    return "ray_cluster" in Path(file).read_text()


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that share Ray, and run their files first: with xdist they take longest, as one process runs all.

    So no such test can lack the mark by which `make quick` leaves it out. A test with that mark and without a limit of
    its own has RAY_LIMIT.
    """
    for item in items:
        if "ray_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ray)
        if item.get_closest_marker("ray") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(RAY_LIMIT))
    items.sort(key=lambda item: not shares_ray(str(item.path)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, give all tests that share Ray to one process, and the tests of any other file to one.

    xdist itself runs a test that ended a process again, until no process is left to end.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneRayAndNoTestTwice(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "those that share Ray" if shares_ray(str(config.rootpath / file)) else file

        def remove_node(self, node: Any) -> str | None:
            files = self.assigned_work[node]
            for name in [name for name, tests in files.items() if all(tests.values())]:
                del files[name]
            for tests in files.values():
                crashed = next(test for test, done in tests.items() if not done)
                tests[crashed] = True
                super().remove_node(node)  # what is left of its files goes to other processes
                return crashed
            return super().remove_node(node)

    return OneRayAndNoTestTwice(config, log)


class Limit:
    """The time limit of one test, from `start` to `cancel`."""

    def __init__(self, item: pytest.Item, settings: Any) -> None:
        self.settings = settings
        self.expired = False
        self._item = item
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pytest time limit", daemon=True)
        self._main = threading.get_ident()

    @property
    def cancelled(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    def start(self) -> None:
        """Begin to count."""
        signal.signal(signal.SIGALRM, self._fail)
        stderr = self._item.config.stash[STDERR]
        faulthandler.dump_traceback_later(self.settings.timeout + 2 * GRACE + ANSWER, exit=True, file=stderr)
        self._thread.start()

    def cancel(self) -> None:
        """End it; a second call does nothing."""
        if not self.cancelled:
            self._over.set()
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _watch(self) -> None:
        if self._over.wait(self.settings.timeout):
            return
        if self._is_debugged():
            faulthandler.cancel_dump_traceback_later()
            return
        self.expired = True
        text = stacks()
        self._item.add_report_section("at the time-out", "stacks", text)
        signal.pthread_kill(self._main, signal.SIGALRM)
        if self._over.wait(GRACE):
            return
        name, seconds = self._item.nodeid, self.settings.timeout
        last = f"\n{name} took more than {seconds:g} s, and then did not end.\n{text}\n"
        with contextlib.suppress(OSError):
            os.write(self._item.config.stash[STDERR], last.encode())
        kill(descendants())
        os._exit(1)

    def _is_debugged(self) -> bool:
        import pytest_timeout

        return not self.settings.disable_debugger_detection and pytest_timeout.is_debugging()

    def _fail(self, *_: Any) -> None:
        __tracebackhide__ = True
        if not self.cancelled:
            raise self.failure()

    def failure(self) -> BaseException:
        """Return the exception that fails the test."""
        seconds = self.settings.timeout
        return pytest.fail.Exception(f"It took more than {seconds:g} s. Every process's stacks are below.")


# Processes


def descendants() -> list[int]:
    """Return the processes beneath this one, each before its own children. Only Linux has /proc."""
    children: dict[int, list[int]] = {}
    for stat in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    return list(_beneath(os.getpid(), children))


def _beneath(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    for child in children.get(pid, []):
        yield child
        yield from _beneath(child, children)


def _seconds() -> float:
    """Return the time as the starts of processes are counted, since the machine started."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _started(pid: int) -> float:
    with contextlib.suppress(OSError):
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]) * TICK
    return 0.0


def kill(processes: Iterable[int]) -> None:
    """Kill what a test has left, but not the shared Ray: its workers end with the handles of the test."""
    for pid in processes:
        with contextlib.suppress(OSError):
            if not _is_ray(pid):
                os.kill(pid, signal.SIGKILL)


def _is_ray(pid: int) -> bool:
    """Whether it is one of Ray's own processes or beneath one."""
    while pid > 1 and pid != os.getpid():
        name, _, rest = (PROC / str(pid) / "stat").read_text().partition("(")[2].rpartition(")")
        if name in RAY_PROCESSES:
            return True
        pid = int(rest.split()[1])
    return False


def stacks() -> str:
    """Return the stacks of this process and of all beneath it, by process; which print none is said too."""
    processes = [os.getpid(), *descendants()]
    folder = Path(os.environ[FOLDER_VARIABLE])
    files = {pid: folder / f"{pid}.txt" for pid in processes if prints_stacks(pid)}
    sizes = {pid: _size(file) for pid, file in files.items()}
    for pid in files:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
    _wait(files, sizes)
    parts = []
    for pid in processes:
        text = _read(files[pid], sizes[pid]) if pid in files else "(it prints no stacks)"
        parts.append(f"--- {pid}: {_command(pid)}\n{WITHIN_PYTEST.sub('', text).strip()}\n")
    return "\n".join(parts)


def prints_stacks(pid: int) -> bool:
    """Whether a process catches the signal; it would end another one."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    return pid == os.getpid()


def _wait(files: dict[int, Path], sizes: dict[int, int]) -> None:
    """Wait until every file has grown and none grows any more, for at most ANSWER seconds."""
    until = time.monotonic() + ANSWER
    last: list[int] = []
    while time.monotonic() < until:
        time.sleep(QUIET)
        now = [_size(file) for file in files.values()]
        if now == last and all(size > sizes[pid] for pid, size in zip(files, now, strict=True)):
            return
        last = now


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _read(file: Path, start: int) -> str:
    if not file.exists():
        return "(its stacks went to its standard error)"
    with file.open("rb") as stream:
        stream.seek(start)
        return stream.read().decode(errors="replace") or "(it did not answer)"


def _command(pid: int) -> str:
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "it has ended"
    return words[:200] or "it has ended"
