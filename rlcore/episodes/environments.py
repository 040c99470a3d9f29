"""Plays a batch of rows against environment processes: each row is an episode, and all of them decode together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlcore.engine.rollout import Finished, Request, RolloutEngine, Sampling
from rlcore.episodes.conversation import Conversation, Message
from rlcore.episodes.environment import EnvironmentFailure
from rlcore.episodes.failures import failed_row, plays_again
from rlcore.episodes.processes import EnvironmentPool
from rlcore.episodes.prompts import Prompts
from rlcore.episodes.rendering import TurnRenderer
from rlcore.episodes.rows import EpisodeRow, episode_columns
from rlcore.episodes.setup import EpisodeSetup
from rlcore.episodes.source import LONGEST_WAIT, answer_requests
from rlcore.episodes.tool_calls import BadCall, ToolCall, check_call
from rlcore.errors import DataError
from rlcore.ops import noise_key
from rlcore.protocol import DataProto


class EnvironmentEpisodes:
    """See EpisodeSource. The processes start with the first batch, and serve all of them."""

    def __init__(self, setup: EpisodeSetup, engine: RolloutEngine) -> None:
        self.setup, self.engine = setup, engine
        self.is_exact = False
        self._answers_in_order = not (setup.tools or setup.resets or setup.steps)
        self.renderer: TurnRenderer = setup.renderer()
        self._pool: EnvironmentPool | None = None
        self._waited = 0.0

    def play(self, batch: DataProto, sampling: Sampling) -> DataProto:
        """See EpisodeSource."""
        if self._pool is None:
            pool = self.setup.pool(self.setup.env.concurrency)
            pool.start()
            self._pool = pool
        prompts = Prompts(batch, self.renderer, self.setup)
        played = _Batch(self.setup, self.renderer, self._pool, prompts, sampling, self.engine.forget)
        try:
            self._waited += answer_requests(self.engine, played)
        finally:
            played.release()
        in_order = self._answers_in_order and len(batch) <= self.setup.env.concurrency and not played.retries
        self.is_exact = in_order or self.setup.in_lockstep
        rows = played.rows()
        out = episode_columns(rows, self.engine.tokenizer)
        out["episode_row"] = batch.view("episode_row")[[each.row for each in rows]]
        return out

    def waited(self) -> float:
        """See EpisodeSource."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        """See EpisodeSource."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


@dataclass
class _Episode:
    """An episode under way.

    `begun`: the environment has answered `reset`. `turn`: a turn for it that came earlier. `seat`: the conversation
    that has the turn. `cut`: the policy's message that a limit cut off.
    """

    row: int
    key: int
    begun: bool = False
    turn: tuple[Message, list[dict[str, Any]]] | None = None
    attempts: int = 0
    seat: int = 0
    conversations: dict[int, Conversation] = field(default_factory=dict)
    tool_calls: int = 0
    tool_errors: int = 0
    stop_reason: str = ""
    cut: Message | None = None

    @property
    def id(self) -> str:
        """Its name in the pool."""
        return str(self.row)

    def request_id(self, seat: int) -> str:
        """Return the name of a seat's requests in the engine, another one in each attempt."""
        return f"{self.row}.{seat}.{self.attempts}"

    @property
    def turns(self) -> int:
        """Turns of the policy, in all conversations."""
        return sum(each.turns for each in self.conversations.values())

    def again(self) -> None:
        """Forget everything that was played."""
        self.attempts, self.seat, self.conversations = self.attempts + 1, 0, {}
        self.begun, self.turn = False, None
        self.tool_calls = self.tool_errors = 0
        self.stop_reason, self.cut = "", None


class _Batch:
    """The episodes of one batch: a RequestSource. `rows()` are the result."""

    def __init__(
        self,
        setup: EpisodeSetup,
        renderer: TurnRenderer,
        pool: EnvironmentPool,
        prompts: Prompts,
        sampling: Sampling,
        forget: Callable[[Collection[str]], None],
    ) -> None:
        """`forget` drops the keys and values that the engine has kept of requests."""
        self._env, self._format, self._tools = setup.env, setup.tool_format, setup.tools
        self._resets, self._steps = setup.resets, setup.steps
        self._renderer, self._pool, self._prompts, self._sampling = renderer, pool, prompts, sampling
        episodes = [_Episode(row, prompts.key(row, sampling)) for row in range(len(prompts))]
        # Episodes with the same prompt start together, so that it is prefilled once.
        self._waiting = deque(sorted(episodes, key=lambda each: prompts.order(each.row)))
        self._open: dict[str, _Episode] = {}
        self._ready: list[Request] = []
        self._in_lockstep, self._decoding = setup.in_lockstep, 0
        self._keeps, self._forget = bool(setup.tools or setup.steps), forget
        self._needs_score = setup.needs_score
        self._in_engine: set[str] = set()
        self._stale: set[str] = set()  # requests in the engine whose attempt has failed
        self.retries = 0
        self._rows: dict[int, list[EpisodeRow]] = {}

    @property
    def done(self) -> bool:
        """See RequestSource."""
        return not (self._waiting or self._open or self._stale)

    def poll(self, wait: float) -> Sequence[Request]:
        """See RequestSource.

        In lockstep no turn begins before all turns under way have ended, and their environments have answered.
        """
        if not self._in_lockstep:
            self._work(0.0 if self._ready else wait)
        elif not self._decoding:
            while len(self._ready) < len(self._open) or (self._waiting and self._pool.free > 0):
                self._work(LONGEST_WAIT)
            self._ready.sort(key=lambda request: self._prompts.order(int(_episode_of(request.id))))
        else:
            return []
        ready, self._ready = self._ready, []
        self._decoding += len(ready)
        self._in_engine.update(request.id for request in ready)
        return ready

    def _work(self, wait: float) -> None:
        """Begin episodes that have a place, and go on with those whose environment has answered."""
        while self._waiting and self._pool.free > 0:
            episode = self._waiting.popleft()
            self._open[episode.id] = episode
            self._pool.reset(
                episode.id, self._prompts.columns(episode.row), self._prompts.seed(episode.row, self._sampling)
            )
            if not self._resets:
                self._begin(episode, 0, None)
        for name, answer in self._pool.poll(0.0 if self._ready and not self._in_lockstep else wait):
            if isinstance(answer, EnvironmentFailure):
                self._failed(self._open[name], answer)
                continue
            try:
                self._go_on(self._open[name], answer)
            except DataError as error:  # messages that the chat template refuses, or too long a prompt
                self._failed(self._open[name], EnvironmentFailure(str(error)))

    def _go_on(self, episode: _Episode, answer: Mapping[str, Any]) -> None:
        """Go on with an environment's answer."""
        if not episode.begun:
            self._reset(episode, answer)
        elif episode.stop_reason:
            self._close(episode, answer["scores"])
        else:
            self._answered(episode, answer)

    def take(self, row: Finished) -> None:
        """See RequestSource."""
        self._decoding -= 1
        self._in_engine.remove(row.id)
        if row.id in self._stale:
            self._stale.remove(row.id)
            self._forget([row.id])
            return
        episode = self._open[_episode_of(row.id)]
        conversation = episode.conversations[episode.seat]
        message = self._renderer.message_of(row.tokens)
        conversation.sample(row, message)
        if row.reason == "length" and conversation.length >= self._sampling.max_tokens:
            self._stop(episode, "length", message)
            return
        calls = self._calls(message["content"], episode.turns)
        episode.turn = message, [_as_json(call) for call in calls]
        if episode.begun:
            self._give(episode)

    def rows(self) -> list[EpisodeRow]:
        """Return the rows of all episodes, in the order of the batch."""
        return [row for _, own in sorted(self._rows.items()) for row in own]

    def release(self) -> None:
        """Free the processes of episodes that did not end, and what the engine has kept of them."""
        for episode in list(self._open.values()):
            self._leave(episode)

    def _calls(self, text: str, turn: int) -> list[ToolCall | BadCall]:
        if not self._tools:
            return []
        calls = self._format.parse(text, turn, self._tools).calls
        return [(isinstance(call, ToolCall) and check_call(call, self._tools)) or call for call in calls]

    def _reset(self, episode: _Episode, answer: Mapping[str, Any]) -> None:
        """Begin with the environment's answer to `reset`; without one of its own the first turn is under way."""
        episode.begun = True
        if episode.stop_reason:
            self._pool.finish(episode.id, episode.cut)
        elif self._resets:
            self._begin(episode, answer["seat"], answer["prompt"])
        elif episode.turn is not None:
            self._give(episode)

    def _give(self, episode: _Episode) -> None:
        """Give the environment the policy's turn."""
        assert episode.turn is not None
        (message, calls), episode.turn = episode.turn, None
        self._pool.turn(episode.id, message, calls)

    def _begin(self, episode: _Episode, seat: int, prompt: Any) -> None:
        episode.seat = seat
        episode.conversations[seat] = self._prompts.conversation(episode.row, prompt)
        self._ask(episode)

    def _ask(self, episode: _Episode) -> None:
        """Request the next turn of the policy."""
        conversation = episode.conversations[episode.seat]
        turn = episode.turns
        # The first turn of an episode draws the noise of `generate`.
        key = episode.key if turn == 0 else noise_key(episode.key, "turn", turn)
        left = self._sampling.max_tokens - conversation.length
        limit = min(left, self._env.turn_len or left)
        sampling = replace(self._sampling, max_tokens=limit, min_tokens=min(self._sampling.min_tokens, limit))
        name = episode.request_id(episode.seat)
        keep = self._keeps and turn + 1 < self._env.max_turns
        after = name if conversation.turns else None
        most = len(conversation.prompt) + self._sampling.max_tokens if keep else None
        self._ready.append(Request(name, conversation.tokens, key, sampling, keep=keep, after=after, row_limit=most))

    def _answered(self, episode: _Episode, answer: Mapping[str, Any]) -> None:
        """Go on with the environment's answer to a turn."""
        conversation = episode.conversations[episode.seat]
        episode.tool_calls += answer["tool_calls"]
        episode.tool_errors += answer["tool_errors"]
        if answer["reward"] is not None:
            conversation.reward(answer["reward"])
        messages: list[Message] = [self._prompts.readable(each, self._env) for each in answer["messages"]]
        if answer["done"]:
            conversation.extend((), messages)
            # Without a method `step` nobody answers a turn that calls no tool.
            episode.stop_reason = "done" if self._steps or answer["tool_calls"] else "end"
            self._close(episode, answer["scores"])
        elif episode.turns >= self._env.max_turns:
            conversation.extend((), messages)
            self._stop(episode, "turns")
        elif answer["seat"] not in episode.conversations:
            self._begin(episode, answer["seat"], messages)
        else:
            self._continue(episode, answer["seat"], messages)

    def _continue(self, episode: _Episode, seat: int, messages: list[Message]) -> None:
        if not messages:
            cause = f"seat {seat} has the turn again without a message; give it one, or end the episode"
            self._failed(episode, EnvironmentFailure(cause))
            return
        conversation = episode.conversations[seat]
        episode.seat = seat
        renderer = self._prompts.renderer(episode.row)
        tokens = renderer.continuation(conversation.messages, messages, ended=conversation.ended)
        if conversation.length + len(tokens) >= self._sampling.max_tokens:
            conversation.extend((), messages)
            self._stop(episode, "length")
            return
        conversation.extend(tokens, messages)
        self._ask(episode)

    def _stop(self, episode: _Episode, reason: str, cut: Message | None = None) -> None:
        """End an episode whose environment has not ended it, and ask for its score, once the environment has begun.

        `cut`: the policy's message that the limit cut off.
        """
        episode.stop_reason, episode.cut = reason, cut
        if episode.begun:
            self._pool.finish(episode.id, cut)

    def _close(self, episode: _Episode, scores: Sequence[float] | None) -> None:
        if scores is None and self._needs_score:
            self._failed(episode, EnvironmentFailure("the episode has no score, which is its reward"))
            return
        self._leave(episode)
        self._rows[episode.row] = [
            EpisodeRow(
                row=episode.row,
                branch=seat,
                seat=seat,
                conversation=conversation,
                stop_reason=episode.stop_reason,
                tool_calls=episode.tool_calls,
                tool_errors=episode.tool_errors,
                score=None if scores is None else scores[seat],
            )
            for seat, conversation in sorted(episode.conversations.items())
        ]

    def _failed(self, episode: _Episode, failure: EnvironmentFailure) -> None:
        """Play the episode again, with the same seed, or give it up."""
        self._leave(episode)
        names = {episode.request_id(seat) for seat in episode.conversations}
        self._ready = [request for request in self._ready if request.id not in names]
        self._stale |= names & self._in_engine
        episode.again()
        if plays_again(self._prompts.name(episode.row), failure, episode.attempts, self._env):
            self.retries += 1
            self._waiting.appendleft(episode)
            return
        empty = self._prompts.conversation(episode.row, None)
        self._rows[episode.row] = [failed_row(episode.row, empty, failure, episode.attempts)]

    def _leave(self, episode: _Episode) -> None:
        del self._open[episode.id]
        self._pool.release(episode.id)
        self._forget([episode.request_id(seat) for seat in episode.conversations])


def _episode_of(request: str) -> str:
    return request.partition(".")[0]


def _as_json(call: ToolCall | BadCall) -> dict[str, Any]:
    if isinstance(call, BadCall):
        return {"id": call.id, "error": call.error}
    return {"id": call.id, "name": call.name, "arguments": call.arguments}
