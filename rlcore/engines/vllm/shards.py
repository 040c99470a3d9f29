"""Weights for vLLM's loaders when each rank already holds only its shard."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from torch import Tensor, nn

from rlcore.engine.weights.transfer import Shapes


def with_shards(
    module: nn.Module, weights: Iterable[tuple[str, Tensor]], whole: Shapes
) -> Generator[tuple[str, Tensor], None, None]:
    """Yield weights to `module.load_weights`, which cuts its rank's part from full weights and takes shards uncut.

    A weight is a shard if its shape differs from that in `whole`. vLLM's loaders read from a parameter which part to
    cut: while a shard is loaded, the parameter names the first part, or says that the weight is cut already. Close the
    generator, which sets the parameters back.
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
