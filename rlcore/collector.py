"""Disables Python's garbage collector while a process starts and exits.

Imports allocate about a million long-lived objects. Scanning them costs 20 % of the time to the first token, and a
second at exit (benchmarks/NOTES.md).
"""

from __future__ import annotations

import atexit
import gc

_is_paused = False


def pause_collector() -> None:
    """Disable the collector until `resume_collector`, and keep it from scanning existing objects at exit."""
    global _is_paused
    _is_paused = _is_paused or gc.isenabled()
    gc.disable()
    atexit.register(gc.freeze)


def resume_collector() -> None:
    """Enable the collector if `pause_collector` disabled it; a collector that was already off stays off.

    Existing objects (imports and models, which last for the run) are frozen: not scanned until `gc.unfreeze()`.
    """
    global _is_paused
    if _is_paused:
        gc.freeze()
        gc.enable()
    _is_paused = False
