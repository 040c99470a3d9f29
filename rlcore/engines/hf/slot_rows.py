"""Requests in slots: rows that a static step decodes, on a GPU by replaying CUDA graphs.

A graph is captured once for each number of rows (the slots, and halves of them) and kept, since buffers and weights
keep their addresses. The host looks for ended rows every few steps. The remaining rows then move together, so that the
next graph can be a smaller one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlcore.engine.device import pays_to_compile
from rlcore.engine.responses import ends_with_stop
from rlcore.engine.rollout import Finished, Reason, Request, Sampling
from rlcore.engine.sampling import sample_tokens
from rlcore.engines.hf.cache import BufferedCache
from rlcore.engines.hf.fused_decode import rotary_tables
from rlcore.engines.hf.kept_rows import KeptRows, SlotStates, free_memory
from rlcore.engines.hf.static_decode import (
    Draw,
    Slots,
    StaticStep,
    StepWeights,
    draw_in_blocks,
    flash_attention,
    masked_attention,
)
from rlcore.ops import uniform_noise

log = logging.getLogger(__name__)

LOOK_EVERY = 16
"""Steps between two looks of the host; an ended row occupies its slot until the next look."""
FEWEST_ROWS = 8
"""Number of rows of the smallest graph."""
COSTLY_ROWS = 96
"""Number of rows from which a step's time grows with it (docs/gpu.md)."""
ROUNDED_TO = 128
"""Tokens of which a slot's width and its room for a response are multiples."""
MEMORY_SHARE, FREE_SHARE = 0.25, 0.6
"""Largest share of the device's memory, and of its free memory, that slots take."""


@dataclass(frozen=True)
class SlotSampling:
    """The sampling parameters that all rows of a batch of slots share."""

    temperature: float
    top_p: float
    top_k: int

    @staticmethod
    def of(sampling: Sampling) -> SlotSampling:
        """Return the distribution of a request."""
        return SlotSampling(sampling.temperature, sampling.top_p, sampling.top_k)

    @property
    def is_plain(self) -> bool:
        """Whether neither top-k nor top-p restricts the tokens, at a temperature above 0."""
        return self.temperature > 0 and self.top_p >= 1 and self.top_k == 0


@dataclass(frozen=True)
class SlotNeeds:
    """The tokens, rounded up, of the longest row, of the longest row after its later turns, and of the most to draw."""

    width: int
    whole: int
    room: int

    @staticmethod
    def of(requests: Sequence[Request]) -> SlotNeeds:
        """Return the needs of requests."""
        width = _rounded(max(len(each.prompt) + each.sampling.max_tokens for each in requests))
        whole = _rounded(max(each.row_limit or 0 for each in requests))
        return SlotNeeds(width, max(width, whole), _rounded(max(each.sampling.max_tokens for each in requests)))

    def grown(self, other: SlotNeeds) -> SlotNeeds:
        """Return what suffices for both."""
        return SlotNeeds(max(self.width, other.width), max(self.whole, other.whole), max(self.room, other.room))


class SlotRows:
    """The rows that decode in slots: requests join with the results of their prefill, and leave as Finished.

    `capture`: replay CUDA graphs; otherwise each step runs eagerly. `compiled`: the step's pieces are compiled.
    `kernel`: attend by our own Triton kernel in bf16 on a GPU.
    """

    def __init__(
        self,
        hf: Any,
        dtype: torch.dtype,
        end_ids: Tensor,
        tokenizer: Any,
        *,
        capture: bool,
        compiled: bool,
        kernel: bool = False,
    ) -> None:
        self.hf, self.dtype, self.end_ids, self.tokenizer = hf, dtype, end_ids, tokenizer
        self.device, self.capture, self.compiled, self.kernel = end_ids.device, capture, compiled, kernel
        self.requests: list[Request] = []
        self._stored: list[int] = []
        self._weights: StepWeights | None = None
        self._step: StaticStep | None = None
        self._distribution = SlotSampling(1.0, 1.0, 0)
        self._bans = False
        self._needs = SlotNeeds(0, 0, 0)
        self._graphs: dict[tuple[int, SlotSampling, bool], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._fast_draw = torch.compile(draw_in_blocks) if compiled else draw_in_blocks

    @property
    def slots(self) -> int:
        """The number of slots; 0 before `open`."""
        return 0 if self._step is None else self._step.slots.slots

    def open(self, waiting: Sequence[Request], most: int) -> bool:
        """Prepare slots for requests with the first one's distribution; False if memory is too small.

        Called while no row has a slot. Copies the current weights. There are at most `most` slots.
        """
        self._distribution = SlotSampling.of(waiting[0].sampling)
        compatible = [each for each in waiting if SlotSampling.of(each.sampling) == self._distribution]
        self._bans = any(each.sampling.min_tokens for each in compatible)
        if self._weights is None:
            self._weights = StepWeights(self.hf, self.dtype)
        self._weights.refresh()
        needs = SlotNeeds.of(compatible)
        # Buffers only grow, so that graphs are captured again as rarely as possible.
        if self._step is not None:
            s, known = self._step.slots, self._needs
            self._needs = needs = needs.grown(known)
            if needs.width <= s.width and needs.room <= s.room and needs.whole <= known.whole:
                return True
        self.release()
        slots = min(most, self._affordable(needs.width, needs.room))
        if slots < min(most, FEWEST_ROWS):
            return False
        # Room for later turns costs no slot: where memory is short, the slots are narrower.
        widths = range(needs.whole, needs.width, -ROUNDED_TO)
        width = next((each for each in widths if self._affordable(each, needs.room) >= slots), needs.width)
        self._step, self._needs = self._new_step(slots, width, needs.room), needs
        return True

    def release(self) -> None:
        """Free the slots, before others are allocated. Graphs hold their addresses, so they go too."""
        self._step, self._pool = None, None
        self._graphs.clear()

    def _affordable(self, width: int, room: int) -> int:
        """Return the number of slots that fit into the device's memory."""
        assert self._weights is not None
        if self.device.type != "cuda":
            return 2**31
        free, total = free_memory(self.device)
        return int(min(MEMORY_SHARE * total, FREE_SHARE * free)) // Slots.bytes_of_one(width, room, self._weights)

    def _new_step(self, slots: int, width: int, room: int) -> StaticStep:
        assert self._weights is not None
        base = getattr(self.hf, self.hf.base_model_prefix)
        attention = masked_attention
        if self.device.type == "cuda" and self.dtype is torch.bfloat16:
            if self.kernel:
                from rlcore.engines.hf.decode_kernel import kernel_attention

                attention = kernel_attention
            elif self._weights.heads.size % 8 == 0:  # a condition of the flash kernel
                attention = flash_attention
        return StaticStep(
            Slots(slots, width, room, self._weights, self.device),
            self._weights,
            rotary_tables(base, width, self.device),
            self.end_ids,
            attention,
            compiled=self.compiled,
        )

    def kernel_error(self) -> float:
        """Return the largest error of the attention kernel; 0 where another form attends. Only after `open`."""
        if not self.kernel:
            return 0.0
        from rlcore.engines.hf.decode_kernel import largest_error

        assert self._weights is not None
        return largest_error(self._weights.heads, self.device)

    def fits(self, request: Request) -> bool:
        """Whether a request may join the rows that decode now."""
        assert self._step is not None
        sampling, slots = request.sampling, self._step.slots
        return (
            SlotSampling.of(sampling) == self._distribution
            and (self._bans or not sampling.min_tokens)
            and len(request.prompt) + sampling.max_tokens <= slots.width
            and sampling.max_tokens <= slots.room
        )

    def join(self, requests: Sequence[Request], logits: Tensor, cache: BufferedCache, index: Tensor) -> None:
        """Give requests slots, and draw the first token of each.

        `logits` [requests, vocab] are the logits of that token. Request i has row `index[i]`, int64 [requests], of
        `cache`, whose rows end at the cache's last column.
        """
        assert self._step is not None
        s, first = self._step.slots, len(self.requests)
        part = slice(first, first + len(requests))
        lengths = torch.tensor([len(each.prompt) + len(each.sampled) for each in requests])
        self._fill(cache, index, lengths, first)
        known = torch.tensor([len(each.sampled) for each in requests])
        limits = torch.tensor([each.sampling.max_tokens for each in requests]) - known
        s.positions[part] = (lengths - 1).to(self.device)
        s.limit[part] = limits.to(self.device)
        s.may_end[part] = (torch.tensor([each.sampling.min_tokens for each in requests]) - known).to(self.device)
        s.count[part], s.ended[part], s.by_itself[part] = 0, False, False
        keys = torch.tensor([each.key for each in requests])
        s.noise[part] = uniform_noise(keys.to(self.device), known.to(self.device), s.room)
        self.requests += requests
        self._stored += [0] * len(requests)
        self._step.draw(first, logits, self._draw(), bans=self._bans)

    def _fill(self, cache: BufferedCache, index: Tensor, lengths: Tensor, first: int) -> None:
        """Copy the keys and values of new rows into their slots, from `first` on."""
        assert self._step is not None
        s, columns = self._step.slots, cache.layers[0].length
        row = torch.repeat_interleave(lengths)
        token = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
        places = ((first + row) * s.width + token).to(self.device)
        start = (columns - lengths)[row].to(self.device) + token.to(self.device)
        source = index[row.to(self.device)] * columns + start
        for layer, kept in zip(cache.layers, s.cache, strict=True):
            both = torch.stack([layer.keys[:, :, :columns], layer.values[:, :, :columns]], dim=3)
            filled = both.transpose(1, 2).transpose(2, 3).flatten(0, 1)  # [rows * columns, 2, heads, size]
            kept.flatten(0, 1).index_copy_(0, places, filled.index_select(0, source).to(self.dtype))

    def _draw(self) -> Draw:
        """Return the function that draws tokens; on a GPU without top-k and top-p one with few passes."""
        each = self._distribution
        if self.device.type == "cuda" and each.is_plain:
            return partial(self._fast_draw, temperature=each.temperature)
        sampling = Sampling(1, temperature=each.temperature, top_p=each.top_p, top_k=each.top_k)
        return lambda logits, noise: sample_tokens(logits, noise, sampling)

    def advance(self, version: int, kept: KeptRows) -> list[Finished]:
        """Decode all rows by up to LOOK_EVERY tokens; return the ended ones and free their slots.

        The keys and values of ended rows that will be continued go to `kept`.
        """
        assert self._step is not None
        limits = [each.sampling.max_tokens - len(each.sampled) for each in self.requests]
        left = max(limit - max(1, stored) for limit, stored in zip(limits, self._stored, strict=True))
        step = self._replayed(self._graph_rows(len(self.requests)))
        for _ in range(min(LOOK_EVERY, left)):
            step()
        return self._look(version, kept)

    def _graph_rows(self, live: int) -> int:
        """Return the rows of the smallest graph that holds `live` rows: half the slots, a quarter and so on.

        Three quarters of such a number count too while a row more costs time. With few rows the time is that of reading
        the weights.
        """
        rows = self.slots
        while rows // 2 >= max(live, min(FEWEST_ROWS, self.slots)):
            rows //= 2
        between = rows * 3 // 4
        return between if between >= max(live, COSTLY_ROWS) else rows

    def _replayed(self, rows: int) -> Callable[[], None]:
        """Return the function that decodes the first `rows` slots by one token."""
        assert self._step is not None
        run = partial(self._step, rows, self._draw(), bans=self._bans)
        if not self.capture:
            return run
        key = (rows, self._distribution, self._bans)
        if key not in self._graphs:
            self._graphs[key] = self._captured(run)
        return self._graphs[key].replay

    def _captured(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture `run`. All rows count as ended during warm-up and capture, so that these change nothing."""
        assert self._step is not None
        ended = self._step.slots.ended
        kept = ended.clone()
        ended.fill_(True)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Warm up on another stream, as torch requires before a capture: kernels choose their work space there.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        ended.copy_(kept)
        return graph

    def _look(self, version: int, kept: KeptRows) -> list[Finished]:
        """Fetch the flags of ended rows from the device, and return these rows."""
        assert self._step is not None
        s, rows = self._step.slots, len(self.requests)
        ended, by_itself, count = torch.stack([s.ended[:rows], s.by_itself[:rows], s.count[:rows]]).tolist()
        reasons: dict[int, tuple[Reason, int]] = {}
        for row in range(rows):
            if ended[row]:
                reasons[row] = ("end" if by_itself[row] else "length", count[row])
        reasons.update(self._stopped(count, reasons))
        self._stored = count
        kept.keep(self._states(reasons), version)
        return self._leave(reasons, version)

    def _states(self, reasons: Mapping[int, tuple[Reason, int]]) -> Iterator[tuple[str, SlotStates]]:
        """Copy keys and values of rows that will be continued: of all tokens but the newest, which is not fed yet."""
        assert self._step is not None
        for row, (_, count) in reasons.items():
            request = self.requests[row]
            if request.keep:
                length = len(request.prompt) + len(request.sampled) + count - 1
                yield request.id, SlotStates(self._step.slots.cache[:, row, :length].clone())

    def _stopped(self, count: Sequence[int], reasons: dict[int, tuple[Reason, int]]) -> dict[int, tuple[Reason, int]]:
        """Return the rows with a stop string completed since the last look, and the number of tokens to keep."""
        assert self._step is not None
        stopped: dict[int, tuple[Reason, int]] = {}
        for row, request in enumerate(self.requests):
            if not request.sampling.stop:
                continue
            tokens = self._step.slots.drawn[row, : count[row]].tolist()
            by_end = row in reasons and reasons[row][0] == "end"
            for end in range(self._stored[row] + 1, count[row] + (0 if by_end else 1)):
                whole = [*request.sampled, *tokens[:end]]
                may_end = len(whole) >= request.sampling.min_tokens
                if may_end and ends_with_stop(whole, request.sampling.stop, self.tokenizer):
                    stopped[row] = ("stop", end)
                    break
        return stopped

    def so_far(self, ids: Collection[str]) -> dict[str, Sequence[int]]:
        """Return the tokens of the rows of these requests as of the last look, by request id."""
        drawn_rows = [(row, each) for row, each in enumerate(self.requests) if self._stored[row] or each.sampled]
        rows = [(row, request) for row, request in drawn_rows if request.id in ids]
        if not rows or self._step is None:
            return {}
        drawn = self._step.slots.drawn
        return {request.id: [*request.sampled, *drawn[row, : self._stored[row]].tolist()] for row, request in rows}

    def abort(self, ids: Collection[str], version: int) -> list[Finished]:
        """Remove rows, with their tokens so far."""
        gone = {row: request for row, request in enumerate(self.requests) if request.id in ids}
        return self._leave({row: ("abort", self._stored[row]) for row in gone}, version)

    def _leave(self, reasons: dict[int, tuple[Reason, int]], version: int) -> list[Finished]:
        """Return rows as Finished, each with its reason and its number of tokens, and free their slots."""
        if not reasons:
            return []
        assert self._step is not None
        s = self._step.slots
        chosen, longest = torch.tensor(list(reasons), device=self.device), max(count for _, count in reasons.values())
        tokens, log_probs = s.drawn[chosen, :longest].tolist(), s.log_probs[chosen, :longest].tolist()
        finished = []
        for (row, (reason, count)), ids, values in zip(reasons.items(), tokens, log_probs, strict=True):
            request = self.requests[row]
            response = [*request.sampled, *ids[:count]], [*request.sampled_log_probs, *values[:count]]
            finished.append(Finished(request.id, *response, reason, version))
        self._drop(reasons)
        return finished

    def _drop(self, gone: Collection[int]) -> None:
        """Free the slots of rows; rows from the end move to the freed slots."""
        assert self._step is not None
        rows, left = len(self.requests), len(self.requests) - len(gone)
        holes = [row for row in range(left) if row in gone]
        fillers = [row for row in range(left, rows) if row not in gone]
        if holes:
            moved = [(self.requests[row], self._stored[row]) for row in fillers]
            columns = max(len(each.prompt) + len(each.sampled) + drawn for each, drawn in moved)
            to, come = (torch.tensor(each, device=self.device) for each in (holes, fillers))
            self._step.slots.move(to, come, columns)
        self._step.slots.ended[left:rows] = True
        for hole, filler in zip(holes, fillers, strict=True):
            self.requests[hole], self._stored[hole] = self.requests[filler], self._stored[filler]
        del self.requests[left:], self._stored[left:]


Prefill = Callable[[Sequence[Request], int], tuple[Tensor, BufferedCache, Tensor, Tensor]]
"""Runs requests' prompts, padded to a number of tokens; see HFRollout."""


def capturable(
    hf: Any, dtype: torch.dtype, end_ids: Tensor, tokenizer: Any, prefill: Prefill
) -> tuple[SlotRows | None, str]:
    """Return slots for a module on a GPU, in the fastest form that passes a probe, and a description of the form.

    Without slots, the description is the reason. The log has a line for each form that failed.
    """
    reason = ""
    parameters = sum(parameter.numel() for parameter in hf.parameters())
    forms = {"CUDA graphs": {"compiled": False}}
    if pays_to_compile(end_ids.device, parameters):
        forms = {"CUDA graphs of compiled pieces": {"compiled": True}, **forms}
        if dtype is torch.bfloat16:
            fastest = {"compiled": True, "kernel": True}
            forms = {"CUDA graphs of compiled pieces and an attention kernel": fastest, **forms}
    for form, options in forms.items():
        rows = SlotRows(hf, dtype, end_ids, tokenizer, capture=True, **options)
        try:
            off = max(probe(rows, prefill), rows.kernel_error())
        except (RuntimeError, ValueError, TypeError, AttributeError, ImportError, OSError) as error:
            log.info("%s cannot decode in %s: %s: %s", type(hf).__name__, form, type(error).__name__, error)
            reason = f"{form} failed with {type(error).__name__}"
            continue
        # bf16 rounds log-probs and attention by about 1e-2.
        if off <= (1e-4 if dtype is torch.float32 else 5e-2):
            log.info("%s decodes in slots, replaying %s", type(hf).__name__, form)
            return rows, f"in slots, replaying {form}"
        log.info("%s does not decode in %s: its log-probs would be off by %.2g", type(hf).__name__, form, off)
        reason = f"log-probs of {form} would be off by {off:.2g}"
    return None, reason


@torch.no_grad()
def probe(rows: SlotRows, prefill: Prefill) -> float:
    """Sample two short rows and return the largest difference of a log-prob to the module's own forward."""
    vocabulary = rows.hf.get_input_embeddings().weight.shape[0]
    ids = [(token * 7 % min(vocabulary, 89) + 3) % vocabulary for token in range(8)]
    sampling = Sampling(max_tokens=6)
    requests = [Request(str(key), tuple(prompt), key, sampling) for key, prompt in enumerate((ids[:5], ids[5:]))]
    rows.open(requests, FEWEST_ROWS)
    logits, cache, index, _ = prefill(requests, max(len(each.prompt) for each in requests))
    rows.join(requests, logits, cache, index)
    finished: list[Finished] = []
    while rows.requests:
        finished += rows.advance(0, KeptRows(rows.device))
    worst = 0.0
    for row in finished:
        prompt = requests[int(row.id)].prompt
        tokens = torch.tensor([*prompt, *row.tokens], device=rows.device)
        with torch.autocast(rows.device.type, dtype=torch.bfloat16, enabled=rows.dtype is not torch.float32):
            out = rows.hf(input_ids=tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = out.float().log_softmax(-1).gather(-1, tokens[len(prompt) :, None]).squeeze(-1)
        apart = expected - torch.tensor(row.log_probs, device=rows.device)
        worst = max(worst, float(apart.abs().max()))
    rows.release()  # they are fewer than a batch gets
    return worst


def _rounded(tokens: int) -> int:
    """Return a number of tokens rounded up, so that buffers are seldom reallocated."""
    return -(-tokens // ROUNDED_TO) * ROUNDED_TO
