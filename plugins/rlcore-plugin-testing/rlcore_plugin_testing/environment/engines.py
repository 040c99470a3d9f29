"""The engines of the suite: one that answers with given texts, and one that watches another."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from rlcore.engine import Finished, Reason, Request, RolloutEngine, Shapes, check_requests
from rlcore_plugin_testing.report import CheckFailed

SCRIPT_VERSION = 10**6
"""The version of the weights of scripted turns."""


class ScriptedEngine(RolloutEngine):
    """Answers each request with a text: `text(request, turn)` for turn number `turn` (from 0) of its conversation.

    A turn ends with `end_id`, or after `max_tokens` tokens. Log-probs are numbers that depend on the request's noise
    key and the token's number. A step answers up to `slots` requests.
    """

    version = SCRIPT_VERSION
    description = "given texts"

    def __init__(self, tokenizer: Any, end_id: int, text: Callable[[Request, int], str], slots: int = 3) -> None:
        self.tokenizer = tokenizer
        self._end_id, self._text, self._slots = end_id, text, slots
        self._queue: dict[str, Request] = {}
        self._turns: dict[str, tuple[Request, int]] = {}  # by id: the newest turn's request, and its number
        self._said: dict[str, tuple[int, ...]] = {}  # by id: the conversation up to the end of its newest turn

    def add(self, requests: Sequence[Request]) -> None:
        """See RolloutEngine."""
        check_requests(requests, self._queue)
        for request in requests:
            self.begin_turn(request)
            self._queue[request.id] = request

    def begin_turn(self, request: Request) -> int:
        """Return the number of the turn that a request asks for; a request that begins anew asks for turn 0."""
        newest, turn = self._turns.get(request.id, (None, -1))
        if newest is not request:
            said = self._said.get(request.id)
            turn = turn + 1 if said is not None and request.prompt[: len(said)] == said else 0
            self._turns[request.id] = request, turn
        return turn

    def end_turn(self, row: Finished) -> None:
        """Take note of a turn that was answered, here or elsewhere."""
        self._said[row.id] = (*self._turns[row.id][0].prompt, *row.tokens)

    def step(self) -> list[Finished]:
        """See RolloutEngine."""
        now = list(self._queue.values())[: self._slots]
        for request in now:
            del self._queue[request.id]
        return [self._answer(request) for request in now]

    def _answer(self, request: Request) -> Finished:
        text = self._text(request, self._turns[request.id][1])
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self._end_id]
        tokens = tuple(ids[: request.sampling.max_tokens])
        draw = random.Random(request.key)
        log_probs = tuple(-round(draw.random(), 3) - 0.001 for _ in tokens)
        reason: Reason = "end" if len(tokens) == len(ids) else "length"
        row = Finished(request.id, tokens, log_probs, reason, SCRIPT_VERSION)
        self.end_turn(row)
        return row

    def abort(self, ids: Collection[str]) -> list[Finished]:
        """See RolloutEngine."""
        for name in ids:
            del self._queue[name]
        return [Finished(name, (), (), "abort", SCRIPT_VERSION) for name in ids]

    @property
    def in_flight(self) -> Collection[str]:
        """See RolloutEngine."""
        return self._queue.keys()

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """See RolloutEngine; it has no weights."""
        raise NotImplementedError


class OpeningEngine(RolloutEngine):
    """Another engine, for which a scripted one takes the first `opening` turns of each conversation.

    The other engine's turns have at most `most` tokens.
    """

    def __init__(self, scripted: ScriptedEngine, model: RolloutEngine, opening: int, most: int) -> None:
        self._scripted, self._model, self._opening, self._most = scripted, model, opening, most
        self.tokenizer, self.version, self.exact = model.tokenizer, model.version, model.exact
        self.description = model.description

    def add(self, requests: Sequence[Request]) -> None:
        """See RolloutEngine."""
        for request in requests:
            if self._scripted.begin_turn(request) < self._opening:
                self._scripted.add([request])
                continue
            most = min(request.sampling.max_tokens, self._most)
            # The model has not kept rows that the scripted engine answered.
            sampling = replace(request.sampling, max_tokens=most)
            self._model.add([replace(request, sampling=sampling, keep=False, after=None)])

    def step(self) -> list[Finished]:
        """See RolloutEngine."""
        rows = self._model.step()
        for row in rows:
            self._scripted.end_turn(row)
        return [*self._scripted.step(), *rows]

    def abort(self, ids: Collection[str]) -> list[Finished]:
        """See RolloutEngine."""
        engines = (self._scripted, self._model)
        return [row for engine in engines for row in engine.abort([each for each in ids if each in engine.in_flight])]

    @property
    def in_flight(self) -> Collection[str]:
        """See RolloutEngine."""
        return [*self._scripted.in_flight, *self._model.in_flight]

    def forget(self, ids: Collection[str]) -> None:
        """See RolloutEngine."""
        self._model.forget(ids)

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """See RolloutEngine."""
        self._model.sync(weights, version, shapes)


class WatchedEngine(RolloutEngine):
    """Another engine, with a record of the rows of a batch; `begin` starts the next batch.

    `turns`: the requests and rows that it answered, in order. `kept`: ids that it was asked to keep and not told to
    forget. `interrupt`: called after each step that answered requests, with the number of rows answered so far.
    """

    def __init__(self, inner: RolloutEngine) -> None:
        self.begin(inner)

    def begin(self, inner: RolloutEngine, interrupt: Callable[[int], None] | None = None) -> None:
        """Forget the last batch, and watch `inner`."""
        self._inner, self._interrupt = inner, interrupt
        self.tokenizer, self.version, self.exact = inner.tokenizer, inner.version, inner.exact
        self.description = inner.description
        self.turns: list[tuple[Request, Finished]] = []
        self.kept: set[str] = set()
        self._asked: dict[str, Request] = {}

    def add(self, requests: Sequence[Request]) -> None:
        """See RolloutEngine."""
        self._inner.add(requests)
        self._asked.update((request.id, request) for request in requests)
        self.kept |= {request.id for request in requests if request.keep}

    def step(self) -> list[Finished]:
        """See RolloutEngine."""
        rows = self._inner.step()
        self.turns += [(self._asked.pop(row.id), row) for row in rows]
        if rows and self._interrupt is not None:
            self._interrupt(len(self.turns))
        return rows

    def abort(self, ids: Collection[str]) -> list[Finished]:
        """See RolloutEngine."""
        return self._inner.abort(ids)

    @property
    def in_flight(self) -> Collection[str]:
        """See RolloutEngine."""
        return self._inner.in_flight

    def forget(self, ids: Collection[str]) -> None:
        """See RolloutEngine."""
        self._inner.forget(ids)
        self.kept -= set(ids)

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """See RolloutEngine; an environment gives no weights."""
        raise CheckFailed("the environment gave the engine weights")
