"""Text that stays text: special tokens that are spelled out in data are not tokens, only a template's own are."""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlcore.end_tokens import special_tokens
from rlcore.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PlainText:
    """Marks special tokens in texts that come from data, before a chat template joins them to its own.

    `mark` puts a stand-in for the text of each special token, such as <|im_end|>. `token_ids` encodes a rendered text:
    special tokens in it are tokens, and a stand-in is the text for which it stands. Whatever is not marked is encoded
    as the tokenizer does it. A tokenizer written in Python cannot tell the two apart: there a stand-in gives the
    token's text with a space after its first character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        # The longest first, as tokenizers match them. A number by chance, so that no text can hold a stand-in.
        salt = secrets.token_hex(8)
        by_length = sorted(special_tokens(tokenizer).items(), key=lambda item: -len(item[1]))
        self._stand_ins = {text: f"~{salt}-{number}~" for number, text in by_length if text}
        self._texts = {stand_in: text for text, stand_in in self._stand_ins.items()}
        self._special = re.compile("|".join(map(re.escape, self._stand_ins)) or "(?!)")
        self._marked = re.compile(f"~{salt}-[0-9]+~")

    def mark(self, value: Any) -> Any:
        """Return a text, or lists and objects of texts, with a stand-in for each special token's text in it."""
        if isinstance(value, str):
            return self._special.sub(lambda match: self._stand_ins[match.group()], value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def render(
        self, template: Callable[..., Any], messages: Sequence[Any], *, sampled: Sequence[Any] = (), **options: Any
    ) -> str:
        """Return the text that a chat template's function makes of messages and options, with marks.

        `sampled`: those of the messages, the same objects, that the policy sampled, or that count as such. Their
        special tokens are tokens.
        Raises DataError when the template changes a marked text otherwise than the text itself, as when it cuts off a
        part: nobody then knows which of its special tokens are text.
        """
        unmarked = {id(message) for message in sampled}
        marked = [message if id(message) in unmarked else self.mark(message) for message in messages]
        marked_options = self.mark(options)
        rendered = str(template(marked, **marked_options))
        if (marked, marked_options) != (list(messages), options):
            plain = str(template(messages, **options))
            if self.text(rendered) != plain:
                raise DataError(
                    "the chat template changes a text that spells out a special token of the model, so that it cannot "
                    f"be kept as text; take the token out of the text: {plain[:300]!r}"
                )
        return rendered

    def text(self, marked: str) -> str:
        """Return a marked text with the texts of the special tokens again."""
        return self._marked.sub(lambda match: self._texts[match.group()], marked)

    def token_ids(self, marked: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """Return the token ids of marked texts. `add_special_tokens`: for a text that no template has rendered."""
        if not marked:
            return []
        plain = [text for text in marked if not self._marked.search(text)]
        options: dict[str, Any] = {"add_special_tokens": add_special_tokens, "return_attention_mask": False}
        # A list, never apply_chat_template's BatchEncoding.
        ids = iter(self.tokenizer(plain, **options)["input_ids"] if plain else [])
        return [self._read(text, options) if self._marked.search(text) else list(next(ids)) for text in marked]

    def _read(self, marked: str, options: Mapping[str, Any]) -> list[int]:
        if not self.tokenizer.is_fast:
            spaced = self._marked.sub(lambda match: _space_after_first(self._texts[match.group()]), marked)
            return list(self.tokenizer(spaced, **options)["input_ids"])
        reader, names, ids = self._reader
        # The template's special tokens get other names, so that those that are left are the data's.
        named = self._special.sub(lambda match: names[match.group()], marked)
        read = reader(self.text(named), split_special_tokens=True, **options)["input_ids"]
        return [ids.get(token, token) for token in read]

    @cached_property
    def _reader(self) -> tuple[PreTrainedTokenizerBase, dict[str, str], dict[int, int]]:
        """A copy of the tokenizer with another name for each special token, the names, and the tokens of their ids.

        The names are no special tokens, so that they are matched where special tokens are read as text.
        """
        from transformers import AddedToken

        reader, salt = copy.deepcopy(self.tokenizer), secrets.token_hex(8)
        special = special_tokens(self.tokenizer)
        names = {text: f"~{salt}-{number}~" for number, text in special.items()}
        added = self.tokenizer.added_tokens_decoder
        flags = ("lstrip", "rstrip", "single_word", "normalized")
        reader.add_tokens(
            [
                AddedToken(names[text], special=False, **{flag: getattr(added[number], flag) for flag in flags})
                for number, text in special.items()
            ]
        )
        ids = {reader.convert_tokens_to_ids(names[text]): number for number, text in special.items()}
        return reader, names, ids


def _space_after_first(text: str) -> str:
    return f"{text[:1]} {text[1:]}"
