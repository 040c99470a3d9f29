"""Keys and values of ended rows that will be continued, in memory of their own: a row that waits occupies no slot."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.engines.hf.cache import BufferedCache
from rlcore.engines.hf.rows import KeptRow

KEPT_SHARE, KEPT_FREE_SHARE = 0.1, 0.5
"""Largest share of a GPU's memory, and of its free memory, that kept rows take.

Together with the slots (a quarter of the GPU) that is what sampling may take beside weights and optimizer states; the
other half of the free memory is for prefills. Keeping only saves time, and training needs the memory more.
"""


@dataclass(frozen=True)
class SlotStates:
    """The keys and values of a row that left its slot, [layers, tokens, 2, key heads, head size]."""

    states: Tensor

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.states.shape[1]

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        return self.states.nbytes


States = KeptRow | SlotStates
"""What each of the two decoders keeps of a row. An engine keeps rows of one form at a time."""


class KeptRows(Mapping[str, States]):
    """Kept rows by request id, the oldest first, all computed with the weights of one `version`.

    On a GPU they take at most `most` bytes, measured when the first row comes. Beyond that the oldest rows are dropped,
    and the next turn of a dropped row is computed from its tokens. On a CPU there is no bound.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.most, self.version, self.nbytes = device, math.inf, -1, 0
        self._rows: dict[str, States] = {}

    def __getitem__(self, name: str) -> States:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def keep(self, rows: Iterable[tuple[str, States]], version: int) -> None:
        """Add rows, which may be copied one by one as they are asked for; a row replaces an older one of its name."""
        for name, row in rows:
            if not self._rows:
                self.most, self.version = self._measured(), version
            self.drop([name])
            self._rows[name] = row
            self.nbytes += row.nbytes
            while self.nbytes > self.most:
                self.drop([next(iter(self._rows))])

    def drop(self, names: Collection[str]) -> None:
        """Drop rows; names of which nothing is kept are allowed."""
        for name in names:
            if (row := self._rows.pop(name, None)) is not None:
                self.nbytes -= row.nbytes

    def _measured(self) -> float:
        if self.device.type != "cuda":
            return math.inf
        free, total = free_memory(self.device)
        return min(KEPT_SHARE * total, KEPT_FREE_SHARE * free)


def free_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a GPU that can be allocated, with those that torch has cached, and all bytes."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def fill(cache: BufferedCache, rows: Sequence[States], ends: Sequence[int], columns: int, room: int) -> None:
    """Begin a cache with the first `ends[i]` tokens, any number up to `columns`, of each of some rows of one form.

    Each row ends at column `columns`; the columns before its first hold zeros. `room`: columns after the next update.
    """
    from_slots = [row.states[:, :end] for row, end in zip(rows, ends, strict=True) if isinstance(row, SlotStates)]
    if from_slots:
        _fill_from_slots(cache, from_slots, columns, room)
        return
    own = [(row.states, end) for row, end in zip(rows, ends, strict=True) if isinstance(row, KeptRow)]
    for number, layer in enumerate(cache.layers):
        pairs = [(*states[number], end) for states, end in own]
        layer.fill([(keys[:, :end], values[:, :end]) for keys, values, end in pairs], columns, room)


def _fill_from_slots(cache: BufferedCache, rows: Sequence[Tensor], columns: int, room: int) -> None:
    """Copy rows [layers, tokens, 2, key heads, head size], each for all layers at once.

    On a GPU the launches of single layers' copies would take longer than the copies.
    """
    layers, _, *pair = rows[0].shape
    buffer = rows[0].new_zeros(layers, len(rows), room, *pair)
    for row, states in enumerate(rows):
        buffer[:, row, columns - states.shape[1] : columns] = states
    for layer, (keys, values) in zip(cache.layers, buffer.permute(0, 3, 1, 4, 2, 5), strict=True):
        layer.lazy_initialization(keys, values)
        layer.rows, layer.length = len(rows), columns
