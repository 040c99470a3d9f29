"""Encodes texts for a reward model whose tokenizer differs from the actor's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from rlcore.config import ModelConfig
from rlcore.errors import DataError
from rlcore.model_folder import read_tokenizer
from rlcore.plain_text import PlainText
from rlcore.protocol import DataProto, Ragged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXTS = ("prompt_text", "response_text")
"""The columns of the texts."""
MESSAGES = "prompt_messages"
"""Optional column: the chat messages of prompts that are not plain text; they replace the prompt's text."""


@dataclass(frozen=True)
class TextEncoder:
    """Turns prompts and responses into one chat of a user and an assistant by the tokenizer's own chat template.

    A tokenizer without one reads the texts end to end, with the special tokens that it adds by itself. Special tokens
    that a text spells out are text.
    """

    tokenizer: PreTrainedTokenizerBase

    @cached_property
    def plain(self) -> PlainText:
        """What marks the special tokens that texts spell out."""
        return PlainText(self.tokenizer)

    @staticmethod
    def of(model: ModelConfig) -> TextEncoder:
        """Load the tokenizer of a model folder."""
        return TextEncoder(read_tokenizer(model))

    def encode(self, batch: DataProto) -> DataProto:
        """Return `prompts`, with the tokens of each row's whole text, and empty `responses`: Ragged int64.

        Raises DataError for a text that the chat template refuses, or that gives no token.
        """
        prompts, responses = (batch.view(name).tolist() for name in TEXTS)
        if MESSAGES in batch:
            prompts = [messages or text for messages, text in zip(batch.view(MESSAGES), prompts, strict=True)]
        rows = [self._row(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        # A template has added all special tokens already.
        ids = self.plain.token_ids(rows, add_special_tokens=self.tokenizer.chat_template is None)
        if (empty := next((at for at, row in enumerate(ids) if not row), None)) is not None:
            text = self.plain.text(rows[empty])
            raise DataError(f"the reward model's tokenizer gives no token for the text {text!r}")
        whole = Ragged.from_list([torch.tensor(row, dtype=torch.int64) for row in ids], dtype=torch.int64)
        nothing = Ragged.from_list([torch.zeros(0, dtype=torch.int64)] * len(ids), dtype=torch.int64)
        return DataProto.from_single_dict({"prompts": whole, "responses": nothing})

    def _row(self, prompt: str | list[dict[str, Any]], response: str) -> str:
        import jinja2

        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if turns[-1]["role"] == "assistant":  # the response goes on with it
            response = turns[-1]["content"] + response
            turns = turns[:-1]
        messages = [*turns, {"role": "assistant", "content": response}]
        # Base models have no template; a reward model trained on plain texts expects just these.
        if self.tokenizer.chat_template is None:
            return str(self.plain.mark("".join(message["content"] for message in messages)))
        try:
            return self.plain.render(self.tokenizer.apply_chat_template, messages, tokenize=False)
        except jinja2.TemplateError as error:
            raise DataError(f"the reward model's chat template refuses {messages!r:.200}: {error}") from error
