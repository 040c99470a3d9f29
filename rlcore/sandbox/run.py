"""One run of model-written code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from rlcore.errors import DataError
from rlcore.sandbox.isolation import Isolation, isolation
from rlcore.sandbox.limits import Limits, Result
from rlcore.sandbox.process import run_once


def run_python(
    code: str,
    stdin: str = "",
    limits: Limits | None = None,
    files: Mapping[str, str | bytes] | None = None,
    within: Isolation | None = None,
) -> Result:
    """Run Python code as `python main.py` does, isolated, and return its output and how it ended.

    The process is fresh, and so is its folder, which is its working directory, home and folder for temporary files.
    `files` are put there by relative path. Only the standard library can be imported. When the call returns, nothing
    that the code started runs any longer, and the folder is gone. `within` is the isolation to use, by default the best
    of this machine; `Limits()` by default.

    Raises DataError for a path of `files` that leaves the folder, SandboxError when the process cannot be set up.
    """
    for name in files or {}:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or path.parts in ((), ("main.py",)):
            raise DataError(f"files: {name!r} is not a relative path below the folder, or is main.py, the code's own")
    return run_once((within or isolation()).plan, code, stdin, limits or Limits(), files or {})
