"""Rollouts on a Hugging Face model: one prefill for each different prompt, decoding without finished rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.assets import model_path
from rlcore.config import ModelConfig
from rlcore.engine.responses import Response, end_tokens, ends_with_stop, response_columns
from rlcore.engine.rollout import RolloutEngine, Sampling
from rlcore.engine.weights.meter import Group
from rlcore.engine.weights.transfer import Shapes, check_same_parameters, checked
from rlcore.engines.hf.cache import BufferedCache
from rlcore.engines.hf.fused_decode import LeanDecoder
from rlcore.engines.hf.sampling import sample_tokens
from rlcore.engines.hf.tensor_shards import TensorShards
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
        self.shares_module = shared is not None
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
        self._lean: LeanDecoder | None = None
        if tensor_group is None:
            with self._generating():
                self._lean = LeanDecoder.of(self.hf, self.dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        ends = end_tokens(self.hf.generation_config, self.tokenizer)
        self.end_ids = torch.tensor(ends, dtype=torch.int64, device=device)

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """See RolloutEngine. A shared module already has the weights, so that only the version moves."""
        if self.owns_module:
            own = dict(self.hf.named_parameters())
            check_same_parameters(self.shapes, shapes)
            with torch.no_grad():
                for name, tensor in checked(weights, shapes):
                    own[name].copy_(tensor if self._shards is None else self._shards.part(name, tensor))
        self.version = version

    def adopt(self, shards: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """See RolloutEngine."""
        own = dict(self.hf.named_parameters())
        check_same_parameters({name: tuple(parameter.shape) for name, parameter in own.items()}, shapes)
        self.version = -1  # until all are there
        for name, tensor in checked(shards, shapes):
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
        longest = max(map(len, prompts), default=0) + sampling.max_tokens
        with self._generating(), nullcontext() if self._lean is None else self._lean.ready(longest, self.device):
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
            with torch.no_grad():
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
        sampled = _Sampled(len(prompts), sampling, self.end_ids, self.tokenizer)
        logits, cache, lengths, mask = self._prefill(prompts, sampling.max_tokens)
        padded = bool((mask < 0).any())
        end = mask.shape[1] - sampling.max_tokens
        live = torch.arange(len(prompts), device=self.device)
        for position in range(sampling.max_tokens):
            banned = self.end_ids if position < sampling.min_tokens else None
            tokens, log_probs = sample_tokens(logits, noise[live, position], sampling, banned)
            ended = sampled.book(live, position, tokens, log_probs)
            going = len(live) - int(ended.sum())
            if not going or position + 1 == sampling.max_tokens:
                break
            if going < len(live):
                # Rows that go on move to where others ended, so that nearly all stay where they are.
                holes = ended[:going].nonzero().squeeze(-1)
                fillers = going + (~ended[going:]).nonzero().squeeze(-1)
                cache.drop(holes, fillers, going)
                for each in (live, tokens, lengths, mask):
                    each[holes] = each[fillers]
                live, tokens, lengths, mask = live[:going], tokens[:going], lengths[:going], mask[:going]
            seen = mask[:, : end + position + 1]
            if self._lean is not None:
                logits = self._lean.step(tokens, lengths + position, seen if padded else None, cache)
            else:
                logits = self._forward(tokens[:, None], seen, (lengths + position)[:, None], cache)
        return sampled.responses()

    def _prefill(self, prompts: list[Tensor], max_tokens: int) -> tuple[Tensor, BufferedCache, Tensor, Tensor]:
        """Run each different prompt once, padded on the left, and hand what it gave to all of its rows.

        Returns by row: the logits of the next token [rows, vocab], the cache, the prompts' lengths int64 [rows], and
        the mask fp32 [rows, longest + max_tokens]: -inf where there is padding, else 0.
        """
        different: dict[tuple[int, ...], int] = {}
        rows = torch.tensor([different.setdefault(tuple(p.tolist()), len(different)) for p in prompts])
        lengths = torch.tensor([len(prompt) for prompt in different])
        longest = int(lengths.max())
        slots = torch.arange(longest + max_tokens)
        mask = torch.zeros(len(different), len(slots)).masked_fill(slots < (longest - lengths)[:, None], float("-inf"))
        ids = torch.zeros(len(different), longest, dtype=torch.int64)
        for row, prompt in enumerate(different):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        positions = (slots[:longest] - (longest - lengths)[:, None]).clamp(min=0)
        rows, lengths, mask = rows.to(self.device), lengths.to(self.device), mask.to(self.device)
        cache = BufferedCache(self.hf.config.get_text_config().num_hidden_layers, len(slots))
        logits = self._forward(ids.to(self.device), mask[:, :longest], positions.to(self.device), cache)
        cache.pick(rows, self.dtype if self._lean is not None else None)
        return logits[rows], cache, lengths[rows], mask[rows]

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: BufferedCache) -> Tensor:
        with self._autocast():
            out = self.hf(
                input_ids=ids,
                attention_mask=(mask == 0).long(),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return out.logits[:, -1]


class _Sampled:
    """The tokens and log-probs of all rows, [rows, max_tokens] each, and which rows have ended after how many."""

    def __init__(self, rows: int, sampling: Sampling, end_ids: Tensor, tokenizer: Any) -> None:
        device = end_ids.device
        self.sampling, self.end_ids, self.tokenizer = sampling, end_ids, tokenizer
        self.tokens = torch.zeros(rows, sampling.max_tokens, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(rows, sampling.max_tokens, device=device)
        self.lengths = torch.full((rows,), sampling.max_tokens, dtype=torch.int64, device=device)
        self.finished = torch.zeros(rows, dtype=torch.bool, device=device)

    def book(self, live: Tensor, position: int, tokens: Tensor, log_probs: Tensor) -> Tensor:
        """Append a token to the rows `live` int64 [live] and return bool [live]: which of them end with it."""
        self.tokens[live, position], self.log_probs[live, position] = tokens, log_probs
        ended = (tokens[:, None] == self.end_ids).any(-1)
        if self.sampling.stop and position + 1 >= self.sampling.min_tokens:
            so_far = self.tokens[live, : position + 1].tolist()
            stops = [ends_with_stop(row, self.sampling.stop, self.tokenizer) for row in so_far]
            ended = ended | torch.tensor(stops, device=ended.device)
        self.finished[live] = ended
        self.lengths[live[ended]] = position + 1
        return ended

    def responses(self) -> list[Response]:
        """Return all rows."""
        rows = zip(*(each.tolist() for each in (self.tokens, self.log_probs, self.lengths, self.finished)), strict=True)
        return [Response(tokens[:n], log_probs[:n], finished) for tokens, log_probs, n, finished in rows]
