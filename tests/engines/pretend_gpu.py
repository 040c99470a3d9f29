"""A device that says it is a GPU and computes on the CPU, so that code for GPUs runs without one, on real numbers.

A tensor "on" it is an `OnGpu` around a CPU tensor. As on a real GPU, an operation on tensors of two devices is an
error, except for copies, for numbers (0 dimensions) and for indices in `[]`. Kernels, streams and memory are not
pretended.

FakeTensorMode has no numbers, so code that reads one on the host (a length, a norm) stops there, and torch's builds for
the CPU lack the device guard that indexing a fake GPU tensor needs. To torch's C++ parts these tensors are therefore on
`meta`, and to Python on `cuda:0`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

GPU = torch.device("cuda", 0)
aten = torch.ops.aten
BETWEEN_DEVICES = {aten._to_copy.default, aten.copy_.default, aten.set_.source_Tensor}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class OnGpu(torch.Tensor):
    """A tensor on the device; `inner` holds its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> OnGpu:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
            requires_grad=requires_grad,
        )

    def __init__(self, inner: torch.Tensor, requires_grad: bool = False) -> None:
        self.inner = inner

    @property
    def device(self) -> torch.device:
        return GPU

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: None, size: Any, stride: Any) -> OnGpu:
        return OnGpu(inner["inner"])

    def __repr__(self, **options: Any) -> str:
        return f"OnGpu({self.inner!r})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        return self.inner.tolist()

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        torch.utils.swap_tensors(self, _parameter_like(self, new))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def _parameter_like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    made = new.detach().requires_grad_(old.requires_grad)
    if getattr(old, "_is_param", False):
        made._is_param = True
    return made


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the inner tensors; its results are on the device that its arguments, or `device`, say."""
    if func is aten._fused_sdp_choice.default:
        return 0  # the plain form: kernels for GPUs are not here
    if not _pretending:
        return func(*args, **kwargs)
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    on_gpu = any(isinstance(each, OnGpu) for each in tensors)
    if on_gpu and func not in BETWEEN_DEVICES:
        checked = [args[0], *args[2:]] if func in INDEXING else [args, kwargs]
        alone = [
            e for e in tree_flatten(checked)[0] if isinstance(e, torch.Tensor) and not isinstance(e, OnGpu) and e.dim()
        ]
        if alone:
            raise RuntimeError(
                f"{func}: expected all tensors on {GPU}, but one of shape {tuple(alone[0].shape)} is on cpu"
            )
    device = kwargs.get("device")
    stays = func is aten._to_copy.default and isinstance(args[0], OnGpu) and _is_gpu(device or GPU)
    if stays and kwargs.get("dtype") in (None, args[0].dtype):
        return OnGpu(args[0].inner)  # to torch's C++ parts it seemed to be on another device
    inner_args, inner = tree_map(_inner, args), tree_map(_inner, kwargs)
    if device is not None:
        inner["device"] = torch.device("cpu")
    out = func(*inner_args, **inner)
    to_gpu = _is_gpu(device) if device is not None else on_gpu
    if func is aten.copy_.default or func.__name__.partition(".")[0].endswith("_"):
        to_gpu = isinstance(args[0], OnGpu)
    if not to_gpu:
        return out
    wrapped = tree_map(lambda each: OnGpu(each) if isinstance(each, torch.Tensor) else each, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if on_gpu else wrapped


def _is_gpu(device: Any) -> bool:
    return torch.device(device).type in ("cuda", "meta")


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnGpu) else value


_pretending = True


@contextmanager
def real_devices() -> Iterator[None]:
    """Leave all operations alone, as transformers uses `meta` itself while it loads a model."""
    global _pretending
    _pretending = False
    try:
        yield
    finally:
        _pretending = True


class PretendGpu(TorchDispatchMode):
    """While it is active, `device="cuda"` is the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


@contextmanager
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Give the device, with torch's own start of CUDA left out."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    load = transformers.PreTrainedModel.from_pretrained.__func__

    def loaded(*args: Any, **options: Any) -> Any:
        with real_devices():
            return load(*args, **options)

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(loaded))
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) then moves by an operation, as others do
    try:
        with PretendGpu():
            yield GPU
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
