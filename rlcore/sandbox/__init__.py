"""Isolation of model-written Python: runs, sessions, programs against tests; what this machine holds (docs/sandbox.md).

`process` and `interpreter` are the parent's side; `child` is the program of the isolated process, which confines itself
by the functions of `confine`; `isolation` tries what works here.
"""

from __future__ import annotations

from rlcore.sandbox.interpreter import Interpreter
from rlcore.sandbox.isolation import Guard, Isolation, isolation, log_isolation, probe
from rlcore.sandbox.limits import Limits, Result
from rlcore.sandbox.programs import passed_tests, program_of
from rlcore.sandbox.run import run_python

__all__ = [
    "Guard",
    "Interpreter",
    "Isolation",
    "Limits",
    "Result",
    "isolation",
    "log_isolation",
    "passed_tests",
    "probe",
    "program_of",
    "run_python",
]
