"""The rows of `data=verifiers`: a taskset's tasks."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from rlcore import DataConfig, DataError
from rlcore_plugin_verifiers.config import TasksetConfig
from rlcore_plugin_verifiers.tasksets import open_taskset, tasks_of


def load(config: DataConfig, split: str, own: TasksetConfig) -> list[dict[str, Any]]:
    """Return the rows of a split ("train" or "eval"): the prompt as chat messages, the answer if the task has one.

    The column `verifiers` holds the task's data as JSON. Tasks are held out by a hash of their data. Raises
    ConfigError for a taskset that cannot be opened, DataError for a task without a prompt.
    """
    rows = [_row(config, task) for task in tasks_of(open_taskset(own), own)]
    if len(rows) < 2:
        raise DataError(f"data.verifiers.taskset={own.taskset} has {len(rows)} tasks; two are needed, one to hold out")
    order = sorted(range(len(rows)), key=lambda row: hashlib.sha256(rows[row]["verifiers"].encode()).digest())
    held_out = set(order[: max(1, round(own.held_out * len(rows)))])
    return [row for number, row in enumerate(rows) if (number in held_out) == (split == "eval")]


def _row(config: DataConfig, task: Any) -> dict[str, Any]:
    data = task.data
    if data.prompt is None:
        raise DataError(
            f"task {data.idx} has no prompt: its user would open the conversation, which needs another model"
        )
    return {
        config.prompt_key: prompt_of(data),
        config.answer_key: getattr(data, "answer", None),
        "verifiers": json.dumps(data.model_dump(mode="json")),
    }


def prompt_of(data: Any) -> list[dict[str, str]]:
    """Return a task's first messages. Raises DataError for a message that is not text."""
    messages = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else []
    for message in [] if messages else data.prompt:
        if not isinstance(message.content, str):
            raise DataError(f"task {data.idx}: a {message.role} message of its prompt is not plain text")
        messages.append({"role": message.role, "content": message.content})
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt is not None else []
    return [*system, *messages]
