"""Attacks on each promise, by each mechanism of this machine. What an attack must not do is looked at from outside."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlcore.sandbox import Limits, run_python
from rlcore.sandbox.process import Process

SHORT = Limits(seconds=15)


def run(code, within, limits=SHORT, **given):
    return run_python(code, limits=limits, within=within, **given)


# Files


@pytest.mark.parametrize("target", ["/etc/passwd", "/etc/shadow", "/root/.bashrc", __file__, "/proc/1/environ"])
def test_no_file_of_the_host_is_read(target, within, held):
    held("files")
    result = run(f"print(open({target!r}).read())", within)
    assert result.status == 1
    assert result.stdout == ""
    assert "FileNotFoundError" in result.stderr or "PermissionError" in result.stderr


def test_a_file_of_this_user_is_not_read_through_a_link_or_a_descriptor(within, held, tmp_path):
    held("files")
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    with secret.open() as file:
        os.set_inheritable(file.fileno(), True)
        code = f"""
import os
os.symlink({str(secret)!r}, "link")
for path in ("link", {str(secret)!r}, "../" * 20 + {str(secret)!r}):
    try:
        print(open(path).read())
    except OSError as error:
        print(type(error).__name__)
for descriptor in range(3, 256):
    try:
        print(os.pread(descriptor, 100, 0))
    except OSError:
        pass
"""
        result = run(code, within)
    assert result.ok, result
    assert "the secret" not in result.stdout


def test_nothing_is_written_outside(within, held, tmp_path):
    held("files")
    open_to_all = Path(tempfile.gettempdir()) / f"open-{os.getpid()}-{within.mechanism}"
    targets = [tmp_path / "new", open_to_all, Path(sys.prefix) / "new", Path("/usr/lib/new"), Path("/new")]
    existing = tmp_path / "existing"
    existing.write_text("before")
    existing.chmod(0o666)
    code = f"""
import os
for path in {[str(path) for path in [*targets, existing]]!r}:
    for attack in (lambda: open(path, "w").write("x"), lambda: os.truncate(path, 0), lambda: os.unlink(path)):
        try:
            attack()
        except OSError:
            pass
"""
    assert run(code, within).ok
    assert [path for path in targets if path.exists()] == []
    assert existing.read_text() == "before"


def test_a_standard_library_file_is_not_changed(within):
    result = run("import os\nopen(os.__file__, 'a').write('# changed')", within)
    assert result.status == 1
    assert "# changed" not in Path(os.__file__).read_text()


def test_the_folder_is_private_empty_and_removed(within):
    code = """
import os, tempfile
print(os.listdir("."), os.getcwd() == os.environ["HOME"] == os.environ["TMPDIR"] == tempfile.gettempdir())
os.mkdir("a"); open("a/b", "w").write("x"); os.chmod("a", 0)
"""
    before = set(Path(tempfile.gettempdir()).iterdir())
    for _ in range(2):
        assert run(code, within).stdout == "['main.py'] True\n"
    left = {path for path in set(Path(tempfile.gettempdir()).iterdir()) - before if "sandbox" in path.name}
    deadline = time.monotonic() + 60
    while any(path.exists() for path in left):  # those of other tests that run meanwhile go too
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_removing_the_folder_follows_no_link(within, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o755)
    (kept / "file").write_text("x")
    assert run(f"import os\nos.symlink({str(kept)!r}, 'link')", within).ok
    assert (kept / "file").exists()
    assert kept.stat().st_mode & 0o777 == 0o755


# Environment


def test_environment_variables_are_not_read(within, held, monkeypatch):
    held("environment")
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    helper = subprocess.Popen(["sleep", "60"])  # a process of this user that has the variable
    try:
        code = f"""
import os
print(dict(os.environ))
for pid in (os.getpid(), os.getppid(), {os.getpid()}, {helper.pid}, "self", "thread-self"):
    try:
        print(open(f"/proc/{{pid}}/environ").read())
    except OSError:
        pass
"""
        result = run(code, within)
    finally:
        helper.kill()
        helper.wait()
    assert result.ok, result
    assert "hunter2" not in result.stdout
    assert "SECRET_TOKEN" not in result.stdout


# Network


def test_a_listener_on_loopback_is_not_reached(within, held, tmp_path):
    held("network")
    path = str(tmp_path / "s")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(path)
        unix.listen()
        code = f"""
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", {tcp.getsockname()[1]})), (socket.AF_UNIX, {path!r})):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as s:
                s.settimeout(3)
                s.connect(address)
                s.send(b"x")
                print("reached")
        except OSError:
            pass
"""
        result = run(code, within)
        tcp.settimeout(0.1)
        unix.settimeout(0.1)
        assert result.ok, result
        assert result.stdout == ""
        for listener in (tcp, unix):
            with pytest.raises(TimeoutError):
                listener.accept()


# Processes


BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""


def test_a_fork_bomb_is_stopped(within, held):
    held("processes")
    begin = time.monotonic()
    result = run(BOMB, within, Limits(seconds=2, processes=8))
    assert result.timed_out or result.cause == "more than 8 processes"
    assert time.monotonic() - begin < 12


def test_processes_and_threads_up_to_the_limit_work(within):
    code = """
import os, threading
for _ in range(3):
    if not os.fork():
        os._exit(0)
for _ in range(3):
    os.wait()
threads = [threading.Thread(target=lambda: None) for _ in range(3)]
[t.start() for t in threads]; [t.join() for t in threads]
print("done")
"""
    assert run(code, within, Limits(processes=5)).stdout == "done\n"


def test_many_runs_at_a_time_have_their_own_number_of_processes(within):
    from concurrent.futures import ThreadPoolExecutor

    code = "import os, time\nfor _ in range(3):\n    if not os.fork(): time.sleep(1); os._exit(0)\ntime.sleep(0.5)"
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: run(code, within, Limits(seconds=30, processes=6)), range(6)))
    assert [result.status for result in results] == [0] * 6, results


LEAVERS = {
    "child": "subprocess.Popen(command)",
    "session": "subprocess.Popen(command, start_new_session=True)",
    "daemon": (
        "if not os.fork():\n    os.setsid()\n"
        "    if not os.fork():\n        os.execv(command[0], command)\n    os._exit(0)"
    ),
    "silent": "subprocess.Popen(command, start_new_session=True, stdin=-3, stdout=-3, stderr=-3, env={}, cwd='/')",
}


@pytest.mark.parametrize("ending", ["", "import time; time.sleep(60)", "os._exit(0)", "os.kill(os.getpid(), 9)"])
@pytest.mark.parametrize("way", LEAVERS)
def test_nothing_that_code_started_is_left(way, ending, within, named):
    mark = f"left-behind-{os.getpid()}-{time.monotonic_ns()}"
    code = (
        f"import os, subprocess, sys\ncommand = [sys.executable, '-S', '-c', 'import time; time.sleep(90)', '{mark}']\n"
    )
    code += f"{LEAVERS[way]}\nimport time; time.sleep(0.2); print('started', flush=True)\n{ending}\n"
    begin = time.monotonic()
    result = run(code, within, Limits(seconds=3))
    assert "started" in result.stdout, result
    assert named(mark) == []
    assert time.monotonic() - begin < 15
    assert result.timed_out == ("sleep(60)" in ending)


def test_a_daemon_that_was_left_is_seen_by_this_test(named):
    mark = f"left-behind-{os.getpid()}"
    left = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)", mark])
    try:
        deadline = time.monotonic() + 5
        while named(mark) != [left.pid]:
            assert time.monotonic() < deadline
    finally:
        left.kill()
        left.wait()


def test_no_process_of_the_host_is_signalled(within, held):
    """Only the bystander gets a signal that would end it: where this fails, the tests' own user has more to lose."""
    held("processes")
    bystander = subprocess.Popen(["sleep", "60"])
    every = "lambda: os.kill(-1, 0)," if within.mechanism == "limits" else ""  # elsewhere these are the run's own
    try:
        code = f"""
import os, resource, signal
for attack in (
    lambda: os.kill({bystander.pid}, 9),
    lambda: os.pidfd_open({bystander.pid}) and signal.pidfd_send_signal(os.pidfd_open({bystander.pid}), 9),
    lambda: resource.prlimit({bystander.pid}, resource.RLIMIT_CPU, (0, 0)),
    lambda: os.kill({os.getpid()}, 0),
    {every}
):
    try:
        attack()
        print("reached")
    except OSError:
        pass
print("tried")
"""
        result = run(code, within)
        assert result.stdout == "tried\n"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_the_waiting_process_cannot_be_ended_by_the_code(within):
    if within.mechanism == "bwrap":
        pytest.skip("bwrap: it can, which ends the whole run")
    result = run("import os\ntry:\n    os.kill(os.getppid(), 9)\nexcept OSError: pass\nprint('lives')", within)
    assert (result.stdout, result.status) == ("lives\n", 0)


def test_a_killed_first_process_takes_the_others_along(within, named):
    """As the kernel may when memory runs out."""
    if within.mechanism != "namespaces":
        pytest.skip(f"{within.mechanism}: the others end only with the caller's deadline, or not at all")
    mark = f"first-{os.getpid()}-{time.monotonic_ns()}"
    command = f"[sys.executable, '-S', '-c', 'import time; time.sleep(90)', '{mark}']"
    code = f"import subprocess, sys, time\nsubprocess.Popen({command}, start_new_session=True)\ntime.sleep(90)"
    with Process(within.plan, Limits(seconds=60), {"main.py": code}) as process:
        deadline = time.monotonic() + 10
        while not named(mark):
            assert time.monotonic() < deadline
            process.pump(time.monotonic() + 0.05)
        process._process.kill()
        process.pump(time.monotonic() + 10)
        while named(mark):
            assert time.monotonic() < deadline + 10
        assert process.how_it_ended() == (None, "ended without a status")


# Memory, time, files and output


def test_memory_is_limited(within, held):
    held("memory")
    result = run("x = bytearray(300 * 2**20)", within, Limits(memory_mb=200))
    assert result.status == 1
    assert "MemoryError" in result.stderr
    assert run("x = bytearray(100 * 2**20); print(len(x))", within, Limits(memory_mb=200)).ok


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)", "input()\nwhile True: pass"])
def test_time_is_limited(code, within):
    begin = time.monotonic()
    result = run(code, within, Limits(seconds=1), stdin="x\n")
    assert result.timed_out
    assert result.status is None
    assert result.cause == "took longer than 1 s"
    assert 1 <= time.monotonic() - begin < 8


def test_ignored_signals_do_not_prolong_a_run(within):
    code = """
import signal
for n in range(1, 32):
    if n not in (9, 19):
        signal.signal(n, signal.SIG_IGN)
while True:
    pass
"""
    assert run(code, within, Limits(seconds=1)).timed_out


def test_cpu_time_of_threads_is_limited(within):
    code = "import os\nfor _ in range(2): os.fork()\nwhile True: pass"
    assert run(code, within, Limits(seconds=1)).timed_out


def test_a_giant_file_is_refused(within):
    code = """
with open("big", "wb", buffering=0) as file:
    while True:
        if not file.write(bytes(2**20)): break
"""
    result = run(code, within, Limits(file_mb=4))
    assert result.status == 1
    assert "OSError" in result.stderr
    assert "File too large" in result.stderr or "No space left" in result.stderr


def test_many_files_do_not_fill_the_memory(within):
    if within.mechanism == "limits":
        pytest.skip("limits: only the size of one file is limited")
    code = "for i in range(20):\n    open(str(i), 'wb').write(bytes(2**20))"
    result = run(code, within, Limits(file_mb=4))
    assert "No space left" in result.stderr


def test_output_is_cut(within):
    result = run("print('a' * 100_000)\nimport sys\nprint('b', file=sys.stderr)", within, Limits(output_kb=8))
    assert result.ok
    assert result.cut
    assert result.stdout == "a" * 8192
    assert result.stderr == "b\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_without_end_is_stopped(stream, within):
    result = run(f"import sys\nwhile True: sys.{stream}.write('x' * 10_000)", within, Limits(seconds=30, output_kb=4))
    assert result.cause == "wrote more than 256 KiB"
    assert result.status is None
    assert not result.timed_out
    assert len(getattr(result, stream)) == 4096


def test_hidden_output_is_no_hang(within):
    code = "import os, time\nos.close(1); os.close(2); os.close(0)\ntime.sleep(60)"
    assert run(code, within, Limits(seconds=1)).timed_out
    result = run("import os\nos.dup2(os.open('hidden', os.O_CREAT | os.O_WRONLY), 1)\nprint('x')", within)
    assert result.ok
    assert result.stdout == ""


def test_a_pipe_that_nobody_empties_is_no_hang(within):
    result = run("import time; time.sleep(0.2); print('did not read')", within, stdin="x" * 10**6)
    assert result.stdout == "did not read\n"
    assert run("import sys; print(len(sys.stdin.read()))", within, stdin="x" * 10**6).stdout == "1000000\n"


# Rights


def test_no_rights_and_no_new_namespaces(within):
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.prctl(39, 0, 0, 0, 0))  # no_new_privs
print([libc.unshare(0x10000000), libc.ptrace(0, 0, 0, 0), libc.syscall(101, 16, os.getppid(), 0, 0)])
print([libc.mount(b"x", b"/tmp", b"tmpfs", 0, None), libc.sethostname(b"x", 1), libc.chroot(b"/tmp")])
"""
    result = run(code, within)
    assert result.stdout == "1\n[-1, -1, -1]\n[-1, -1, -1]\n", result


def test_no_process_keeps_the_lifeline_open(within):
    """The process that waits holds CONTROL; the code's own has no descriptor but its three."""
    code = "import os\nfor n in range(3, 256):\n    try:\n        os.fstat(n); print(n)\n    except OSError: pass"
    assert run(code, within).stdout == ""
