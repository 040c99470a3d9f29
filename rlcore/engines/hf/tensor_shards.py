"""A Hugging Face module of which each rank of a group has a shard: plain tensors, and sums in the forward.

The forward of Megatron-LM (arXiv 1909.08053, section 3) by the model's own `base_model_tp_plan`: column-parallel layers
give each rank the outputs of its heads and of its share of the feed-forward width, row-parallel ones take those in, and
their results are added up. Everything else is whole on every rank, and computed alike there.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from rlcore.engine.parallel.tensor_parallel import plan_of, shard_dims
from rlcore.engine.weights.meter import Group


class RowParallelLinear(nn.Module):
    """A linear layer of which this rank has a shard of the inputs; the bias is added once, to the sum."""

    def __init__(self, whole: nn.Linear, group: Any) -> None:
        super().__init__()
        self.weight, self.bias, self._group = whole.weight, whole.bias, group

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the whole output [..., out] from this rank's inputs [..., in / ranks] (collective)."""
        out = linear(inputs, self.weight)
        dist.all_reduce(out, group=self._group)
        return out if self.bias is None else out + self.bias


class TensorShards:
    """Cuts a module in place into the shard of this rank of `group`, in the group's order of ranks.

    Raises ConfigError for a model that so many ranks cannot divide.
    """

    def __init__(self, hf: Any, group: Group) -> None:
        self._index, self._count = group.ranks.index(dist.get_rank()), len(group.ranks)
        self._dims = shard_dims(hf, self._count)
        for name, style in plan_of(hf).items():
            module = hf.get_submodule(name)
            if style == "rowwise" and isinstance(module, nn.Linear):
                hf.set_submodule(name, RowParallelLinear(module, group.handle))
        for name, parameter in hf.named_parameters():
            parameter.data = self.part(name, parameter.data).clone()

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole parameter, a view."""
        dim = self._dims.get(name)
        return whole if dim is None else whole.chunk(self._count, dim)[self._index]
