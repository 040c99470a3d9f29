"""Column schemas of TRL, verl, verifiers and OpenRLHF, recognised by the columns of a data set's first rows.

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
TEMPLATE_KEYS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys of a message that a chat template may write besides its content."""
CONTENT = ("instruction", "system", "context", "passage", "choices", "options", "premise", "hypothesis", "table")
"""Columns that hold a part of the question, so that `question` or `input` beside one is not all of it."""
FIRST_ROWS = 100
"""The rows by which a data set is recognised."""


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
    Schema("TRL", PAIR, "prompt"),  # of messages: the prompt is the beginning that both share
    Schema("TRL", ("prompt", "completion"), "prompt", "completion"),
    Schema("TRL", ("messages",), "messages"),
    Schema("verifiers", ("question", "answer"), "question", "answer"),
    Schema("verifiers", ("question", "info.answer"), "question", "info.answer"),
    Schema("verifiers", ("prompt", "info.answer"), "prompt", "info.answer"),
    Schema("OpenRLHF", ("input", *PAIR), "input"),
    Schema("OpenRLHF", ("input", "label"), "input", "label"),
    Schema("OpenRLHF", ("input", "output"), "input", "output"),
    Schema("OpenRLHF", ("context_messages", "label"), "context_messages", "label"),
    Schema("OpenRLHF", ("input",), "input"),
    Schema("OpenRLHF", ("context_messages",), "context_messages"),
)
"""All schemas; the first that fits is taken."""


def recognise(config: DataConfig, rows: Sequence[Mapping[str, Any]]) -> Schema | None:
    """Return the schema of a data set by its first rows, None for an unknown one.

    Each column of the schema has a value in some of them, and `data.prompt_key` names the schema's prompt column, or is
    the default and names no column. Beside a column of CONTENT, `question` and `input` are not taken for the prompt.
    """
    key, first = config.prompt_key, _first(rows)
    is_free = key == DataConfig.prompt_key and not _has(first, key)
    content = any(_has(first, column) for column in CONTENT)
    for schema in SCHEMAS:
        if key != schema.prompt and (not is_free or (content and schema.prompt in ("question", "input"))):
            continue
        if schema.needs == PAIR and not any(_is_conversation(plain_prompt(row.get(PAIR[0]))) for row in first):
            continue
        if all(_has(first, column) for column in schema.needs):
            return schema
    return None


def with_keys(config: DataConfig, schema: Schema | None, rows: Sequence[Mapping[str, Any]]) -> DataConfig:
    """Return the config with the schema's keys in place of defaults that name no column of the first rows."""
    if schema is None:
        return config
    is_free = config.answer_key == DataConfig.answer_key and not _has(_first(rows), config.answer_key)
    answer = schema.answer if is_free and schema.answer else config.answer_key
    return replace(config, prompt_key=schema.prompt, answer_key=answer)


def _first(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [rows[number] for number in range(min(len(rows), FIRST_ROWS))]  # a slice of a datasets.Dataset is no list


def _has(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    """Whether a row has a value there; True and False are labels of a response, and neither prompt nor answer."""
    values = (value_at(row, column) for row in rows)
    return any(value is not None and not isinstance(value, bool) for value in values)


def plain_rows(rows: Sequence[Mapping[str, Any]], config: DataConfig, where: str) -> Sequence[Mapping[str, Any]]:
    """Return the rows with conversational responses as texts; see `plain_responses`.

    `config`: as `with_keys` gives it. `where` starts the message of a DataError, which names the row.
    """
    columns = (*RESPONSES, config.answer_key)
    if not any(_has_lists(row, columns) or _lacks_prompt(row, config) for row in rows):
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
    given = {column: plain_prompt(row[column]) for column in {*RESPONSES, config.answer_key} if column in row}
    given = {column: messages for column, messages in given.items() if _is_conversation(messages)}
    prompt, shared = plain_prompt(value_at(row, config.prompt_key)), {}
    if _lacks_prompt(row, config):
        shared[config.prompt_key] = prompt = _shared_beginning(*(given.get(side, []) for side in PAIR))
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    return {**row, **shared, **{column: _text(messages, before) for column, messages in given.items()}}


def asked(row: Mapping[str, Any], prompt_key: str) -> Any:
    """Return a row's prompt: of a column `messages` all but the assistant's last message."""
    prompt = value_at(row, prompt_key)
    if prompt_key.rpartition(".")[2] != "messages":
        return prompt
    messages = plain_prompt(prompt)
    if _is_conversation(messages) and len(messages) > 1 and messages[-1]["role"] == "assistant":
        return messages[:-1]
    return prompt


def _text(messages: list[dict[str, Any]], before: list[dict[str, Any]]) -> Any:
    if before and messages[: len(before)] == before:
        messages = messages[len(before) :]
    if len(messages) != 1 or messages[0]["role"] != "assistant" or any(messages[0].get(key) for key in TEMPLATE_KEYS):
        return messages
    return messages[0].get("content")


def _shared_beginning(chosen: list[dict[str, Any]], rejected: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)  # the last message of each is its response
    shared = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    if not shared:
        raise DataError(
            "there is nothing in column 'prompt'; set data.prompt_key to the prompt's column, or let 'chosen' and "
            "'rejected' be lists of messages with the same beginning"
        )
    return shared


def _has_lists(row: Mapping[str, Any], columns: Sequence[str]) -> bool:
    """Whether a response is a list, or JSON of one."""
    for column in columns:  # a loop: `any` over a generator takes three times as long, and there may be a million rows
        value = row.get(column)
        if isinstance(value, list) or (isinstance(value, str) and value.startswith("[")):
            return True
    return False


def _lacks_prompt(row: Mapping[str, Any], config: DataConfig) -> bool:
    return value_at(row, config.prompt_key) is None and all(row.get(side) is not None for side in PAIR)


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) and "role" in each for each in value)
    )
