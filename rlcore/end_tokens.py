"""The tokens that end a response, by all the places of a model folder that name one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.config import ModelConfig
from rlcore.model_folder import model_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE = "the chat template"
TOKENIZER = "the tokenizer"
_ASK = {"role": "user", "content": "1+1="}
_ANSWER = "2a2a2"


@dataclass(frozen=True)
class EndTokens:
    """The end tokens of a model, by the place that names them; `answer` is the one that a written answer gets.

    That is the token with which the chat template ends an assistant's turn, else the tokenizer's end-of-text token.
    `vocab_size` is the number of the model's tokens.
    """

    places: Mapping[str, tuple[int, ...]]
    answer: int
    vocab_size: int

    @property
    def ids(self) -> list[int]:
        """All of them, each once: sampling ends at any."""
        return list(dict.fromkeys(each for ids in self.places.values() for each in ids))

    def disagreement(self, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """Return a line that says which place names which tokens; None if all name the same."""
        if len({frozenset(ids) for ids in self.places.values()}) < 2:
            return None
        named = ", ".join(
            f"{place} names {' and '.join(map(repr, tokenizer.convert_ids_to_tokens(list(ids))))}"
            for place, ids in self.places.items()
        )
        taught = tokenizer.convert_ids_to_tokens(self.answer)
        return f"end tokens: {named}; responses end at any of them, and those of a data set get {taught!r}"


def find_end_tokens(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> EndTokens:
    """Return the end tokens named by tokenizer, generation_config.json, config.json and the chat template.

    `tokenizer`: that of the model's folder. A place that names none is left out, and so are tokens that the model does
    not have.
    """
    folder = model_path(model.path, "tokenizer")
    config = _read(folder / "config.json")
    config = {**config.get("text_config", {}), **config}
    found = {
        TEMPLATE: _turn_end(model, tokenizer),
        TOKENIZER: _ids(tokenizer.eos_token_id),
        "generation_config.json": _ids(_read(folder / "generation_config.json").get("eos_token_id")),
        "config.json": _ids(config.get("eos_token_id")),
    }
    size = config.get("vocab_size", len(tokenizer))
    found = {place: tuple(each for each in ids if 0 <= each < size) for place, ids in found.items()}
    places = {place: ids for place, ids in found.items() if ids}
    answer = (found[TEMPLATE] or found[TOKENIZER] or next(iter(places.values()), (-1,)))[0]
    return EndTokens(places, answer, size)


def end_tokens(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end a response of this model, each once; see `find_end_tokens`."""
    return find_end_tokens(model, tokenizer).ids


def _turn_end(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the special token that the chat template writes right after an answer; () if it writes none."""
    import jinja2

    own = model.chat_template
    # A tokenizer may have several templates, by name; without one it takes its default.
    template = None if own is None else Path(own).expanduser().read_text(encoding="utf-8")
    if not (template or tokenizer.chat_template):
        return ()
    conversation = [_ASK, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(conversation, chat_template=template, tokenize=False))
    except (jinja2.TemplateError, ValueError):
        return ()  # a template that takes no answers; `rlcore.data.chat` says so where it matters
    _, answered, rest = text.rpartition(_ANSWER)
    ids = tokenizer(rest.lstrip(), add_special_tokens=False)["input_ids"] if answered else []
    return (ids[0],) if ids and ids[0] in special_tokens(tokenizer) else ()


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the special tokens of a tokenizer: their texts by id."""
    return {each: token.content for each, token in tokenizer.added_tokens_decoder.items() if token.special}


def _ids(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value or ())


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found
