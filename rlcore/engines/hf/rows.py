"""The rows that decode together: their state, and the joining and leaving of rows between two steps.

All rows share columns: their newest tokens are in the same column, so a step writes one column of every buffer. A
shorter row starts at a later column, and the columns before it are masked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcore.engine.responses import ends_with_stop, stop_window
from rlcore.engine.rollout import Finished, Reason, Request, Sampling
from rlcore.engine.sampling import sample_tokens
from rlcore.engines.hf.cache import BufferedCache
from rlcore.ops import uniform_noise


@dataclass
class Row:
    """A request, with the columns of its first prompt token and of its first new token."""

    request: Request
    start: int
    first: int

    @property
    def limit(self) -> int:
        """The column after the last token that the row may sample."""
        return self.first + self.request.sampling.max_tokens - len(self.request.sampled)

    @property
    def may_end(self) -> int:
        """The first column in which the row may end, by min_tokens."""
        return self.first + self.request.sampling.min_tokens - len(self.request.sampled)


@dataclass(frozen=True)
class KeptRow:
    """The keys and values of a row that ended, layer by layer, [heads, `length`, head size]: of all tokens but one."""

    length: int
    states: list[tuple[Tensor, Tensor]]

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.states)


class DecodingRows:
    """Rows whose prompts a prefill has put into `cache`, ending at column `length`.

    `positions` int64 [rows] are the positions of their next tokens. `tokens` int64, `log_probs` fp32, `noise` fp64 and
    `mask` fp32 (-inf in the columns before a row's first, else 0) are [rows, columns] on the cache's device.
    """

    def __init__(self, rows: list[Row], length: int, positions: Tensor, cache: BufferedCache) -> None:
        self.rows, self.length, self.positions, self.cache = rows, length, positions, cache
        device, columns = positions.device, max(row.limit for row in rows)
        self.tokens = torch.zeros(len(rows), columns, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(len(rows), columns, device=device)
        keys = torch.tensor([row.request.key for row in rows])
        drawn = torch.tensor([len(row.request.sampled) for row in rows])
        self.noise = torch.zeros(len(rows), columns, dtype=torch.float64, device=device)
        self.noise[:, length:] = uniform_noise(keys, drawn, columns - length).to(device)
        self._derive(columns)

    def _derive(self, columns: int) -> None:
        """Set the fields that depend on the set of rows."""
        starts = torch.tensor([row.start for row in self.rows])
        mask = torch.zeros(len(self.rows), columns)
        self.mask = mask.masked_fill(torch.arange(columns) < starts[:, None], float("-inf")).to(self.positions.device)
        self.is_padded = bool((starts > 0).any())
        self._nearest_limit = min(row.limit for row in self.rows)
        self._has_stops = any(row.request.sampling.stop for row in self.rows)
        self._groups: list[tuple[Sampling, bool, Tensor]] = []
        self._groups_until = 0

    def join(self, other: DecodingRows) -> None:
        """Append other rows, which keep their tokens, noise and cache."""
        unused = min(row.start for row in self.rows)
        # Moving rows to the left costs a copy of the cache, so it waits until a quarter of the columns is unused.
        own = self.length - unused if 4 * unused > self.length else self.length
        length = max(own, other.length)
        moves = [(self, length - self.length), (other, length - other.length)]
        for part, by in moves:
            for row in part.rows:
                row.start, row.first = row.start + by, row.first + by
        rows = [*self.rows, *other.rows]
        columns = max(row.limit for row in rows)
        for name in ("tokens", "log_probs", "noise"):
            setattr(self, name, torch.cat([_moved(getattr(part, name), by, columns) for part, by in moves]))
        self.positions = torch.cat([self.positions, other.positions])
        self.cache.join(other.cache, length, columns)
        self.rows, self.length = rows, length
        self._derive(columns)

    def draw(self, logits: Tensor, end_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next token int64 [rows] and its log-prob fp32 [rows] from `logits` [rows, vocab]."""
        noise = self.noise[:, self.length]
        groups = self._current_groups()
        if len(groups) == 1:
            sampling, banned, _ = groups[0]
            return sample_tokens(logits, noise, sampling, end_ids if banned else None)
        tokens, log_probs = torch.empty_like(self.positions), torch.empty_like(noise, dtype=torch.float32)
        for sampling, banned, rows in groups:
            drawn = sample_tokens(logits[rows], noise[rows], sampling, end_ids if banned else None)
            tokens[rows], log_probs[rows] = drawn
        return tokens, log_probs

    def _current_groups(self) -> list[tuple[Sampling, bool, Tensor]]:
        """Return the groups of rows with one sampling: the sampling, whether end tokens are banned, the row indices."""
        if not self._groups or self.length >= self._groups_until:
            grouped: dict[tuple[Sampling, bool], list[int]] = {}
            for index, row in enumerate(self.rows):
                grouped.setdefault((row.request.sampling, self.length < row.may_end), []).append(index)
            device = self.positions.device
            self._groups = [(*key, torch.tensor(rows, device=device)) for key, rows in grouped.items()]
            # A ban ends at a known column, so the groups are valid until the nearest one.
            ends = [row.may_end for row in self.rows if row.may_end > self.length]
            self._groups_until = min(ends, default=max(row.limit for row in self.rows))
        return self._groups

    def append(self, tokens: Tensor, log_probs: Tensor, end_ids: Tensor, tokenizer: Any) -> dict[int, Reason]:
        """Append a column of tokens with their log-probs; return the reasons of rows that end with it, by row index."""
        self.tokens[:, self.length], self.log_probs[:, self.length] = tokens, log_probs
        self.length += 1
        ended = (tokens[:, None] == end_ids).any(-1).nonzero().flatten().tolist()
        reasons: dict[int, Reason] = {}
        if self.length >= self._nearest_limit:
            limits = [row.limit for row in self.rows]
            reasons.update((index, "length") for index, limit in enumerate(limits) if limit <= self.length)
            self._nearest_limit = min((limit for limit in limits if limit > self.length), default=0)
        if self._has_stops:
            reasons.update((index, "stop") for index in self._stopped(tokenizer))
        # Last: an end token decides, also at the length limit.
        reasons.update((index, "end") for index in ended)
        return reasons

    def _stopped(self, tokenizer: Any) -> list[int]:
        """Return the rows whose newest token completed a stop string."""
        begin = max(0, self.length - max(stop_window(row.request.sampling.stop) for row in self.rows))
        newest = self.tokens[:, begin : self.length].tolist()
        stopped = []
        for index, (row, tokens) in enumerate(zip(self.rows, newest, strict=True)):
            if row.first > begin:
                tokens = [*row.request.sampled, *tokens[row.first - begin :]]
            if self.length >= row.may_end and ends_with_stop(tokens, row.request.sampling.stop, tokenizer):
                stopped.append(index)
        return stopped

    def finished(self, reasons: Mapping[int, Reason], version: int) -> list[Finished]:
        """Return the rows at these indices as they are, each with its reason."""
        begin = min(self.rows[index].first for index in reasons)
        chosen = torch.tensor(list(reasons), device=self.tokens.device)
        tokens = self.tokens[chosen, begin : self.length].tolist()
        log_probs = self.log_probs[chosen, begin : self.length].tolist()
        out = []
        for (index, reason), ids, values in zip(reasons.items(), tokens, log_probs, strict=True):
            row = self.rows[index]
            request, skip = row.request, row.first - begin
            response = [*request.sampled, *ids[skip:]], [*request.sampled_log_probs, *values[skip:]]
            out.append(Finished(request.id, *response, reason, version))
        return out

    def so_far(self, ids: Collection[str]) -> dict[str, Sequence[int]]:
        """Return the tokens so far of the rows of these requests, by request id."""
        return {
            row.request.id: [*row.request.sampled, *self.tokens[index, row.first : self.length].tolist()]
            for index, row in enumerate(self.rows)
            if row.request.id in ids
        }

    def kept(self, reasons: Mapping[int, Reason]) -> dict[str, KeptRow]:
        """Return the keys and values of the rows at these indices that will be continued, by request id."""
        found = {}
        for index, reason in reasons.items() if self.cache.keeps_rows else ():
            row = self.rows[index]
            if row.request.keep and reason != "abort":
                states = [layer.row(index, row.start) for layer in self.cache.layers]
                found[row.request.id] = KeptRow(states[0][0].shape[1], states)
        return found

    def drop(self, gone: Collection[int]) -> None:
        """Remove the rows at these indices; at least one stays. Rows from the end move to the freed indices."""
        left = len(self.rows) - len(gone)
        holes = [index for index in range(left) if index in gone]
        fillers = [index for index in range(left, len(self.rows)) if index not in gone]
        to, come = (torch.tensor(each, dtype=torch.int64, device=self.tokens.device) for each in (holes, fillers))
        self.cache.drop(to, come, left)
        for name in ("tokens", "log_probs", "noise", "mask", "positions"):
            values = getattr(self, name)
            values[to] = values[come]
            setattr(self, name, values[:left])
        for hole, filler in zip(holes, fillers, strict=True):
            self.rows[hole] = self.rows[filler]
        del self.rows[left:]
        if len(self._groups) > 1:
            self._groups = []


def _moved(values: Tensor, by: int, columns: int) -> Tensor:
    """Return `values` [rows, any] moved to the right by `by` columns (to the left if negative) in [rows, columns]."""
    out = values.new_zeros(len(values), columns)
    source, start = values[:, max(0, -by) :], max(0, by)
    source = source[:, : columns - start]
    out[:, start : start + source.shape[1]] = source
    return out
