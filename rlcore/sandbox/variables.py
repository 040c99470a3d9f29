"""The environment variables of processes that run code which is not rlcore's: rewards, environments, agents."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rlcore.stacks import FOLDER_VARIABLE

_KEPT = frozenset(
    {"PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "TEMP", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHOME"}
)


def basic_variables(keep: Sequence[str] = ()) -> dict[str, str]:
    """Return a few basic variables of this process, and those named in `keep`.

    Everything else is left out, so that the code finds no keys or tokens. Numeric libraries get one thread each:
    threads reserve address space, which memory limits count, and compete with the engines for cores. The hashes of
    strings are fixed, so that a set has the same order in each run.
    """
    fixed = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    kept = {name: os.environ[name] for name in os.environ if name in _KEPT or name.startswith("LC_") or name in keep}
    return {**fixed, **kept}


def python_variables(keep: Sequence[str] = ()) -> dict[str, str]:
    """Return `basic_variables`, the folder for stacks, and this process's import path, for one that runs Python."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**basic_variables((*keep, FOLDER_VARIABLE)), "PYTHONPATH": path}
