"""A local plugin, `-p meter.py`: notes the device's peak memory each step, and ends the process after BENCH_STOP steps.

Ending it there leaves out the last checkpoint, which is no part of what is measured. BENCH_METER names the file that is
written. BENCH_CUDNN=1 allows cuDNN's attention.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlcore import hookimpl

RLCORE_API = 1


@hookimpl
def rlcore_run_start(run: Any) -> None:
    """Forget the peak of loading, and undo what a comparison asks to be undone."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    if os.environ.get("BENCH_CUDNN") == "1":
        torch.backends.cuda.enable_cudnn_sdp(True)


@hookimpl
def rlcore_step_end(run: Any, step: int, metrics: Mapping[str, float]) -> None:
    """Append the step's peak memory in bytes, and stop after the last step."""
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    with Path(os.environ["BENCH_METER"]).open("a") as file:
        file.write(json.dumps({"step": step, "peak": peak}) + "\n")
    if step == int(os.environ.get("BENCH_STOP", "0")):
        os._exit(0)
