"""The prompts of a batch's episodes: data columns for the environment, the first messages and tokens for the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlcore.config.environment import EnvConfig
from rlcore.data.chat import PromptEncoder
from rlcore.data.template_kwargs import COLUMN, row_template_kwargs
from rlcore.engine.rollout import Sampling
from rlcore.episodes.conversation import Conversation, Message
from rlcore.episodes.rendering import TurnRenderer
from rlcore.errors import DataError
from rlcore.ops import noise_key
from rlcore.protocol import DataProto

if TYPE_CHECKING:
    from rlcore.episodes.setup import EpisodeSetup

CUT = " [...] "
"""The text in place of the part of a message that was left out."""


class Prompts:
    """The rows of one batch. Reads `prompts`, `uid`, `sample_index`, `prompt_text` and all object columns."""

    def __init__(self, batch: DataProto, renderer: TurnRenderer, setup: EpisodeSetup) -> None:
        self._prompt_len = setup.prompt_len
        self._renderer = renderer
        self._encoder = PromptEncoder(renderer.tokenizer, setup.system_prompt, setup.offered)
        self._tokens = [tuple(prompt.tolist()) for prompt in batch.view("prompts").to_list()]
        self._names = list(zip(map(str, batch.view("uid")), map(int, batch.view("sample_index")), strict=True))
        self._columns: dict[str, list[Any]] = {name: list(values) for name, values in batch.non_tensor_batch.items()}

    def __len__(self) -> int:
        return len(self._tokens)

    def key(self, row: int, sampling: Sampling) -> int:
        """Return the noise key of a row: that of `generate`."""
        return sampling.key(*self._names[row])

    def seed(self, row: int, sampling: Sampling) -> int:
        """Return the environment's seed, 0 to 2**63 - 1: the same for all samples of a prompt in a step.

        So a group's episodes begin alike, and differ by what the policy does.
        """
        uid, _ = self._names[row]
        return noise_key(sampling.seed, sampling.step, sampling.purpose, "environment", uid) & (2**63 - 1)

    def order(self, row: int) -> tuple[int, tuple[int, ...], int]:
        """Return a sort key: rows with equal prompts are neighbours."""
        return len(self._tokens[row]), self._tokens[row], row

    def name(self, row: int) -> str:
        """Return the row's name in messages."""
        uid, index = self._names[row]
        return f"{uid}, sample {index}"

    def renderer(self, row: int) -> TurnRenderer:
        """Return the renderer with the row's template arguments."""
        return self._renderer.with_kwargs(self.template_kwargs(row))

    def template_kwargs(self, row: int) -> dict[str, Any]:
        """Return the row's arguments for the chat template."""
        given = self._columns.get(COLUMN)
        return {} if given is None else row_template_kwargs({COLUMN: given[row]})

    def columns(self, row: int) -> dict[str, Any]:
        """Return the data row for the environment: its object columns, and its text as `prompt`."""
        found = {name: values[row] for name, values in self._columns.items()}
        return {"prompt": found.get("prompt_text"), **found}

    def readable(self, message: Mapping[str, Any], env: EnvConfig) -> Message:
        """Return an environment's message as the policy gets it.

        Its content is a text of at most `env.observation_len` tokens, with a mark where the rest was.
        """
        content, most = message["content"] or "", env.observation_len
        message = {**message, "content": content}
        if len(content.encode()) <= most:  # a token has at least one byte
            return message
        tokenizer = self._renderer.tokenizer
        ids: list[int] = tokenizer(content, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if len(ids) <= most:
            return message
        first = {"start": 0, "middle": most // 2, "end": most}[env.observation_cut]
        kept = [tokenizer.decode(part) for part in (ids[:first], ids[len(ids) - (most - first) :])]
        return {**message, "content": CUT.join(kept)}

    def conversation(self, row: int, opening: str | list[Message] | None) -> Conversation:
        """Return a new conversation about a row.

        opening: None for the row's own prompt; a text that is appended to its last user message; or messages in place
        of it.
        """
        messages = self._messages(row)
        if not opening:
            return Conversation(self._tokens[row], messages, len(messages))
        if isinstance(opening, str):
            last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=None)
            if last is None:
                raise DataError("the environment adds text to the prompt's last user message, but the prompt has none")
            messages[last] = {**messages[last], "content": messages[last]["content"] + opening}
        else:
            own = [{**each, "content": each["content"] or ""} for each in opening]
            messages = self._encoder.messages(own)  # with the tools' instructions, as the row's own prompt
        tokens = self.renderer(row).prompt(messages)
        if len(tokens) > self._prompt_len:
            raise DataError(
                f"the environment made a prompt of {len(tokens)} tokens, more than data.prompt_len={self._prompt_len}; "
                "raise it, or shorten what `reset` returns"
            )
        return Conversation(tuple(tokens), messages, len(messages))

    def _messages(self, row: int) -> list[Message]:
        given = self._columns.get("prompt_messages")
        messages = None if given is None else given[row]
        return [dict(each) for each in self._encoder.messages(messages or self._columns["prompt_text"][row])]
