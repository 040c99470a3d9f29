"""Python's garbage collector while a process starts and ends: imports make a million objects, none of them garbage.

Looking for some among them takes a fifth of the time to the first token, and a second at the end (benchmarks/NOTES.md).
"""

from __future__ import annotations

import atexit
import gc

_is_paused = False


def pause_collector() -> None:
    """Turn the collector off until `resume_collector`, and at the exit of the process."""
    global _is_paused
    _is_paused = _is_paused or gc.isenabled()
    gc.disable()
    atexit.register(gc.freeze)


def resume_collector() -> None:
    """Turn the collector on again if `pause_collector` has turned it off; one that was off before stays so.

    What is there by then it does not look through until `gc.unfreeze()`: imports and models, that stay for the run.
    """
    global _is_paused
    if _is_paused:
        gc.freeze()
        gc.enable()
    _is_paused = False
