"""A GPU's memory: how much is left for a role's micro-batches, and the keys that help where it does not suffice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlcore.engine.device import free_bytes
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.update.micro_batch_size import SATURATING_TOKENS, MicroBatchSize
from rlcore.engine.update.microbatch import largest_unit
from rlcore.model_folder import load_model_config, model_dtype

if TYPE_CHECKING:
    from rlcore.engine.train import TrainEngine
    from rlcore.engine.worker import ModelWorker, RoleSetup

GRADIENT_BYTES = 4
"""Bytes of a trained parameter's gradient."""
MOMENT_BYTES = 8
"""Bytes of a trained parameter's two AdamW moments, which do not exist before the first step."""
MARGIN = 0.1
"""Share of the device that stays free: fragments, CUDA graphs, buffers of collectives."""
SAMPLING_SHARE = 0.25
"""Largest share of the device that a rollout engine takes when it samples (docs/decisions/0030)."""


def room_for(own: TrainEngine, workers: Iterable[ModelWorker], share: float, longest: int) -> float:
    """Return the bytes that a micro-batch of `own`, with its gradients, may take: free now, less what is to come.

    To come are the moments of all trained roles in this process (`workers`, in which one may occur twice), the
    gradients of the others, and the caches of those that sample. share: this process's share of the GPU. longest: most
    tokens of a row.
    """
    free, total = free_bytes(own.ranks.device)
    to_come = 0.0
    for worker in {id(each): each for each in workers}.values():
        if worker.train.trains:
            gradients = 0 if worker.train is own else GRADIENT_BYTES  # its own are measured
            to_come += (gradients + MOMENT_BYTES) * local_parameters(worker.train)
        to_come += min(_sampling_bytes(worker, longest), SAMPLING_SHARE * total)
    return share * (free - MARGIN * total) - to_come


def _sampling_bytes(worker: ModelWorker, longest: int) -> float:
    """Return the bytes for keys and values of a full batch of the longest rows.

    0 for a role that does not sample in this process, and for an engine with a cache of its own, which it has had since
    its start.
    """
    setup, can = worker.setup, worker.setup.rollout_engine.capabilities
    if worker.rollout is None or can.cache_key is not None:
        return 0.0
    if can.slots_key is None:
        return math.inf
    slots = getattr(setup.rollout_config, can.slots_key.rpartition(".")[2])  # a key of the engine's own section
    config = load_model_config(setup.model.path, setup.model.trust_remote_code)
    return cache_bytes(config, slots * longest, model_dtype(setup.model).itemsize) / setup.rollout.tp


def cache_bytes(config: Any, tokens: int, element: int) -> int:
    """Return the bytes of keys and values of this many tokens, for a transformers config, `element` bytes each."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * size * element * tokens)


def local_parameters(engine: TrainEngine) -> int:
    """Return the number of parameters of which this rank holds gradients and moments."""
    mesh, count = engine.mesh, 0
    for spec in engine.trained_specs.values():
        if mesh.coordinates.pp in spec.stages:
            count += math.prod(spec.shape) // (mesh.layout.tp if spec.dim is not None else 1)
    return -(-count // mesh.shards)


def sampling_remedies(setup: RoleSetup) -> list[str]:
    """Return the keys that lower the memory of sampling."""
    can = setup.rollout_engine.capabilities
    return [f"half of {key}" for key in (can.slots_key, can.cache_key) if key is not None]


def training_remedies(
    setup: RoleSetup, tokens: int, size: MicroBatchSize | None, items: Sequence[UpdateItem]
) -> Iterator[str]:
    """Yield the changes that lower the memory of a train engine, most of them keys with values.

    tokens: the limit of a micro-batch now. size: the measurement that it is from. items: those of an update.
    """
    for item in items:
        if 0 < tokens < (kept := largest_unit(item.batch, item.keep_together)):
            yield f"fewer or shorter rows with equal {item.keep_together!r}: {kept} tokens stay in one micro-batch"
    measured = "" if size is None else f" (auto took {tokens}, {size.reason})"
    yield f"engine.micro_batch_tokens={tokens // 2 or SATURATING_TOKENS}{measured}"
    recompute = setup.train_engine.capabilities.settings.get("recompute", "")
    # Keys of the engine's own section: the last word is the field.
    if recompute and not getattr(setup.train_config, recompute.rpartition(".")[2], False):
        yield f"{recompute}=true"
