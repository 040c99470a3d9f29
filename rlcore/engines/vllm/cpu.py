"""Options and start-up of vLLM on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

OPTIONS: dict[str, Any] = {
    "enforce_eager": True,  # compiling a graph takes longer than running a small model
}
"""Arguments of vllm.LLM on a CPU."""


@contextmanager
def starting_on_cpu() -> Iterator[None]:
    """While vLLM starts, keep it from packing weights and from changing the process's threads.

    By default it packs the weights of linear layers for oneDNN when it loads them. Afterwards they cannot be loaded
    again: the layers' parameters are empty, and a tied head still computes with the packed copy of the old weights. It
    also compiles small functions with a C++ compiler for half a minute, binds OpenMP threads to the same cores in every
    process, and replaces torch.set_num_threads.
    """
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns about features that are off here on purpose
    import vllm._custom_ops as custom_ops
    from vllm.platforms import current_platform

    custom_ops._supports_onednn = False
    current_platform.simple_compile_backend = "eager"
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
