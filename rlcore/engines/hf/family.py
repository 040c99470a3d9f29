"""Whether a family of models samples with this engine's cache: it has no form for some kinds of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.engine.rollout import Request, Sampling
from rlcore.engines.hf.cache import BufferedCache
from rlcore.errors import ConfigError

TOLERANCE = 1e-3
"""Nats by which log-probs with the cache may differ from those without, in fp32."""

Prefill = Callable[[Sequence[Request], int], tuple[Tensor, BufferedCache, Tensor, Tensor]]
Forward = Callable[[Tensor, Tensor, Tensor, BufferedCache], Tensor]


@torch.no_grad()
def check_family(hf: Any, prefill: Prefill, forward: Forward, *, exact: bool) -> None:
    """Decode one token of two rows of different lengths, and compare with the model's own forward of each row.

    `prefill` and `forward` are those of HFRollout. `exact`: the forward is in fp32, so its numbers are compared. Raises
    ConfigError, naming the layers, for a model that fails or has other log-probs.
    """
    device, size = next(hf.parameters()).device, hf.get_input_embeddings().weight.shape[0]
    rows = [(3, 5, 2), (7, 4, 6, 9, 8)]
    rows = [tuple(token % size for token in row) for row in rows]
    newest, longest = [2 % size, 3 % size], max(map(len, rows))
    try:
        wanted = [
            hf(input_ids=torch.tensor([[*row, new]], device=device), use_cache=False).logits[0, -1]
            for row, new in zip(rows, newest, strict=True)
        ]
        requests = [Request(str(index), row, index, Sampling(max_tokens=4)) for index, row in enumerate(rows)]
        _, cache, index, lengths = prefill(requests, longest)
        cache.select(index)
        columns = torch.arange(longest + 1)
        mask = torch.zeros(len(rows), longest + 1).masked_fill(columns < (longest - lengths)[:, None], float("-inf"))
        found = forward(torch.tensor(newest)[:, None].to(device), mask.to(device), lengths[:, None].to(device), cache)
    except Exception as error:  # of transformers or of the folder's code
        raise ConfigError(f"{_refusal(hf)} it raises {type(error).__name__}: {error}") from error
    off = (found.float().log_softmax(-1) - torch.stack(wanted).float().log_softmax(-1)).abs().max().item()
    if exact and not off < TOLERANCE:
        raise ConfigError(f"{_refusal(hf)} its log-probs are off by {off:.2g}")


def _refusal(hf: Any) -> str:
    config = hf.config.get_text_config()
    layers = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ["unknown"]
    kinds = ", ".join(dict.fromkeys(map(str, layers)))
    return (
        f"rollout=hf cannot sample {type(hf).__name__}, whose layers are {kinds}; sample it with rollout=vllm. With "
        "the cache of rollout=hf"
    )
