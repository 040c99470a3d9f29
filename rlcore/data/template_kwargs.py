"""Arguments of chat templates besides the messages and tools, such as enable_thinking."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from rlcore.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMN = "chat_template_kwargs"
"""Optional column of the data: a row's arguments, which override those of the run."""


def check_template_kwargs(tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for an argument that rlcore sets itself, or that the tokenizer's chat template never reads.

    `where` starts the message.
    """
    from transformers import PreTrainedTokenizerBase as Base

    if not given:
        return
    taken = {"messages", "raise_exception", "strftime_now", *inspect.signature(Base.apply_chat_template).parameters}
    taken |= {*Base.SPECIAL_TOKENS_ATTRIBUTES, *tokenizer.special_tokens_map}
    text = tokenizer.chat_template or ""
    names = chain.from_iterable(map(_names_read, text.values() if isinstance(text, dict) else [text]))
    allowed = sorted({*names} - taken)
    for name in given:
        if name not in allowed:
            fault = "rlcore sets this name itself" if name in taken else "the chat template never reads it"
            reads = f"it reads {', '.join(allowed) or 'no arguments'}"
            raise ConfigError(f"{where} has {name!r}: {fault}; {reads}. Leave it out.{did_you_mean(name, allowed)}")


def row_template_kwargs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a data row's arguments: an object, or JSON of one; null entries are left out. DataError for others."""
    given = read = row.get(COLUMN) or {}
    if isinstance(given, str):
        with contextlib.suppress(ValueError):  # then it stays a text, which is refused
            read = json.loads(given.strip() or "{}")
    if not isinstance(read, Mapping):
        raise DataError(f"column {COLUMN!r} holds {given!r:.200}; it must be an object, or JSON of one")
    return {name: value for name, value in read.items() if value is not None}  # Parquet gives all rows all names


@lru_cache(maxsize=32)
def _names_read(template: str) -> set[str]:
    """Return the variables whose first use in a template, in the order of its text, reads them."""
    import jinja2.meta
    from jinja2 import nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        parsed = _compile_jinja_template(template).environment.parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template has a syntax error in line {error.lineno}: {error}") from error
    first: dict[str, str] = {}
    left: list[nodes.Node] = [parsed]
    while left:
        node = left.pop()
        if isinstance(node, nodes.Name) and node.ctx != "param":
            first.setdefault(node.name, node.ctx)
        below = list(node.iter_child_nodes())
        # Popped from the end; the value of an assignment comes before its target.
        left += below if isinstance(node, nodes.Assign) else reversed(below)
    return {name for name in jinja2.meta.find_undeclared_variables(parsed) if first.get(name) == "load"}
