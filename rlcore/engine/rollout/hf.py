"""Rollouts on a Hugging Face model: one prefill for each different prompt, decoding without finished rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.assets import model_path
from rlcore.config import ModelConfig
from rlcore.engine.reshard.meter import Group
from rlcore.engine.rollout.base import RolloutEngine, Sampling
from rlcore.engine.rollout.cache import BufferedCache
from rlcore.engine.rollout.responses import Response, end_tokens, ends_with_stop, response_columns
from rlcore.engine.rollout.sampling import sample_tokens
from rlcore.engine.rollout.tensor_shards import TensorShards
from rlcore.engine.weights import Shapes, as_announced, check_fit
from rlcore.ops import uniform_noise
from rlcore.protocol import DataProto


class HFRollout(RolloutEngine):
    """Decodes with a Hugging Face module: the train engine's own if it is whole in this process, else a copy.

    `tensor_group`: the ranks that decode the same rows together, each with its shard of the linear layers. They sample
    the same tokens, as each computes the same logits and a row's noise is its own.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        batch_size: int,
        device: torch.device,
        shared: nn.Module | None,
        tensor_group: Group | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.batch_size, self.device = batch_size, device
        self.dtype = torch.bfloat16 if model.dtype == "bf16" else torch.float32
        self.exact = self.dtype is torch.float32
        self.attention = "sdpa" if model.attention == "auto" else model.attention
        folder = model_path(model.path)
        options = {"trust_remote_code": model.trust_remote_code, "local_files_only": True}
        self.owns_module = self.adopts = shared is None
        self.hf: Any = shared
        if shared is None:
            self.hf = AutoModelForCausalLM.from_pretrained(
                folder, dtype=self.dtype, attn_implementation=self.attention, **options
            )
            # Parameters go on requiring a gradient, though none is ever made: torch chooses kernels by that, and the
            # log-probs are to be, to the last bit, those of a trained module that is shared.
            self.hf.to(device).eval()
        self.shapes: Shapes = {name: tuple(parameter.shape) for name, parameter in self.hf.named_parameters()}
        self._shards = TensorShards(self.hf, tensor_group) if tensor_group is not None else None
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        ends = end_tokens(self.hf.generation_config, self.tokenizer)
        self.end_ids = torch.tensor(ends, dtype=torch.int64, device=device)

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """See RolloutEngine. A shared module already has the weights, so that only the version moves."""
        if self.owns_module:
            own = dict(self.hf.named_parameters())
            check_fit(self.shapes, shapes)
            with torch.no_grad():
                for name, tensor in as_announced(weights, shapes):
                    own[name].copy_(tensor if self._shards is None else self._shards.part(name, tensor))
        self.version = version

    def adopt(self, shards: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """See RolloutEngine."""
        own = dict(self.hf.named_parameters())
        check_fit({name: tuple(parameter.shape) for name, parameter in own.items()}, shapes)
        self.version = -1  # until all are there
        for name, tensor in as_announced(shards, shapes):
            own[name].data = tensor
        self.version = version

    def generate(self, batch: DataProto, sampling: Sampling) -> DataProto:
        """See RolloutEngine."""
        prompts = batch.view("prompts").to_list()
        keys = [
            sampling.key(str(u), int(i)) for u, i in zip(batch.view("uid"), batch.view("sample_index"), strict=True)
        ]
        # Rows with the same prompt stand together, and prompts of like length do.
        order = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), prompts[row].tolist()))
        done: dict[int, Response] = {}
        with self._generating():
            for start in range(0, len(order), self.batch_size):
                rows = order[start : start + self.batch_size]
                noise = uniform_noise(torch.tensor([keys[r] for r in rows]), 0, sampling.max_tokens).to(self.device)
                done.update(zip(rows, self._decode([prompts[r] for r in rows], noise, sampling), strict=True))
        responses = [done[row] for row in range(len(prompts))]
        return response_columns(responses, batch.view("prompts").lengths, self.tokenizer, self.version)

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

    def _decode(self, prompts: list[Tensor], noise: Tensor, sampling: Sampling) -> list[Response]:
        """Sample one response for each prompt; `noise` is [rows, max_tokens]."""
        logits, cache, mask, row_of_prompt = self._prefill(prompts, sampling.max_tokens)
        rows = [Response() for _ in prompts]
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
        self, rows: list[Response], live: Tensor, tokens: Tensor, log_probs: Tensor, position: int, sampling: Sampling
    ) -> Tensor:
        """Append the new tokens to rows that go on and return bool [live]: which rows have ended (now or before)."""
        is_end = torch.isin(tokens, self.end_ids).tolist()
        ended = []
        for row, token, log_prob, end in zip(live.tolist(), tokens.tolist(), log_probs.tolist(), is_end, strict=True):
            state = rows[row]
            if not state.finished:
                state.tokens.append(token)
                state.log_probs.append(log_prob)
                may_stop = position + 1 >= sampling.min_tokens
                state.finished = end or (may_stop and ends_with_stop(state.tokens, sampling.stop, self.tokenizer))
            ended.append(state.finished)
        return torch.tensor(ended, device=self.device)
