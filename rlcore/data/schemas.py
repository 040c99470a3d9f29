"""Column schemas of TRL, verl, verifiers and OpenRLHF, recognised by the columns of a data set's first row.

The keys `data.prompt_key` and `data.answer_key` come first: one that is set, or whose default column is there, is kept.
Responses in TRL's conversational form, one message of the assistant, become the text of that message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from rlcore.config.schema import DataConfig
from rlcore.data.keys import value_at
from rlcore.data.messages import plain_prompt
from rlcore.errors import DataError

PAIR = ("chosen", "rejected")
RESPONSES = ("completion", *PAIR)
"""Columns in which TRL has responses: texts, or lists of messages."""
UNLEARNED = ("tool_calls", "reasoning_content", "thinking")
"""Keys of a message that a chat template writes besides its content."""


@dataclass(frozen=True)
class Schema:
    """The columns by which a project's rows are recognised, and the keys of prompt and answer ("": rows have none)."""

    name: str
    needs: tuple[str, ...]
    prompt: str
    answer: str = ""


SCHEMAS = (
    Schema("verl", ("prompt", "reward_model.ground_truth"), "prompt", "reward_model.ground_truth"),
    Schema("TRL", ("prompt", *PAIR), "prompt"),
    Schema("TRL", PAIR, "prompt"),  # the prompt is the beginning that both share
    Schema("TRL", ("prompt", "completion"), "prompt", "completion"),
    Schema("TRL", ("messages",), "messages"),
    Schema("verifiers", ("question", "answer"), "question", "answer"),
    Schema("verifiers", ("question", "info.answer"), "question", "info.answer"),
    Schema("verifiers", ("prompt", "info.answer"), "prompt", "info.answer"),
    Schema("OpenRLHF", ("input", "label"), "input", "label"),
    Schema("OpenRLHF", ("input", "output"), "input", "output"),
    Schema("OpenRLHF", ("context_messages", "label"), "context_messages", "label"),
    Schema("OpenRLHF", ("input",), "input"),
    Schema("OpenRLHF", ("context_messages",), "context_messages"),
)
"""All schemas; the first that fits is taken."""


def recognise(config: DataConfig, row: Mapping[str, Any]) -> Schema | None:
    """Return the schema of a data set by its first row, None for an unknown one.

    It has all columns of the schema, and `data.prompt_key` names the schema's prompt column, or is the default and
    names no column of the row.
    """
    key = config.prompt_key
    is_free = key == DataConfig.prompt_key and value_at(row, key) is None
    for schema in SCHEMAS:
        if (is_free or key == schema.prompt) and all(value_at(row, column) is not None for column in schema.needs):
            return schema
    return None


def with_keys(config: DataConfig, schema: Schema | None, row: Mapping[str, Any]) -> DataConfig:
    """Return the config with the schema's keys in place of defaults that name no column of the row."""
    if schema is None:
        return config
    is_free = config.answer_key == DataConfig.answer_key and value_at(row, config.answer_key) is None
    answer = schema.answer if is_free and schema.answer else config.answer_key
    return replace(config, prompt_key=schema.prompt, answer_key=answer)


def plain_rows(rows: Sequence[Mapping[str, Any]], config: DataConfig, where: str) -> Sequence[Mapping[str, Any]]:
    """Return the rows with conversational responses as texts; see `plain_responses`.

    `config`: as `with_keys` gives it. `where` starts the message of a DataError, which names the row.
    """
    if not any(_has_lists(row, config) or _lacks_prompt(row, config) for row in rows):
        return rows
    plain = []
    for number, row in enumerate(rows, start=1):
        try:
            plain.append(plain_responses(row, config))
        except DataError as error:
            raise DataError(f"{where}, row {number}: {error}") from error
    return plain


def plain_responses(row: Mapping[str, Any], config: DataConfig) -> dict[str, Any]:
    """Return a row whose responses are texts where they were one message of the assistant, else as they were.

    The prompt's messages before it are taken off. A row without a prompt gets the messages with which `chosen` and
    `rejected` both begin. Raises DataError where there are none.
    """
    given = {column: row[column] for column in {*RESPONSES, config.answer_key} if _is_conversation(row.get(column))}
    given = {column: plain_prompt(messages) for column, messages in given.items()}
    prompt, shared = plain_prompt(value_at(row, config.prompt_key)), {}
    if _lacks_prompt(row, config):
        shared[config.prompt_key] = prompt = _shared_beginning(*(given.get(side, []) for side in PAIR))
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    return {**row, **shared, **{column: _text(messages, before) for column, messages in given.items()}}


def _text(messages: list[dict[str, Any]], before: list[dict[str, Any]]) -> Any:
    if before and messages[: len(before)] == before:
        messages = messages[len(before) :]
    if len(messages) != 1 or messages[0]["role"] != "assistant" or any(messages[0].get(key) for key in UNLEARNED):
        return messages
    return messages[0].get("content")


def _shared_beginning(chosen: list[dict[str, Any]], rejected: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)  # the last message of each is its response
    shared = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    if not shared:
        raise DataError(
            "there is no prompt: it has no column, and 'chosen' and 'rejected' are no lists of messages with the same "
            "beginning; write the prompt into a column 'prompt'"
        )
    return shared


def _has_lists(row: Mapping[str, Any], config: DataConfig) -> bool:
    return any(isinstance(row.get(column), list) for column in (*RESPONSES, config.answer_key))


def _lacks_prompt(row: Mapping[str, Any], config: DataConfig) -> bool:
    return value_at(row, config.prompt_key) is None and all(row.get(side) is not None for side in PAIR)


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) and "role" in each for each in value)
    )
