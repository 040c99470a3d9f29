"""Ray's workers as forks of one process that has imported what they import, for the Ray that a session's tests share.

A worker imports torch and transformers for five CPU seconds, and the tests start hundreds of workers. Here the imports
are made once: Ray runs this file in the place of its own setup_worker.py (`python tests/ray_forks.py ARGUMENT ...`),
which asks the server for a fork that runs the worker's program, and ends when that fork ends. A fork has the
environment, the folder and the open files that Ray gave. Ray itself, its processes and its calls are as always.

Tests of `rlcore train` as a command, of docs/, and of several nodes start a Ray of their own, with workers that import.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = "RLCORE_RAY_FORKS"
"""The environment variable with the folder of the servers' sockets: a server for each of Ray's jobs."""
NAME = "ray_forks"
"""The name of a server as a process."""
IMPORTS = (
    "ray._private.workers.setup_worker",
    "ray._private.workers.default_worker",
    "transformers.models.llama.modeling_llama",
    "rlcore.workers.ray.worker",
    "rlcore.engine.worker",
)
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Give a Ray that starts within the block workers that are forks."""
    from ray._private.parameter import RayParams

    original = RayParams.__init__

    def with_this_file(self: RayParams, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.setup_worker_path = self.setup_worker_path or str(Path(__file__).resolve())

    # A socket's path has at most 107 bytes, so it is not in the folder of TMPDIR.
    with tempfile.TemporaryDirectory(prefix="rlcore-forks-", dir="/tmp") as folder:
        os.environ[FOLDER] = folder
        RayParams.__init__ = with_this_file
        try:
            yield
        finally:
            RayParams.__init__ = original
            del os.environ[FOLDER]
            for log in Path(folder).glob("*.log"):
                sys.stderr.write(log.read_text(errors="replace"))  # of servers that failed


def ask(arguments: list[str]) -> None:
    """Ask the server of this job for a worker, and wait for its end."""
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    data = json.dumps(request).encode()
    connection, started = _connect(Path(os.environ[FOLDER]) / "{RAY_RAYLET_PID}-{RAY_JOB_ID}".format(**os.environ))
    with connection:
        connection.sendall(len(data).to_bytes(4))
        socket.send_fds(connection, [b"f"], [0, 1, 2])
        connection.sendall(data)
        connection.recv(1)
    if started is not None:
        started.wait()  # so that the forks stay beneath Ray's process


def _connect(path: Path) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """Return a connection to the server, and its process if it was started here, as none ran.

    The first worker of a job starts it, as Ray's library reads the job's variables when it is imported.
    """
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            connection.connect(str(path))
            return connection, None
        path.unlink(missing_ok=True)  # of a server that was killed
        command = [sys.executable, __file__, "serve", str(path)]
        # With more threads than one, numpy starts some, and a process with threads cannot be forked.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with path.with_suffix(".log").open("wb") as log:
            server = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n", f"the server of forks did not start: {log.name}"
        connection.connect(str(path))
        return connection, server


def serve(path: str) -> None:
    """Import, then fork for every request, as long as Ray runs."""
    _prctl(PR_SET_NAME, NAME.encode())
    for name in IMPORTS:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process with {len(threads)} threads cannot be forked"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the forks
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen(1024)
        server.settimeout(1.0)
        print("ready", flush=True)
        while Path("/proc", os.environ["RAY_RAYLET_PID"]).exists():
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            with connection:
                if os.fork() == 0:
                    server.close()
                    run(connection)
                    return


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value)


def run(connection: socket.socket) -> None:
    """Become the worker that a request describes; `connection` is open as long as this process is."""
    os.setpgid(0, 0)  # Ray kills the group of a worker that has died
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection.settimeout(None)
    size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL))
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.recv(size, socket.MSG_WAITALL))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    import numpy as np
    import torch
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.workers.setup_worker import parser

    np.random.seed()  # numpy's generator is the server's, and Python's own reseeds itself
    known, arguments = parser.parse_known_args(request["arguments"])
    os.environ.update(RuntimeEnvContext.deserialize(known.serialized_runtime_env_context or "{}").env_vars)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        ask(sys.argv[1:])
