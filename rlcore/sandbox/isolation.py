"""What this machine can do to isolate model-written code: tried, not guessed from versions and flags."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rlcore.errors import ConfigError, SandboxError
from rlcore.sandbox.limits import Limits, Result
from rlcore.sandbox.plan import ENVIRONMENT, Plan
from rlcore.sandbox.process import run_once

MECHANISMS = ("namespaces", "bwrap", "limits")
_TRY = Limits(seconds=20, memory_mb=256, processes=6, file_mb=4)


@dataclass(frozen=True)
class Guard:
    """Whether attacks of one kind failed when they were tried. `by` says what stops them, or what is lacking."""

    name: str
    held: bool
    by: str

    def __str__(self) -> str:
        return f"{self.name}: {'enforced by' if self.held else 'NOT ENFORCED on this machine:'} {self.by}"


@dataclass(frozen=True)
class Isolation:
    """How model-written code is isolated, and what that holds.

    network: no connection to any host, this one included. files: none of the host's can be read, but Python's own, and
    none written. processes: none of the host's can be signalled, and their number is limited. memory: each process has
    a limit. environment: no variables of this process can be read.
    refused: better mechanisms that this machine refuses, each with the reason.
    """

    plan: Plan
    network: Guard
    files: Guard
    processes: Guard
    memory: Guard
    environment: Guard
    refused: tuple[str, ...] = ()

    @property
    def mechanism(self) -> str:
        """Return "namespaces", "bwrap" or "limits"."""
        return self.plan.mechanism

    @property
    def guards(self) -> tuple[Guard, ...]:
        """Return all guards."""
        return self.network, self.files, self.processes, self.memory, self.environment

    def lines(self) -> list[str]:
        """Return what holds and what does not, for the log at a run's start."""
        first = f"model-written code runs isolated by {self.mechanism}"
        return [first, *map(str, self.guards), *(f"not possible here: {reason}" for reason in self.refused)]

    def log(self, logger: logging.Logger) -> None:
        """Log `lines()`, those that say what this machine cannot enforce as warnings."""
        lacking = {str(guard) for guard in self.guards if not guard.held}
        for line in self.lines():
            logger.log(logging.WARNING if line in lacking else logging.INFO, "%s", line)


def log_isolation() -> None:
    """Log how code is isolated on this machine, with a warning for each thing that it cannot enforce."""
    isolation().log(logging.getLogger(__name__))


@cache
def isolation() -> Isolation:
    """Return the best isolation of this machine. The first call of a process tries it, for some tenths of a second."""
    refused: list[str] = []
    for mechanism in MECHANISMS:
        try:
            found = probe(mechanism)
        except SandboxError as error:
            refused.append(f"{mechanism}: {error}")
        else:
            return replace(found, refused=(*refused, *found.refused))
    raise SandboxError(f"no process for model-written code can be started: {'; '.join(refused)}")


def probe(mechanism: str) -> Isolation:
    """Try a mechanism with harmless attacks and return what held; SandboxError when this machine refuses it."""
    if mechanism not in MECHANISMS:
        raise ConfigError(f"there is no isolation by {mechanism!r}; there are {', '.join(MECHANISMS)}")
    if mechanism == "bwrap" and shutil.which("bwrap") is None:
        raise SandboxError("no program bwrap on PATH")
    if mechanism != "limits" and sys.platform != "linux":
        raise SandboxError(f"needs Linux, not {sys.platform}")
    refused: list[str] = []
    for plan in _plans(mechanism):
        settled = _settle(plan, refused)
        if settled is not None:
            return _attack(settled, tuple(refused))
    raise SandboxError("; ".join(refused))


def _plans(mechanism: str) -> list[Plan]:
    """Return the ways to use a mechanism, the best first."""
    linux = sys.platform == "linux"
    plan = Plan(mechanism, landlock=mechanism == "limits" and linux, seccomp=linux)
    can_own = linux and os.getuid() == 0 and mechanism != "bwrap"
    return [replace(plan, own_user=True), plan] if can_own else [plan]


def _settle(plan: Plan, refused: list[str]) -> Plan | None:
    """Return the plan without the filters that the kernel refuses, or None when nothing runs under it."""
    while True:
        try:
            result = run_once(plan, "import json, ssl\nprint('runs')", "", _TRY, {})
        except SandboxError as error:
            reason = str(error)
        else:
            if result.stdout == "runs\n":
                return plan
            reason = f"Python does not run: {result.cause}; {result.stderr.strip()[-300:]}"
        way = "an own user" if plan.own_user else "this user"
        refused.append(f"{plan.mechanism} with {way}: {reason}")
        if plan.landlock and "landlock:" in reason:
            plan = replace(plan, landlock=False)
        elif plan.seccomp and "seccomp:" in reason:
            plan = replace(plan, seccomp=False)
        else:
            return None


_ATTACKS = """
import json, os, socket, sys
port, path, parent, secret, public, target, memory_mb = json.loads(sys.stdin.read())
local = ("127.0.0.1", port)

def works(attack):
    try:
        attack()
    except (OSError, MemoryError):
        return False
    return True

def connect(family, kind, address):
    with socket.socket(family, kind) as connection:
        connection.settimeout(2)
        connection.connect(address)
        connection.send(b"x")

def write():
    with open(target, "w") as file:
        file.write("x")

print(json.dumps({
    "tcp": works(lambda: connect(socket.AF_INET, socket.SOCK_STREAM, local)),
    "udp": works(lambda: connect(socket.AF_INET, socket.SOCK_DGRAM, local)),
    "unix": works(lambda: connect(socket.AF_UNIX, socket.SOCK_STREAM, path)),
    "read secret": works(lambda: open(secret).close()),
    "read public": works(lambda: open(public).close()),
    "write": works(write),
    "signal": works(lambda: os.kill(parent, 0)),
    "allocate": works(lambda: bytearray((memory_mb + 64) * 2**20)),
    "read environment": works(lambda: open(f"/proc/{parent}/environ").read()),
    "variables": sorted(os.environ),
}))
"""

_BOMB = """
import os, time
count = 1
try:
    for _ in range(60):
        if not os.fork():
            time.sleep(30)
            os._exit(0)
        count += 1
except OSError:
    pass
print(count, flush=True)
time.sleep(0.2)
os._exit(0)
"""


def _attack(plan: Plan, refused: tuple[str, ...]) -> Isolation:
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        path = f"{folder}/socket"
        unix.bind(path)
        unix.listen()
        secret = Path(folder) / "secret"
        secret.write_text("s")
        secret.chmod(0o600)
        target = Path(tempfile.gettempdir()) / f"rlcore-probe-{os.urandom(8).hex()}"  # a place open to all users
        given = [tcp.getsockname()[1], path, os.getpid(), str(secret), "/etc/passwd", str(target), _TRY.memory_mb]
        result = run_once(plan, _ATTACKS, json.dumps(given), _TRY, {})
        written = target.exists()
        target.unlink(missing_ok=True)
    if not result.ok:
        raise SandboxError(f"{plan.mechanism}: the trial run {result.cause}: {result.stderr.strip()[-300:]}")
    did = json.loads(result.stdout)
    # The process ids of a new namespace begin at 1, so a low one would be another process there.
    signalled = did["signal"] and os.getpid() > 20
    bomb = run_once(plan, _BOMB, "", _TRY, {})
    return Isolation(
        plan,
        network=_network(plan, [kind for kind in ("tcp", "udp", "unix") if did[kind]]),
        files=_files(plan, did["read secret"], did["read public"], written),
        processes=_processes(plan, signalled, bomb),
        memory=_memory(did["allocate"]),
        environment=_environment(did["read environment"], did["variables"]),
        refused=refused,
    )


def _network(plan: Plan, connected: list[str]) -> Guard:
    layers = [] if plan.mechanism == "limits" else ["a network namespace"]
    layers += ["a filter that refuses sockets (seccomp)"] if plan.seccomp else []
    lacks = f"code can connect to this host and others ({', '.join(connected)})"
    return Guard("network", not connected, lacks if connected else " and ".join(layers))


def _files(plan: Plan, secret: bool, public: bool, written: bool) -> Guard:
    if secret or public or written:
        whose = "this user can" if secret else "any user can"
        return Guard("files", False, f"code can read {'and write ' if written else ''}what {whose}")
    by = "landlock (modes and times of files can be changed)" if plan.landlock else "a file system of its own"
    return Guard("files", True, by)


def _processes(plan: Plan, signalled: bool, bomb: Result) -> Guard:
    most = _TRY.processes
    stopped = bomb.cause.startswith("more than") or (bomb.stdout.strip().isdecimal() and int(bomb.stdout) <= most)
    if signalled or not stopped:
        lacks = ["code can signal this user's processes"] if signalled else []
        return Guard("processes", False, "; ".join([*lacks, *([] if stopped else ["their number has no limit"])]))
    if plan.mechanism != "limits":
        return Guard("processes", True, "a process namespace and RLIMIT_NPROC")
    return Guard("processes", True, "a user of its own and RLIMIT_NPROC" if plan.own_user else "seccomp and a watcher")


def _memory(allocated: bool) -> Guard:
    return Guard("memory", not allocated, "code can take all of it" if allocated else "RLIMIT_AS of each process")


def _environment(readable: bool, variables: list[str]) -> Guard:
    extra = sorted(set(variables) - {*ENVIRONMENT, "HOME", "TMPDIR", "PWD", "LC_CTYPE"})
    if readable or extra:
        return Guard("environment", False, f"code can read {', '.join(extra) or 'that of processes of this user'}")
    return Guard("environment", True, "an empty one")
