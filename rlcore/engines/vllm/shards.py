"""The weights of a vLLM model on one rank: loads them from shards, and finds them by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Generator, Iterable

import torch
from torch import Tensor, nn

from rlcore.engine.weights.fingerprint import checksum
from rlcore.engine.weights.transfer import Shapes


def with_shards(
    module: nn.Module, weights: Iterable[tuple[str, Tensor]], whole: Shapes
) -> Generator[tuple[str, Tensor], None, None]:
    """Yield weights to `module.load_weights`, so that it takes this rank's slice of full weights, and shards unchanged.

    A weight is a shard if its shape differs from that in `whole`. vLLM's loaders read the slice to take from an
    attribute of the parameter: while a shard is loaded, the attributes name the first slice, or say that the weight is
    sharded. Closing the generator restores the attributes.
    """
    own = [(parameter, getattr(parameter, "tp_rank", None)) for parameter in module.parameters()]

    def expect(shards: bool) -> None:
        for parameter, rank in own:
            parameter.is_sharded_weight = shards  # type: ignore[attr-defined]
            if rank is not None:
                parameter.tp_rank = 0 if shards else rank  # type: ignore[attr-defined]

    expected = False
    try:
        for name, tensor in weights:
            is_shard = tuple(tensor.shape) != whole[name]
            if is_shard != expected:
                expected = is_shard
                expect(expected)
            yield name, tensor
    finally:
        expect(False)


def checksums(module: nn.Module, whole: Shapes, shards: Shapes, rank: int, ranks: int) -> dict[str, int] | None:
    """Return the checksums of this rank's parts of the parameters; those of all `ranks` add up to the fingerprint.

    vLLM stacks the weights of layers with the same input along their outputs, pads the rows of the vocabulary and
    divides them among the ranks. `shards`: the shapes of a rank's shards. None: the module holds other parameters.
    """
    found: dict[str, int] = {}
    stacked = getattr(module, "packed_modules_mapping", {})
    for held, parameter in module.named_parameters():
        layer, _, kind = held.rpartition(".")
        prefix, dot, last = layer.rpartition(".")
        names = [f"{prefix}{dot}{part}.{kind}" for part in stacked.get(last, [last])]
        if not shards.keys() >= set(names):
            return None
        sizes = [len(parameter)] if len(names) == 1 else [shards[name][0] for name in names]
        if sum(sizes) != len(parameter):
            return None
        for name, tensor in zip(names, parameter.detach().split(sizes), strict=True):
            if tensor.shape[1:] != shards[name][1:]:
                return None
            place = _place(tensor, whole[name], shards[name], rank, ranks)
            if place is not None:
                found[name] = checksum(tensor[: len(place)], place)
    return found


def _place(tensor: Tensor, whole: tuple[int, ...], shard: tuple[int, ...], rank: int, ranks: int) -> Tensor | None:
    """Return the place of a rank's part in the whole parameter, on the device "meta"; None for a further copy of it."""
    place = torch.empty(whole, device="meta")
    if tensor.shape != shard:  # rows of the vocabulary, padded
        return place[rank * len(tensor) : (rank + 1) * len(tensor)]
    if whole == shard:
        return place if rank == 0 else None
    dim = next(dim for dim, size in enumerate(shard) if size != whole[dim])
    return place.chunk(ranks, dim)[rank]
