"""A conversation of an episode: the spans of its tokens, sampled by the policy or not, and the messages they stand for.

An episode is a tree of spans: conversations that share their first spans are its branches. Each branch is one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlcore.engine.rollout import Finished

Message = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """Consecutive token ids of a conversation, after its prompt.

    `log_probs`: in nats, one a token, if the policy sampled them; None: it did not. `version`: of the weights that
    sampled them, -1 otherwise. `reward`: of the turn, from the environment.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...] | None = None
    version: int = -1
    reward: float = 0.0

    @property
    def is_sampled(self) -> bool:
        """Whether the policy sampled the tokens."""
        return self.log_probs is not None


@dataclass
class Conversation:
    """One branch of an episode: a prompt and the spans after it.

    `messages`: the whole conversation as chat messages, the prompt's first; `asked`: the number of the prompt's own.
    `ended`: whether the policy's newest turn has its end token.
    """

    prompt: tuple[int, ...]
    messages: list[Message] = field(default_factory=list)
    asked: int = 0
    spans: list[Span] = field(default_factory=list)
    ended: bool = True

    @property
    def tokens(self) -> tuple[int, ...]:
        """All token ids, the prompt's first: what the policy has to continue."""
        return (*self.prompt, *(token for span in self.spans for token in span.tokens))

    @property
    def length(self) -> int:
        """Tokens after the prompt."""
        return sum(len(span.tokens) for span in self.spans)

    @property
    def turns(self) -> int:
        """Spans that the policy sampled."""
        return sum(span.is_sampled for span in self.spans)

    @property
    def sampled(self) -> list[Span]:
        """The spans that the policy sampled, in order."""
        return [span for span in self.spans if span.is_sampled]

    def sample(self, row: Finished, message: Message) -> None:
        """Append a turn of the policy."""
        self.spans.append(Span(tuple(row.tokens), tuple(row.log_probs), row.weights_version))
        self.messages.append(message)
        self.ended = row.reason == "end"

    def reward(self, value: float) -> None:
        """Add to the reward of the policy's newest turn."""
        at = max(index for index, span in enumerate(self.spans) if span.is_sampled)
        self.spans[at] = replace(self.spans[at], reward=self.spans[at].reward + value)

    def extend(self, tokens: Sequence[int], messages: Sequence[Message]) -> None:
        """Append tokens that the policy did not sample, with the messages that they stand for; both may be empty."""
        if tokens:
            self.spans.append(Span(tuple(tokens)))
        self.messages += messages

    def fork(self, spans: int, messages: int) -> Conversation:
        """Return a branch that shares the first `spans` spans, which stand for the first `messages` messages."""
        return Conversation(self.prompt, self.messages[:messages], self.asked, self.spans[:spans])
