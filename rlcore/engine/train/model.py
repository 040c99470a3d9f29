"""A Hugging Face causal language model as the train engine sees it: packed tokens in, log-probs of chosen ones out."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.assets import model_path
from rlcore.config import ModelConfig
from rlcore.engine.train.packing import PACKED_ATTENTION, Packing, register_packed_attention
from rlcore.errors import ConfigError
from rlcore.ops import chunked_log_probs, token_log_probs

log = logging.getLogger(__name__)


class CausalLM(nn.Module):
    """The model and the two choices of how its forward is computed, both made once by `probe`.

    `packed`: rows are laid end to end without padding; otherwise they are padded on the right. `fused_head`: logits are
    made chunk by chunk from the last hidden state; otherwise the model makes them all itself.
    """

    hf: Any  # a transformers.PreTrainedModel

    def __init__(self, hf: Any, *, packed: bool, fused_head: bool, chunk: int) -> None:
        super().__init__()
        self.hf = hf
        self.packed, self.fused_head, self.chunk = packed, fused_head, chunk

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.hf.get_output_embeddings().weight.shape[0]

    def forward(
        self, packing: Packing, select: Tensor, labels: Tensor, needs: Collection[str], temperature: float
    ) -> dict[str, Tensor]:
        """Return what `needs` names, each [selected, ...], for the tokens `labels` int64 [selected].

        `select` int64 [selected]: indices into the packed tokens, of the position that predicts each label. `log_probs`
        and `entropy` are fp32 in nats at `temperature`; `logits` [selected, vocab] are divided by it.
        """
        if self.fused_head and "logits" not in needs:
            hidden = self._run(self._decoder(), packing).last_hidden_state
            hidden = (hidden[0] if self.packed else packing.unpad(hidden)).index_select(0, select)
            head = self.hf.get_output_embeddings()
            log_probs, entropy = chunked_log_probs(
                hidden,
                head.weight.to(hidden.dtype),
                labels,
                bias=None if head.bias is None else head.bias.to(hidden.dtype),
                temperature=temperature,
                chunk=self.chunk,
            )
            return {name: value for name, value in (("log_probs", log_probs), ("entropy", entropy)) if name in needs}
        logits = self._run(self.hf, packing).logits
        logits = (logits[0] if self.packed else packing.unpad(logits)).index_select(0, select).float() / temperature
        log_probs, entropy = token_log_probs(logits, labels)
        values = {"log_probs": log_probs, "entropy": entropy, "logits": logits}
        return {name: value for name, value in values.items() if name in needs}

    def _decoder(self) -> nn.Module:
        return getattr(self.hf, self.hf.base_model_prefix)

    def _run(self, module: nn.Module, packing: Packing) -> Any:
        if not self.packed:
            ids = packing.pad(packing.input_ids)
            mask = packing.pad(torch.ones_like(packing.input_ids))
            positions = torch.arange(packing.longest, device=ids.device)[None].expand(packing.rows, -1)
            return module(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        extra = {"packing": packing} if self._implementation == PACKED_ATTENTION else packing.flash_kwargs()
        return module(
            input_ids=packing.input_ids[None],
            attention_mask=None,
            position_ids=packing.positions[None],
            use_cache=False,
            **extra,
        )

    @property
    def _implementation(self) -> str:
        return self.hf.config._attn_implementation


def load_causal_lm(config: ModelConfig, *, padding_free: bool, chunk: int, device: torch.device) -> CausalLM:
    """Load the model folder in fp32 and choose how to compute its forward.

    The fast forms are taken only if they give what the model's own forward gives on a probe of two short rows; if one
    does not, one line in the log says so. Raises ConfigError for a folder that does not load as a causal LM.
    """
    import transformers
    from transformers import AutoModelForCausalLM

    register_packed_attention()
    transformers.utils.logging.disable_progress_bar()
    folder = model_path(config.path)
    attention = _plain_attention(config, device)
    try:
        hf = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(
            f"model.path={config.path!r} ({folder}) does not load as a causal language model: {error}"
        ) from error
    hf.to(device).eval()
    plain = CausalLM(hf, packed=False, fused_head=False, chunk=chunk)
    expected = _probe(plain)
    fused = CausalLM(hf, packed=False, fused_head=True, chunk=chunk)
    fused_head = _agrees("computing logits in chunks", fused, expected)
    packed = padding_free and _packing_applies(hf)
    if packed:
        if attention == "sdpa":
            hf.config._attn_implementation = PACKED_ATTENTION
        packed = _agrees(
            "packing without padding", CausalLM(hf, packed=True, fused_head=fused_head, chunk=chunk), expected
        )
        if not packed:
            hf.config._attn_implementation = attention
    return CausalLM(hf, packed=packed, fused_head=fused_head, chunk=chunk)


def _plain_attention(config: ModelConfig, device: torch.device) -> str:
    if config.attention != "auto":
        return config.attention
    from transformers.utils import is_flash_attn_2_available

    on_gpu = device.type == "cuda" and config.dtype == "bf16" and is_flash_attn_2_available()
    return "flash_attention_2" if on_gpu else "sdpa"


def _packing_applies(hf: Any) -> bool:
    """Whether packing can be right at all lengths: the probe's rows are too short to see a sliding window."""
    config = hf.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if kinds != {"full_attention"} or (windowed and not getattr(config, "layer_types", None)):
        log.info("%s attends in other ways than full attention: rows are padded", type(hf).__name__)
        return False
    if hf.config._attn_implementation not in ("sdpa", "flash_attention_2", "flash_attention_3"):
        log.info("attention %r has no packed form: rows are padded", hf.config._attn_implementation)
        return False
    return True


@torch.no_grad()
def _probe(model: CausalLM) -> Tensor:
    device = next(model.parameters()).device
    ids = torch.arange(12) * 7 % min(model.vocab_size, 89) + 3
    packing = Packing.of([ids[:5] % model.vocab_size, ids[5:] % model.vocab_size]).to(device)
    select = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8, 9, 10], device=device)
    labels = packing.input_ids.index_select(0, select + 1)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=model._implementation.startswith("flash")):
        return model(packing, select, labels, ("log_probs",), 1.0)["log_probs"]


def _agrees(what: str, model: CausalLM, expected: Tensor) -> bool:
    try:
        got = _probe(model)
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        log.info("%s does not work for %s (%s): falling back to the plain form", what, type(model.hf).__name__, error)
        return False
    tolerance = 5e-2 if model._implementation.startswith("flash") else 1e-4
    if not torch.allclose(got, expected, atol=tolerance, rtol=tolerance):
        worst = (got - expected).abs().max().item()
        log.info("%s is off by %.2g for %s: falling back to the plain form", what, worst, type(model.hf).__name__)
        return False
    return True
