"""How a process uses the device that it was given."""

from __future__ import annotations

import torch


def prepare_device(device: torch.device) -> None:
    """Set torch's options for `device` in this process; on a CPU nothing changes.

    cuDNN's attention is off: it builds a plan for each new shape, 2.7 ms of host time a call, and while tokens are
    sampled the number of keys is new at every step (docs/gpu.md). Flash and memory-efficient attention stay on.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
