"""Counts the bytes of live tensors, as a GPU's allocator does, so that measurements of memory run on the CPU."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class LiveBytes(TorchDispatchMode):
    """While it is active, `now` are the bytes of the tensors that were made since then and still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.highest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._meet((args, kwargs), counted=False)  # what existed before
        out = func(*args, **(kwargs or {}))
        self._meet(out, counted=True)
        return out

    def _meet(self, values: Any, *, counted: bool) -> None:
        for tensor in tree_flatten(values)[0]:
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self._known:
                continue
            size = storage.nbytes() if counted else 0
            self._known.add(storage._cdata)
            weakref.finalize(storage, self._leave, storage._cdata, size)
            self.now += size
            self.highest = max(self.highest, self.now)

    def _leave(self, known: int, size: int) -> None:
        self._known.discard(known)
        self.now -= size

    def peak(self, run: Callable[[], None]) -> int:
        """Run a function and return the most bytes that lived meanwhile."""
        self.highest = self.now
        run()
        return self.highest
