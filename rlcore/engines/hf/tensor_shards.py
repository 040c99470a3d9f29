"""A Hugging Face module sharded over the ranks of a group: plain tensors, and all-reduces in the forward.

The forward of Megatron-LM (arXiv 1909.08053, section 3) by the model's own `base_model_tp_plan`. Column-parallel layers
compute the outputs of the rank's heads and of its share of the feed-forward width. Row-parallel layers read those
outputs, and their results are summed. Every rank holds and computes everything else in full.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from rlcore.engine.parallel.tensor_parallel import plan_of, shard_dims
from rlcore.engine.weights.fingerprint import checksum, sum_checksums
from rlcore.engine.weights.meter import Group
from rlcore.engine.weights.transfer import Shapes


class RowParallelLinear(nn.Module):
    """A linear layer sharded along its inputs; the bias is added once, to the sum."""

    def __init__(self, whole: nn.Linear, group: Any) -> None:
        super().__init__()
        self.weight, self.bias, self._group = whole.weight, whole.bias, group

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the full output [..., out] from this rank's inputs [..., in / ranks] (collective)."""
        out = linear(inputs, self.weight)
        dist.all_reduce(out, group=self._group)
        return out if self.bias is None else out + self.bias


class TensorShards:
    """Reduces a module, in place, to this rank's shard; shards follow the order of ranks in `group`.

    Raises ConfigError for a model that this number of ranks does not divide.
    """

    def __init__(self, hf: Any, group: Group) -> None:
        self._group, self._index, self._count = group, group.ranks.index(dist.get_rank()), len(group.ranks)
        self._dims = shard_dims(hf, self._count)
        for name, style in plan_of(hf).items():
            module = hf.get_submodule(name)
            if style == "rowwise" and isinstance(module, nn.Linear):
                hf.set_submodule(name, RowParallelLinear(module, group.handle))
        for name, parameter in hf.named_parameters():
            # A clone, as a view would keep the full parameter's memory.
            parameter.data = self.shard_of(name, parameter.data).clone()

    def shard_of(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's shard of a full parameter, as a view."""
        dim = self._dims.get(name)
        return whole if dim is None else whole.chunk(self._count, dim)[self._index]

    def fingerprint(self, hf: Any, shapes: Shapes) -> dict[str, int]:
        """Return the fingerprint of the whole parameters, with these `shapes`; `hf` holds the shards (collective)."""
        found: dict[str, int] = {}
        for name, shard in hf.named_parameters():
            if name in self._dims or self._index == 0:  # the others are whole on every rank
                found[name] = checksum(shard, self.shard_of(name, torch.empty(shapes[name], device="meta")))
        everyone: list[Any] = [None] * self._count
        dist.all_gather_object(everyone, found, group=self._group.handle)
        return sum_checksums(everyone)
