"""Rollouts on a Hugging Face model: one prefill for each different prompt, decoding without finished rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlcore.assets import model_path
from rlcore.config import ModelConfig
from rlcore.engine.rollout.base import RolloutEngine, Sampling
from rlcore.engine.rollout.cache import BufferedCache
from rlcore.engine.rollout.sampling import sample_tokens
from rlcore.errors import DataError
from rlcore.ops import uniform_noise
from rlcore.protocol import DataProto, Ragged


class HFRollout(RolloutEngine):
    """Decodes with a Hugging Face module: the train engine's own if it is whole in this process, else a copy."""

    def __init__(self, model: ModelConfig, *, batch_size: int, device: torch.device, shared: nn.Module | None) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.batch_size, self.device = batch_size, device
        self.dtype = torch.bfloat16 if model.dtype == "bf16" else torch.float32
        self.exact = self.dtype is torch.float32
        self.attention = "sdpa" if model.attention == "auto" else model.attention
        folder = model_path(model.path)
        options = {"trust_remote_code": model.trust_remote_code, "local_files_only": True}
        self.owns_module = shared is None
        self.hf: Any = shared
        if shared is None:
            self.hf = AutoModelForCausalLM.from_pretrained(
                folder, dtype=self.dtype, attn_implementation=self.attention, **options
            )
            # Parameters go on requiring a gradient, though none is ever made: torch chooses kernels by that, and the
            # log-probs are to be, to the last bit, those of a trained module that is shared.
            self.hf.to(device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        ends = self.hf.generation_config.eos_token_id if self.hf.generation_config is not None else None
        ends = self.tokenizer.eos_token_id if ends is None else ends
        self.end_ids = torch.tensor(
            [ends] if isinstance(ends, int) else list(ends or ()), dtype=torch.int64, device=device
        )

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """See RolloutEngine. A shared module already has the weights, so that only the version moves."""
        if self.owns_module:
            own = dict(self.hf.named_parameters())
            with torch.no_grad():
                for name, tensor in weights:
                    if name not in own:
                        raise DataError(f"weight {name!r} is not in the rollout model")
                    if own[name].shape != tensor.shape:
                        there = list(own[name].shape)
                        raise DataError(f"weight {name!r} has shape {list(tensor.shape)}, the rollout model's {there}")
                    own.pop(name).copy_(tensor)
            if own:
                raise DataError(f"no weights came for {sorted(own)[:5]} of the rollout model")
        self.version = version

    def generate(self, batch: DataProto, sampling: Sampling) -> DataProto:
        """See RolloutEngine."""
        prompts = batch.view("prompts").to_list()
        keys = [
            sampling.key(str(u), int(i)) for u, i in zip(batch.view("uid"), batch.view("sample_index"), strict=True)
        ]
        # Rows with the same prompt stand together, and prompts of like length do.
        order = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), prompts[row].tolist()))
        done: dict[int, _Row] = {}
        with self._generating():
            for start in range(0, len(order), self.batch_size):
                rows = order[start : start + self.batch_size]
                noise = uniform_noise(torch.tensor([keys[r] for r in rows]), 0, sampling.max_tokens).to(self.device)
                done.update(zip(rows, self._decode([prompts[r] for r in rows], noise, sampling), strict=True))
        out = self._columns([done[row] for row in range(len(prompts))])
        out["prompt_length"] = batch.view("prompts").lengths
        return out

    def _columns(self, rows: list[_Row]) -> DataProto:
        responses = [torch.tensor(row.tokens, dtype=torch.int64) for row in rows]
        ragged = (
            Ragged.from_list(responses)
            if rows
            else Ragged(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        )
        log_probs = torch.tensor([value for row in rows for value in row.log_probs], dtype=torch.float32)
        texts = np.empty(len(rows), dtype=object)
        texts[:] = [self.tokenizer.decode(row.tokens, skip_special_tokens=True) for row in rows]
        return DataProto.from_single_dict(
            {
                "responses": ragged,
                "response_mask": ragged.with_values(torch.ones_like(ragged.values)),
                "rollout_log_probs": ragged.with_values(log_probs),
                "response_text": texts,
                "response_length": ragged.lengths,
                "finished": torch.tensor([row.finished for row in rows], dtype=torch.bool),
                "weights_version": torch.full((len(rows),), self.version, dtype=torch.int64),
            }
        )

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """Hold the module in the state for decoding; a shared one goes back to what training set."""
        training = [module for module in self.hf.modules() if module.training]
        implementation = self.hf.config._attn_implementation
        self.hf.config._attn_implementation = self.attention
        self.hf.eval()
        try:
            with torch.no_grad(), self._autocast():
                yield
        finally:
            self.hf.config._attn_implementation = implementation
            for module in training:
                module.training = True

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.owns_module or self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def _decode(self, prompts: list[Tensor], noise: Tensor, sampling: Sampling) -> list[_Row]:
        """Sample one response for each prompt; `noise` is [rows, max_tokens]."""
        logits, cache, mask, row_of_prompt = self._prefill(prompts, sampling.max_tokens)
        rows = [_Row() for _ in prompts]
        live = torch.arange(len(prompts), device=self.device)
        cache.pick(row_of_prompt)
        logits, mask = logits[row_of_prompt], mask[row_of_prompt]
        length = mask.shape[1] - sampling.max_tokens
        for position in range(sampling.max_tokens):
            banned = self.end_ids if position < sampling.min_tokens else None
            tokens, log_probs = sample_tokens(logits, noise[live, position], sampling, banned)
            ended = self._book(rows, live, tokens, log_probs, position, sampling)
            if bool(ended.all()) or position + 1 == sampling.max_tokens:
                break
            if int(ended.sum()) * 8 >= len(live):
                keep = (~ended).nonzero().squeeze(-1)
                cache.pick(keep)
                live, tokens, mask = live[keep], tokens[keep], mask[keep]
            mask[:, length + position] = True
            positions = mask.sum(-1, keepdim=True) - 1
            logits = self._forward(tokens[:, None], mask[:, : length + position + 1], positions, cache)
        return rows

    def _prefill(self, prompts: list[Tensor], max_tokens: int) -> tuple[Tensor, BufferedCache, Tensor, Tensor]:
        """Run each different prompt once, padded on the left.

        Returns the logits of the next token [prompts, vocab], the cache, the mask [prompts, longest + max_tokens] of
        real tokens, and int64 [rows]: which of the prompts is each row's.
        """
        different: dict[tuple[int, ...], int] = {}
        row_of_prompt = torch.tensor([different.setdefault(tuple(p.tolist()), len(different)) for p in prompts])
        longest = max(len(prompt) for prompt in different)
        ids = torch.zeros(len(different), longest, dtype=torch.int64)
        mask = torch.zeros(len(different), longest + max_tokens, dtype=torch.bool)
        for row, prompt in enumerate(different):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) : longest] = True
        ids, mask = ids.to(self.device), mask.to(self.device)
        cache = BufferedCache(self.hf.config.get_text_config().num_hidden_layers, longest + max_tokens)
        positions = (mask[:, :longest].cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(ids, mask[:, :longest], positions, cache)
        return logits, cache, mask, row_of_prompt.to(self.device)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: BufferedCache) -> Tensor:
        out = self.hf(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def _book(
        self, rows: list[_Row], live: Tensor, tokens: Tensor, log_probs: Tensor, position: int, sampling: Sampling
    ) -> Tensor:
        """Append the new tokens to rows that go on and return bool [live]: which rows have ended (now or before)."""
        is_end = torch.isin(tokens, self.end_ids).tolist()
        ended = []
        for row, token, log_prob, end in zip(live.tolist(), tokens.tolist(), log_probs.tolist(), is_end, strict=True):
            state = rows[row]
            if not state.finished:
                state.tokens.append(token)
                state.log_probs.append(log_prob)
                state.finished = end or (position + 1 >= sampling.min_tokens and self._stopped(state, sampling.stop))
            ended.append(state.finished)
        return torch.tensor(ended, device=self.device)

    def _stopped(self, row: _Row, stop: tuple[str, ...]) -> bool:
        if not stop:
            return False
        # A character takes at most 4 byte-level tokens; one more for a token that begins before the stop string.
        tail = row.tokens[-(4 * max(len(text) for text in stop) + 1) :]
        text = self.tokenizer.decode(tail, skip_special_tokens=True)
        return any(s in text for s in stop)


@dataclass
class _Row:
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finished: bool = False
