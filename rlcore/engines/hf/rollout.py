"""Rollouts on a Hugging Face model: one prefill for each distinct prompt; rows join and leave while others decode."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlcore.config import ModelConfig
from rlcore.end_tokens import end_tokens
from rlcore.engine.adapter import adapted, effective_weights
from rlcore.engine.attention import plain_attention
from rlcore.engine.rollout import Finished, Reason, Request, RolloutEngine, check_requests, refuse_in_flight
from rlcore.engine.weights.fingerprint import checksum
from rlcore.engine.weights.meter import Group
from rlcore.engine.weights.transfer import Shapes, check_same_parameters, checked
from rlcore.engines.hf.cache import BufferedCache
from rlcore.engines.hf.family import check_family
from rlcore.engines.hf.fused_decode import FusedDecodeStep, unsupported
from rlcore.engines.hf.kept_rows import KeptRows, fill
from rlcore.engines.hf.rows import DecodingRows, Row
from rlcore.engines.hf.slot_rows import SlotRows, capturable
from rlcore.engines.hf.tensor_shards import TensorShards
from rlcore.errors import DataError
from rlcore.model_folder import loading_options, model_dtype, model_path, read_tokenizer, router_options

PREFILL_TOKENS = 2**15
"""Tokens of distinct prompts, with padding, in one forward: enough for a GPU, and few enough for its memory."""


class HFRollout(RolloutEngine):
    """Decodes with a Hugging Face module: the train engine's own if this process has all of it, else a copy.

    `batch_size` rows have a slot and decode together; further requests wait for one. While requests are in flight a
    shared module is in the state for decoding; afterwards training's settings are restored.

    `tensor_group`: the ranks that decode the same rows together, each with its shard of the linear layers. They sample
    the same tokens, because each computes the same logits and every row has its own noise.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        batch_size: int,
        graphs: Literal["auto", "off"] = "auto",
        device: torch.device,
        shared: nn.Module | None,
        tensor_group: Group | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.slots, self.device = batch_size, device
        self.dtype = model_dtype(model)
        self.exact = self.dtype is torch.float32
        self.attention = plain_attention(model)
        self._is_shared = shared is not None
        self.hf: Any = shared
        self._mixed = shared is not None and self.dtype is not torch.float32
        if shared is None:
            self.hf = AutoModelForCausalLM.from_pretrained(
                model_path(model.path, code=model.trust_remote_code),
                dtype=self.dtype,
                attn_implementation=self.attention,
                **loading_options(model),
                **router_options(model),
            )
            # Parameters keep requires_grad, though no gradient is ever computed: torch chooses kernels by it, and the
            # log-probs must equal those of a shared trained module to the last bit.
            self.hf.to(device).eval()
            # Other decoders may not mix dtypes: a CPU's layer norm takes no fp32 input with weights in bf16.
            self._mixed = self.dtype is not torch.float32 and unsupported(self.hf) is None
            if self._mixed:
                self.hf.get_input_embeddings().register_forward_hook(_in_fp32)
        self.shapes: Shapes = {name: tuple(parameter.shape) for name, parameter in self.hf.named_parameters()}
        self._shards = TensorShards(self.hf, tensor_group) if tensor_group is not None else None
        self._fused: FusedDecodeStep | None = None
        self.description = "decodes with the module's own forward, as rollout.tp divides its layers"
        if tensor_group is None:
            with self._decoding_mode():
                self._fused, self.description = FusedDecodeStep.of(self.hf, self.dtype)
            if self._fused is None:
                with self._decoding_mode(), self._autocast():
                    check_family(self.hf, self._prefilled, self._forward, exact=self.exact)
        self.tokenizer = read_tokenizer(model)
        ends = end_tokens(model, self.tokenizer)
        self.end_ids = torch.tensor(ends, dtype=torch.int64, device=device)
        self._in_flight: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._rows: DecodingRows | None = None
        self._kept = KeptRows(device)
        self._mode: ExitStack | None = None
        self._in_slots = False
        self._slots: SlotRows | None = None
        if adapted(self.hf):
            self.description += ", with its adapter"
        elif graphs == "auto" and device.type == "cuda" and self._fused is not None:
            with self._decoding_mode():
                self._slots, form = capturable(self.hf, self.dtype, self.end_ids, self.tokenizer, self._prefilled)
            self.description = f"decodes {form}" if self._slots is not None else f"{self.description}, as {form}"

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """See RolloutEngine. A shared module already has the weights, so only the version changes."""
        refuse_in_flight(self.in_flight)
        self.forget(list(self._kept))
        if not self._is_shared:
            own = dict(self.hf.named_parameters())
            check_same_parameters(self.shapes, shapes)
            self.version = -1  # until all weights are copied: an interrupted sync leaves a mixture
            with torch.no_grad():
                for name, tensor in checked(weights, shapes):
                    own[name].copy_(tensor if self._shards is None else self._shards.shard_of(name, tensor))
        self.version = version

    def adopt(self, shards: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """See RolloutEngine."""
        refuse_in_flight(self.in_flight)
        self.forget(list(self._kept))
        own = dict(self.hf.named_parameters())
        check_same_parameters({name: tuple(parameter.shape) for name, parameter in own.items()}, shapes)
        self.version = -1  # until all weights are replaced
        for name, tensor in checked(shards, shapes):
            own[name].data = tensor
        self.version = version

    def fingerprint(self) -> dict[str, int]:
        """See RolloutEngine."""
        if self._shards is not None:
            return self._shards.fingerprint(self.hf, self.shapes)
        return {name: checksum(weight) for name, weight in effective_weights(self.hf)}

    def add(self, requests: Sequence[Request]) -> None:
        """See RolloutEngine."""
        if self.version < 0:
            raise DataError("the engine has no complete set of weights: call sync before the first request")
        check_requests(requests, self._in_flight)
        if self._kept.version != self.version:  # a shared module's weights change without a call
            self._kept.drop(list(self._kept))
        self._in_flight.update((request.id, request) for request in requests)
        self._waiting.extend(requests)

    @property
    def in_flight(self) -> Collection[str]:
        """See RolloutEngine."""
        return self._in_flight.keys()

    def step(self) -> list[Finished]:
        """See RolloutEngine. Decodes one token of each row; in slots several."""
        if not self._in_flight:
            return []
        if self._mode is None:
            self._mode = ExitStack()
            self._mode.enter_context(self._decoding_mode())
        with torch.no_grad():
            # Slots are chosen or refused only while no row decodes: a row cannot change its form of decoding.
            if self._slots is not None and self._rows is None and not self._slots.requests:
                in_slots = self._slots.open(self._waiting, self.slots)
                if in_slots != self._in_slots:  # the other decoder's keys and values have another form
                    self._kept.drop(list(self._kept))
                self._in_slots = in_slots
            if self._slots is not None and self._in_slots:
                return self._step_in_slots(self._slots)
            logits = [] if self._rows is None else [self._decode(self._rows)]
            rows = 0 if self._rows is None else len(self._rows.rows)
            known, new = self._divided(self._admitted(self.slots, rows, len(self._waiting)))
            for part in self._continued_parts(known):
                next_logits, cache, _, lengths = self._continued(part)
                self._join(part, int(lengths.max()), cache, lengths)
                logits.append(next_logits)
            logits += [self._prefill(part, longest) for part, longest in prefill_parts(new)]
            self._forget_continued(known)
            assert self._rows is not None
            drawn = self._rows.draw(logits[0] if len(logits) == 1 else torch.cat(logits), self.end_ids)
            return self._leave(self._rows.append(*drawn, self.end_ids, self.tokenizer))

    def _step_in_slots(self, slots: SlotRows) -> list[Finished]:
        """Let waiting requests join up to the first that does not fit, and decode up to the next look."""
        fitting = 0
        while fitting < len(self._waiting) and slots.fits(self._waiting[fitting]):
            fitting += 1
        known, new = self._divided(self._admitted(slots.slots, len(slots.requests), fitting))
        for part in self._continued_parts(known):
            slots.join(part, *self._continued(part)[:3])
        for part, longest in prefill_parts(new):
            slots.join(part, *self._prefilled(part, longest)[:3])
        self._forget_continued(known)
        return self._forget(slots.advance(self.version, self._kept))

    def _divided(self, requests: list[Request]) -> tuple[list[Request], list[Request]]:
        """Return the requests that continue a kept row, and those whose tokens are all computed."""
        known = [request for request in requests if request.after in self._kept]
        return known, [request for request in requests if request.after not in self._kept] if known else requests

    def _forget_continued(self, known: Sequence[Request]) -> None:
        """Drop kept rows that have been continued, but for those that a waiting request continues too."""
        awaited = {request.after for request in self._waiting} if known else set()
        self._kept.drop([each.after for each in known if each.after is not None and each.after not in awaited])

    def _forget(self, finished: list[Finished]) -> list[Finished]:
        """Remove rows that have left from the requests in flight."""
        for row in finished:
            del self._in_flight[row.id]
        self._release_if_idle()
        return finished

    def abort(self, ids: Collection[str]) -> list[Finished]:
        """See RolloutEngine."""
        gone = dict.fromkeys(ids)
        if unknown := [each for each in ids if each not in self._in_flight]:
            raise DataError(f"cannot abort {', '.join(map(repr, unknown))}: no such request is in flight")
        self._waiting = deque(request for request in self._waiting if request.id not in gone)
        rows = [] if self._rows is None else self._rows.rows
        aborted = self._leave({index: "abort" for index, row in enumerate(rows) if row.request.id in gone})
        if self._slots is not None:
            aborted += self._forget(self._slots.abort(gone, self.version))
        for request in [self._in_flight.pop(each) for each in gone if each in self._in_flight]:  # without a slot
            aborted.append(Finished(request.id, request.sampled, request.sampled_log_probs, "abort", self.version))
        self._release_if_idle()
        return aborted

    def so_far(self, ids: Collection[str]) -> dict[str, Sequence[int]]:
        """See RolloutEngine."""
        found = {} if self._rows is None else self._rows.so_far(ids)
        return found if self._slots is None else {**found, **self._slots.so_far(ids)}

    def forget(self, ids: Collection[str]) -> None:
        """See RolloutEngine."""
        self._kept.drop(ids)
        self._release_if_idle()

    def close(self) -> None:
        """See RolloutEngine."""
        self.abort(self.in_flight)
        self.forget(list(self._kept))

    def _admitted(self, slots: int, taken: int, fitting: int) -> list[Request]:
        """Take the requests that get slots now from the first `fitting` of the queue; possibly none.

        A prefill of few rows wastes time, so rows join when an eighth of the slots is free, or when all that fit get
        one.
        """
        count = min(slots - taken, fitting)
        if count < min(fitting, max(1, slots // 8)):
            return []
        return [self._waiting.popleft() for _ in range(count)]

    def _leave(self, reasons: Mapping[int, Reason]) -> list[Finished]:
        """Return the rows at these indices, each with its reason, and free their slots."""
        finished: list[Finished] = []
        if reasons:
            assert self._rows is not None
            finished = self._rows.finished(reasons, self.version)
            self._kept.keep(self._rows.kept(reasons).items(), self.version)
            if len(reasons) < len(self._rows.rows):
                self._rows.drop(reasons)
            else:
                self._rows = None
        return self._forget(finished)

    def _release_if_idle(self) -> None:
        """Without requests in flight and rows to continue, release all memory, and give the module back to training."""
        if not self._in_flight and not self._kept and self._mode is not None:
            if self._fused is not None:
                self._fused.release()
            self._mode.close()
            self._mode = self._rows = None

    @contextmanager
    def _decoding_mode(self) -> Iterator[None]:
        """Keep the module in the state for decoding, then restore training's settings."""
        # Module by module: gradient checkpointing trains single layers only.
        training = [module for module in self.hf.modules() if module.training]
        implementation = self.hf.config._attn_implementation
        self.hf.config._attn_implementation = self.attention
        self.hf.eval()
        try:
            yield
        finally:
            self.hf.config._attn_implementation = implementation
            for module in training:
                module.training = True

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self._mixed:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def _decode(self, rows: DecodingRows) -> Tensor:
        """Feed the newest token of each row and return the logits of the next, [rows, vocab]."""
        tokens, mask = rows.tokens[:, rows.length - 1], rows.mask[:, : rows.length]
        if self._fused is not None:
            seen = mask[:, None] if rows.is_padded else None
            logits = self._fused.step(tokens[:, None], rows.positions[:, None], seen, rows.cache)
        else:
            logits = self._forward(tokens[:, None], mask, rows.positions[:, None], rows.cache)
        rows.positions = rows.positions + 1
        return logits

    def _prefill(self, requests: Sequence[Request], longest: int) -> Tensor:
        """Let rows join the others. Returns the logits of the next token of all new rows, [new rows, vocab]."""
        logits, cache, index, lengths = self._prefilled(requests, longest)
        if self._fused is not None:
            self._fused.prepare(_columns(requests, longest), self.device)
        cache.select(index, self.dtype if self._fused is not None else None)
        self._join(requests, longest, cache, lengths)
        return logits

    def _join(self, requests: Sequence[Request], longest: int, cache: BufferedCache, lengths: Tensor) -> None:
        """Let rows join the others; `cache` holds their keys and values up to column `longest`."""
        own = [longest - length for length in lengths.tolist()]
        new = [Row(request, start, longest) for request, start in zip(requests, own, strict=True)]
        rows = DecodingRows(new, longest, lengths.to(self.device), cache)
        if self._rows is None:
            self._rows = rows
        else:
            self._rows.join(rows)

    def _prefilled(self, requests: Sequence[Request], longest: int) -> tuple[Tensor, BufferedCache, Tensor, Tensor]:
        """Run each distinct prompt once, padded on the left to `longest` tokens.

        Returns the logits of the next token of each request [requests, vocab], the cache of the distinct prompts, the
        row of each request in it, int64 [requests] on the device, and the requests' lengths, int64 [requests].
        """
        distinct: dict[tuple[int, ...], int] = {}
        known = list(map(known_tokens, requests))
        index = torch.tensor([distinct.setdefault(tokens, len(distinct)) for tokens in known])
        lengths = torch.tensor([len(tokens) for tokens in distinct])
        columns = torch.arange(longest)
        starts = (longest - lengths)[:, None]
        mask = torch.zeros(len(distinct), longest).masked_fill(columns < starts, float("-inf"))
        ids = torch.zeros(len(distinct), longest, dtype=torch.int64)
        for row, tokens in enumerate(distinct):
            ids[row, longest - len(tokens) :] = torch.tensor(tokens)
        cache = BufferedCache.of(self.hf.config, _columns(requests, longest))
        positions = (columns - starts).clamp(min=0)
        logits = self._forward(ids.to(self.device), mask.to(self.device), positions.to(self.device), cache)
        placed = index.to(self.device)
        return logits[placed], cache, placed, lengths[index]

    def _continued_parts(self, requests: list[Request]) -> Iterator[list[Request]]:
        """Divide requests that continue kept rows among forwards.

        A forward's rows have at most `PREFILL_TOKENS` tokens, the kept ones with it: their keys and values are copied.
        """

        def new_tokens(request: Request) -> int:
            kept = self._kept[request.after or ""].length
            return max(1, len(known_tokens(request)) - kept)

        part: list[Request] = []
        longest = 0
        # Neighbours of similar length: a row with fewer new tokens than its part's most computes some again.
        for request in sorted(requests, key=new_tokens, reverse=True):
            longest = max(longest, len(known_tokens(request)))
            if part and (len(part) + 1) * longest > PREFILL_TOKENS:
                yield part
                part, longest = [], len(known_tokens(request))
            part.append(request)
        if part:
            yield part

    def _continued(self, requests: Sequence[Request]) -> tuple[Tensor, BufferedCache, Tensor, Tensor]:
        """Compute the new tokens of requests that continue kept rows; returns the same as `_prefilled`."""
        known = list(map(known_tokens, requests))
        kept = [self._kept[request.after] for request in requests if request.after is not None]
        longest = max(map(len, known))
        # One forward of the last tokens of every row, at least one: of shorter continuations some are computed again.
        width = max(len(tokens) - min(row.length, len(tokens) - 1) for tokens, row in zip(known, kept, strict=True))
        seen = [max(0, len(tokens) - width) for tokens in known]
        room = _columns(requests, longest)
        cache = BufferedCache.of(self.hf.config, room)
        if longest > width:
            fill(cache, kept, seen, longest - width, longest)
        lengths = torch.tensor(list(map(len, known)))
        ids = torch.zeros(len(known), width, dtype=torch.int64)
        for row, tokens in enumerate(known):
            newest = tokens[seen[row] :]
            ids[row, width - len(newest) :] = torch.tensor(newest)
        columns, starts = torch.arange(longest), (longest - lengths)[:, None]
        newest_columns = columns[longest - width :]
        positions = (newest_columns - starts).clamp(min=0).to(self.device)
        if self._fused is None or self._in_slots:  # beside slots the fused step would hold a second copy of the weights
            mask = torch.zeros(len(known), longest).masked_fill(columns < starts, float("-inf"))
            logits = self._forward(ids.to(self.device), mask.to(self.device), positions, cache)
        else:
            hidden = (columns < starts)[:, None] | (columns > newest_columns[:, None])
            mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
            self._fused.prepare(room, self.device)
            logits = self._fused.step(ids.to(self.device), positions, mask.to(self.device), cache)
        return logits, cache, torch.arange(len(known), device=self.device), lengths

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


def _in_fp32(module: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
    """Begin the residual stream in fp32, as a trainer with fp32 weights does."""
    return embedded.float()


def _columns(requests: Sequence[Request], longest: int) -> int:
    """Return the most columns that requests need whose known tokens end at column `longest`."""
    return longest + max(request.sampling.max_tokens - len(request.sampled) for request in requests)


def known_tokens(request: Request) -> tuple[int, ...]:
    """Return the prompt and the tokens that were sampled before."""
    return (*request.prompt, *request.sampled)


def prefill_parts(requests: Sequence[Request]) -> Iterator[tuple[list[Request], int]]:
    """Divide requests among forwards of at most `PREFILL_TOKENS` tokens; yield each part with the tokens of a row.

    Requests with the same prompt share a part. All parts have the same width, so that a row's numbers differ from
    those in one forward by the rounding of products with fewer rows only.
    """
    prompts: dict[tuple[int, ...], list[Request]] = {}
    for request in requests:
        prompts.setdefault(known_tokens(request), []).append(request)
    longest = max(map(len, prompts), default=1)
    groups, rows = list(prompts.values()), max(1, PREFILL_TOKENS // longest)
    if len(groups) <= rows:
        groups = [list(requests)] if requests else []  # in the order of the requests
    for start in range(0, len(groups), rows):
        yield [request for group in groups[start : start + rows] for request in group], longest
