"""How a process is confined, and the command that starts one."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlcore.sandbox.limits import Limits

_FOLDER = Path(__file__).parent
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The environment variables of the code, besides HOME, TMPDIR and PWD."""


@dataclass(frozen=True)
class Plan:
    """How a process is to be confined.

    mechanism: "namespaces", "bwrap" (the program of that name makes them), or "limits" (no namespaces).
    own_user: the run gets a user id of its own, which needs root.
    landlock, seccomp: whether the kernel filters files, and system calls.
    """

    mechanism: str
    own_user: bool = False
    landlock: bool = False
    seccomp: bool = True


@dataclass(frozen=True)
class PythonFiles:
    """The Python that runs the code, all paths that it needs, and the folders in them that it does not."""

    program: str
    read_only: list[str]
    hidden: list[str]


@cache
def python_files() -> PythonFiles:
    """Find this interpreter's program, standard library and C libraries, without those of a virtual environment."""
    program = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    base = {"installed_base": sys.base_prefix, "installed_platbase": sys.base_exec_prefix}
    base |= {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    stdlib, platstdlib = (sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib"))
    folders = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/nix/store", "/etc/ld.so.cache"]
    wanted = [program, os.path.dirname(stdlib), os.path.dirname(platstdlib), *folders]
    found = sorted({path for path in wanted if os.path.exists(path)})
    needed = [path for path in found if not any(path.startswith(f"{other}/") for other in found)]
    packages = [f"{stdlib}/site-packages", f"{platstdlib}/site-packages", f"{stdlib}/dist-packages"]
    hidden = [path for path in [*packages, "/usr/lib/python3/dist-packages"] if os.path.isdir(path)]
    return PythonFiles(program, needed, sorted(set(hidden)))


def command_of(plan: Plan, limits: Limits, descriptors: list[int]) -> list[str]:
    """Return the command that starts child.py with these file descriptors.

    It is imported, not run as a script, so that Python compiles it once for all runs.
    """
    python = python_files()
    bwrap = plan.mechanism == "bwrap"
    code = f"import sys; sys.path.insert(0, {'/sandbox' if bwrap else str(_FOLDER)!r}); import child; child.main()"
    inner = [python.program, "-I", "-S", "-X", "utf8", "-c", code, *map(str, descriptors)]
    if not bwrap:
        return inner
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--new-session", "--clearenv"]
    command += ["--cap-drop", "ALL", "--uid", "65534", "--gid", "65534"]
    for path in python.read_only:
        command += ["--ro-bind", path, path]
    for path in python.hidden:
        command += ["--tmpfs", path, "--remount-ro", path]
    command += ["--dev", "/dev", "--size", str(limits.file_mb * 2**20), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    return [*command, "--ro-bind", str(_FOLDER), "/sandbox", "--remount-ro", "/", "--", *inner]


def mount_point(paths: list[str]) -> str:
    """Return a folder that holds none of these paths; over it the new root is mounted, seen by that process only."""
    for folder in ("/tmp", "/mnt", "/srv", "/media", "/opt"):
        if os.path.isdir(folder) and not any(path.startswith(f"{folder}/") for path in paths):
            return folder
    return "/proc"
