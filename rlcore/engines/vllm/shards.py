"""Loads weights into vLLM on ranks that have only their shard."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from torch import Tensor, nn

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
