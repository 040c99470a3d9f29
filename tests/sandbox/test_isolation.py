"""isolation(): what it says is what attacks found, also where the machine refuses a layer."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rlcore
from rlcore.errors import ConfigError, SandboxError
from rlcore.sandbox import Isolation, Limits, isolation, probe, run_python
from rlcore.sandbox.isolation import _attack
from rlcore.sandbox.plan import Plan
from rlcore.sandbox.process import run_once

GUARDS = ("network", "files", "processes", "memory", "environment")
SANDBOX = Path(rlcore.__file__).parent


def test_the_best_that_works_is_taken(isolations):
    best = next(found for found in isolations.values() if not isinstance(found, str))
    assert isolation().plan == best.plan
    assert isolation() is isolation()


def test_root_with_namespaces_holds_everything():
    """So that no fault of ours passes for a machine that refuses: unshare is asked, which is not ours."""
    if sys.platform != "linux" or os.getuid() != 0:
        pytest.skip("not root of a Linux")
    apart = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "mount", "-t", "tmpfs", "x", "/mnt"]
    if subprocess.run(apart, capture_output=True).returncode or os.uname().machine != "x86_64":
        pytest.skip("no namespaces here")
    if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 12):
        pytest.skip(f"Linux {os.uname().release} has no mount_setattr")
    assert isolation().plan == Plan("namespaces", own_user=True)
    assert isolation().refused == ()
    assert [guard.name for guard in isolation().guards if guard.held] == list(GUARDS)


def test_lines_name_every_guard(within):
    lines = within.lines()
    assert lines[0] == f"model-written code runs isolated by {within.mechanism}"
    for name in GUARDS:
        assert sum(line.startswith(f"{name}: ") for line in lines) == 1
        assert getattr(within, name) in within.guards


@pytest.mark.skipif(sys.platform != "linux", reason="layers of Linux")
def test_what_is_lacking_is_said(caplog, tmp_path):
    """With no layer at all each attack succeeds, and each guard says so."""
    bare = _attack(Plan("limits", seccomp=False), ("namespaces: refused",))
    assert [guard.name for guard in bare.guards if not guard.held][:2] == ["network", "files"]
    assert (
        "network: NOT ENFORCED on this machine: code can connect to this host and others (tcp, udp, unix)"
        in bare.lines()
    )
    assert "files: NOT ENFORCED on this machine: code can read and write what this user can" in bare.lines()
    assert not bare.processes.held
    assert bare.lines()[-1] == "not possible here: namespaces: refused"
    with caplog.at_level(logging.INFO, logger="test"):
        bare.log(logging.getLogger("test"))
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [str(guard) for guard in bare.guards if not guard.held]
    (tmp_path / "file").write_text("seen")
    assert run_python(f"print(open({str(tmp_path / 'file')!r}).read())", within=bare).stdout == "seen\n"


@pytest.mark.parametrize(
    ("plan", "held"),
    [
        (Plan("limits", seccomp=True), {"network"}),
        (Plan("limits", seccomp=False, landlock=True), {"files"}),
        (Plan("namespaces", own_user=True, seccomp=False), set(GUARDS)),
        (Plan("namespaces", seccomp=False), {"network", "files", "memory", "environment"}),
    ],
)
def test_each_layer_holds_its_part(plan, held):
    try:
        found = _attack(plan, ())
    except SandboxError as error:
        pytest.skip(str(error))
    tried = {"network", "files"} if plan.mechanism == "limits" else {*held, "network", "files"}
    assert {guard.name for guard in found.guards if guard.held} & tried == held


def test_the_folders_of_python_are_read_only():
    """Also for root's own user id, which without a user of its own the code has on the host."""
    target = Path(os.__file__).parent / f"new-{os.getpid()}"
    try:
        result = run_once(Plan("namespaces"), f"open({str(target)!r}, 'w')", "", Limits(), {})
    except SandboxError as error:
        pytest.skip(str(error))
    written = target.exists()
    target.unlink(missing_ok=True)
    assert not written
    assert "Read-only file system" in result.stderr


def test_the_process_begins_with_no_variables(monkeypatch):
    """Not in its memory either, where those that were removed later would still be."""
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    bare = Plan("limits", seccomp=False)
    result = run_once(bare, "print(repr(open('/proc/self/environ').read()))", "", Limits(), {})
    assert result.stdout == "''\n", result


def test_an_unknown_mechanism():
    with pytest.raises(ConfigError, match="no isolation by 'magic'; there are namespaces, bwrap, limits"):
        probe("magic")


SHOW = "import sys; sys.path.insert(0, sys.argv[1])\nfrom rlcore.sandbox import *\n"


def _python_for_all(tmp_path: Path) -> str:
    """Return a Python that each user can start; this one may lie in a folder of root's."""
    for program in (sys.executable, "/usr/bin/python3"):
        asked = [program, "-c", "import sys; print(sys.version_info >= (3, 11))"]
        try:
            done = subprocess.run(asked, user=65534, cwd="/", env={}, capture_output=True, text=True)
        except (PermissionError, FileNotFoundError):
            continue
        if done.stdout == "True\n":
            return program
    return pytest.skip("no Python 3.11 that all users can start")


def _copy_for_all() -> Path:
    """Copy what rlcore.sandbox imports to a place that all users can read."""
    folder = Path("/var/tmp") / f"rlcore-{os.getpid()}"
    (folder / "rlcore").mkdir(parents=True)
    for name in ("__init__.py", "errors.py", "processes", "sandbox"):
        source = SANDBOX / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / "rlcore" / name)
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    return folder


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mechanism", ["namespaces", "bwrap", "limits"])
def test_an_ordinary_user(mechanism, tmp_path):
    """Root runs these tests in containers; elsewhere an ordinary user does, for whom user namespaces are the way."""
    program, folder = _python_for_all(tmp_path), _copy_for_all()
    user = 100_000 + os.getpid()  # tests beside this one have others
    code = f"""{SHOW}
import subprocess
from rlcore.errors import SandboxError
try:
    found = probe({mechanism!r})
except SandboxError as error:
    print("refused", error)
    raise SystemExit
for guard in found.guards:
    print(guard.name, guard.held)
print(found.plan.own_user)
bomb = "import os, time\\nwhile True:\\n    try: os.fork()\\n    except OSError: time.sleep(0.01)"
result = run_python(bomb, limits=Limits(seconds=1, processes=6), within=found)
print("bomb", result.timed_out or result.cause)
daemon = "import os, time\\nif not os.fork():\\n    os.setsid()\\n    if not os.fork(): time.sleep(90)"
print("daemon", run_python(daemon, within=found).cause)
"""
    try:
        done = subprocess.run(
            [program, "-c", code, str(folder)],
            user=user,
            group=user,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
            env={"PATH": os.environ["PATH"]},
        )
        time.sleep(0.5)  # bwrap's own process ends a moment after the call has returned
        listed = subprocess.run(["ps", "-u", str(user), "-o", "stat=,args="], capture_output=True, text=True).stdout
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("refused"):
        pytest.skip(done.stdout)
    lines = done.stdout.splitlines()
    assert lines[:6] == [*(f"{name} True" for name in GUARDS), "False"]
    assert lines[6] in ("bomb True", "bomb more than 6 processes")
    assert lines[7] == "daemon ended with status 0"
    assert [line for line in listed.splitlines() if not line.startswith("Z")] == []


REFUSING = 'for n in user mnt net pid; do echo 0 > /proc/sys/user/max_${n}_namespaces; done; exec "$@"'
"""In a user namespace of its own, has the kernel refuse further namespaces, as containers and some systems do."""


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces of Linux")
def test_the_way_back_where_namespaces_are_refused():
    unshare = ["unshare", "--user", "--map-root-user", "sh", "-c", REFUSING, "sh"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no user namespace to refuse others in")
    code = f"{SHOW}\nprint(*isolation().lines(), sep='\\n')\nprint(run_python('print(6 * 7)').stdout)"
    done = subprocess.run([*unshare, sys.executable, "-c", code, str(SANDBOX.parent)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "model-written code runs isolated by limits"
    assert "42" in lines
    refused = [line for line in lines if line.startswith("not possible here: ")]
    assert any("namespaces with an own user: " in line and "No space left on device" in line for line in refused)
    assert any("own user: Invalid argument" in line for line in refused)


def test_isolation_is_typed_and_frozen(within):
    assert isinstance(within, Isolation)
    with pytest.raises(AttributeError):
        within.refused = ()
