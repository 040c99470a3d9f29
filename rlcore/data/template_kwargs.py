"""Arguments of chat templates besides the messages and tools, such as enable_thinking."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlcore.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from transformers import PreTrainedTokenizerBase

COLUMN = "chat_template_kwargs"
"""Optional column of the data: a row's arguments, which override those of the run."""


def check_template_kwargs(tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any], where: str) -> None:
    """Raise DataError for an argument that rlcore sets itself, or that the tokenizer's chat template never reads.

    `where` starts the message.
    """
    if not given:
        return
    taken = _set_by_rlcore(tokenizer)
    text = tokenizer.chat_template or ""
    allowed = sorted(frozenset().union(*map(_names_read, text.values() if isinstance(text, dict) else [text])) - taken)
    reads = f"it reads {', '.join(allowed)}" if allowed else "it reads no arguments"
    for name in given:
        if name not in allowed:
            fault = "rlcore sets this name itself" if name in taken else "the chat template never reads it"
            raise DataError(f"{where} has {name!r}: {fault}; {reads}. Leave it out.{did_you_mean(name, allowed)}")


def row_template_kwargs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a data row's arguments: an object, or JSON of one; null entries are left out. DataError for others."""
    given = row.get(COLUMN)
    try:
        read = json.loads(given.strip() or "{}") if isinstance(given, str) else given or {}
    except ValueError as error:
        raise DataError(f"column {COLUMN!r} holds {given!r:.200}; it must be an object, or JSON of one") from error
    if not isinstance(read, Mapping):
        raise DataError(f"column {COLUMN!r} holds {given!r:.200}; it must be an object, or JSON of one")
    return {name: value for name, value in read.items() if value is not None}  # Parquet gives all rows all names


def _set_by_rlcore(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the names that the rendering itself gives to a template."""
    from transformers import PreTrainedTokenizerBase

    named = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    special = (*PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES, *tokenizer.special_tokens_map)
    return frozenset(("messages", "raise_exception", "strftime_now", *named, *special))


@lru_cache(maxsize=32)
def _names_read(template: str) -> frozenset[str]:
    """Return the variables that a template reads before it sets them itself, without jinja's own functions."""
    import jinja2.meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        environment = _compile_jinja_template(template).environment
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"the chat template has a syntax error in line {error.lineno}: {error}") from error
    parsed = environment.parse(template)
    return frozenset(jinja2.meta.find_undeclared_variables(parsed) & _loaded_first(parsed))


def _loaded_first(template: Node) -> set[str]:
    """Return the names whose first use in a template, in the order of its text, loads them."""
    from jinja2 import nodes

    first: dict[str, str] = {}
    left: list[Node] = [template]
    while left:
        node = left.pop()
        if isinstance(node, nodes.Name) and node.ctx != "param":
            first.setdefault(node.name, node.ctx)
        below = list(node.iter_child_nodes())
        # Popped from the end; the value of an assignment comes before its target.
        left += below if isinstance(node, nodes.Assign) else reversed(below)
    return {name for name, use in first.items() if use == "load"}
