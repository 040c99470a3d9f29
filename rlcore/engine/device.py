"""A process's use of its device: options, compilation, and errors of memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from rlcore.errors import DeviceMemoryError

COMPILED_FROM = 100_000_000
"""Number of parameters above which faster kernels are worth tens of seconds of compiling at the start."""


def pays_to_compile(device: torch.device, parameters: int) -> bool:
    """Return whether torch.compile pays for a model of this size: on a GPU, from `COMPILED_FROM` parameters on.

    Not with deterministic algorithms: the compiler times kernels and may choose others in another process.
    """
    return device.type == "cuda" and parameters >= COMPILED_FROM and not torch.are_deterministic_algorithms_enabled()


def prepare_device(device: torch.device, *, deterministic: bool = False) -> None:
    """Set torch's options for `device` in this process; on a CPU nothing changes.

    cuDNN's attention is off: it builds a plan for each new shape, 2.7 ms of host time a call, and while tokens are
    sampled the number of keys is new at every step (docs/gpu.md). Flash and memory-efficient attention stay on.

    `deterministic`: choose kernels that add in the same order each time, before any product was computed on the device.
    """
    if device.type != "cuda":
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as torch asks; read when cuBLAS starts
    # No error where a kernel has no such form: cumsum, with which tokens are drawn, adds in a fixed order. Also set
    # back, as an earlier run in this process may have asked for it.
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


def has_memory_figures(device: torch.device) -> bool:
    """Return whether `free_bytes` and `peak_bytes` work on a device: on a GPU."""
    return device.type == "cuda"


def free_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a GPU that no process holds, after this one has given back what it does not use; and all."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def peak_bytes(device: torch.device, run: Callable[[], None]) -> int:
    """Run a function and return the most bytes that this process's tensors took on a GPU meanwhile."""
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device)


@contextmanager
def explains_memory(call: str, rows: int, tokens: int, device: torch.device, remedies: Iterable[str]) -> Iterator[None]:
    """Turn torch.OutOfMemoryError into a DeviceMemoryError that names the call, its batch and the `remedies`.

    `tokens`: number of known tokens of the batch's prompts and responses. `remedies` are read only then.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        used = ""
        if torch.cuda.is_available():
            figures = (torch.cuda.memory_allocated, torch.cuda.memory_reserved)
            allocated, reserved = (measure(device) / 1e9 for measure in figures)
            total = torch.cuda.get_device_properties(device).total_memory / 1e9
            used = f": {allocated:.1f} GB are allocated and {reserved:.1f} GB reserved of {total:.1f} GB"
        raise DeviceMemoryError(
            f"{call} of {rows} rows with {tokens} tokens does not fit into the memory of {device}{used}. "
            f"Try one of these: {'; '.join(remedies)}"
        ) from error
