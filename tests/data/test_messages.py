"""Prompts as data sets hold them: Parquet's None, JSON in a string, parts, tools of a row. About 3 s."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlcore import DatasetSpec
from rlcore.config.schema import DataConfig
from rlcore.data.builtin import rlcore_datasets
from rlcore.data.chat import OfferedTools
from rlcore.data.loader import PromptLoader
from rlcore.data.messages import plain_prompt
from rlcore.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASK = {"role": "user", "content": "1+1="}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
# Fails on keys that are there without a value, as published templates do.
STRICT = (
    "{% for m in messages %}{% for key in m %}{{ m[key] + '' if key != 'tool_calls' }}{% endfor %}"
    "{% if m.tool_calls is defined %}{{ m.tool_calls[0].function.name }}{% endif %};{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)


@pytest.fixture
def strict(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    other = copy.deepcopy(tokenizer)
    other.chat_template = STRICT
    return other


@pytest.fixture
def chats(strict: PreTrainedTokenizerBase) -> Any:
    """Return the rendered prompts of rows."""

    def render(rows: list[dict[str, Any]], tools: OfferedTools | None = None) -> list[str]:
        dataset = DatasetSpec(
            "own", lambda _, split: rows if split == "train" else [{"prompt": "held"}], reward="gsm8k"
        )
        config = DataConfig(name="own", batch_size=1)
        split = PromptLoader(config, dataset, strict, seed=0, tools=tools)._train
        return [split.chat(row) for row in split.usable]

    return render


def test_keys_that_parquet_fills_with_none_are_left_out(strict: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    from datasets import Dataset

    call = [{"function": {"name": "add", "arguments": {"a": 1}}}]
    rows = [
        {"prompt": [ASK, {"role": "assistant", "content": None, "tool_calls": call}, {"role": "user", "content": "?"}]},
        {"prompt": [{**ASK, "name": "ann"}]},
    ]
    Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    Dataset.from_list([{"prompt": [ASK]}]).to_parquet(tmp_path / "test.parquet")
    specs = rlcore_datasets()
    dataset = next(spec for spec in specs if spec.name == "file")
    config = DataConfig(name="file", path=str(tmp_path), batch_size=2)
    assert dataset.load(config, "train")[0]["prompt"][0]["name"] is None  # the fault that is tested
    loader = PromptLoader(config, DatasetSpec("own", dataset.load, reward="gsm8k"), strict, seed=0)
    assert [loader._train.chat(row) for row in loader._train.usable] == ["user1+1=;assistantadd;user?;", "user1+1=ann;"]
    messages = loader.next_batch()["prompt_messages"]
    assert {key for row in messages for message in row for key in message} == {"role", "content", "tool_calls", "name"}
    assert all(value is not None for row in messages for message in row for value in message.values())


def test_a_json_string_of_messages_is_read(chats: Any) -> None:
    assert chats([{"prompt": json.dumps([ASK])}, {"prompt": "[1, 2]"}, {"prompt": '["role"]'}]) == [
        "user1+1=;",
        "user[1, 2];",
        'user["role"];',
    ]


def test_text_parts_are_joined_and_others_refused(chats: Any) -> None:
    parts = [{"type": "text", "text": "1+1"}, {"type": "text", "text": "="}]
    assert chats([{"prompt": [{"role": "user", "content": parts}]}]) == ["user1+1\n=;"]
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(DataError, match=r"split 'train', row 2: a message's content has the part .*image_url"):
        chats([{"prompt": [ASK]}, {"prompt": [{"role": "user", "content": image}]}])


def test_a_prompt_stays_the_object_that_it_was() -> None:
    messages = [{"role": "user", "content": "x", "name": None}]
    assert plain_prompt(messages) == [{"role": "user", "content": "x"}]
    assert messages == [{"role": "user", "content": "x", "name": None}]
    assert plain_prompt("text") == "text"
    assert plain_prompt(3) == 3


@pytest.mark.parametrize("given", [[TOOL], json.dumps([TOOL])])
def test_tools_of_a_row_reach_the_template(chats: Any, given: Any) -> None:
    first, second = chats([{"prompt": "1+1=", "tools": given}, {"prompt": "2+2=", "tools": None}])
    assert json.loads(first.partition(";")[2]) == [TOOL]
    assert second == "user2+2=;"


def test_tools_that_would_not_be_seen_are_refused(
    chats: Any, tokenizer: PreTrainedTokenizerBase, strict: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": "1+1=", "tools": [TOOL]}]
    with pytest.raises(DataError, match=r"row 1: it has tools of its own .*and so has the environment"):
        chats(rows, OfferedTools())
    for wrong in ("[", {"name": "add"}, ["add"]):
        with pytest.raises(DataError, match="row 1: column 'tools' holds"):
            chats([{"prompt": "1+1=", "tools": wrong}])
    strict.chat_template = tokenizer.chat_template
    with pytest.raises(DataError, match=r"row 1: it has tools .* which the chat template leaves out"):
        chats(rows)


def test_whatever_a_template_raises_names_row_template_and_line(chats: Any, strict: PreTrainedTokenizerBase) -> None:
    strict.chat_template = "{% for m in messages %}\n{{ m.content / 2 }}{% endfor %}"
    with pytest.raises(
        DataError, match=r"split 'train', row 1: the chat template cannot render .*TypeError in line 2: "
    ):
        chats([{"prompt": "1+1="}])


def test_a_rendered_prompt_is_neither_parsed_nor_given_tools(strict: PreTrainedTokenizerBase) -> None:
    text = json.dumps([ASK])
    rows = {"train": [{"prompt": text, "tools": [TOOL]}], "eval": [{"prompt": "held"}]}
    dataset = DatasetSpec("own", lambda _, split: rows[split], reward="gsm8k")
    config = DataConfig(name="own", batch_size=1, rendered=["prompt"])
    assert PromptLoader(config, dataset, strict, seed=0)._train.chat(0) == text
    rows["train"][0]["tools"] = "a column of another meaning"
    assert PromptLoader(config, dataset, strict, seed=0)._train.chat(0) == text
    rows["train"][0]["prompt"] = ""
    with pytest.raises(DataError, match=r"'train', row 1: the prompt is empty"):
        PromptLoader(config, dataset, strict, seed=0)


def test_blank_tools_are_none_and_a_call_is_no_answer(chats: Any, strict: PreTrainedTokenizerBase) -> None:
    assert chats([{"prompt": "1+1=", "tools": " "}]) == ["user1+1=;"]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    rows = {"train": [{"messages": [ASK, call]}], "eval": [{"messages": [ASK]}]}
    dataset = DatasetSpec("own", lambda _, split: rows[split], reward="gsm8k")
    with pytest.raises(DataError, match="row 1: the last message calls tools, so it is no answer"):
        PromptLoader(DataConfig(name="own", batch_size=1, prompt_key="messages"), dataset, strict, seed=0)


EFFORT = "{{ effort | default('low') }}{{ style }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def with_effort(strict: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    strict.chat_template = EFFORT
    strict.apply_chat_template = partial(strict.apply_chat_template, effort="run")  # type: ignore[method-assign]
    return strict


def test_arguments_of_a_row_override_the_runs(chats: Any, with_effort: PreTrainedTokenizerBase) -> None:
    given = [{"effort": "high"}, {"effort": None, "style": "-"}, '{"effort": "json"}', None, "", {}]
    rows = [{"prompt": "1", "chat_template_kwargs": each} for each in given]
    assert chats(rows) == ["high1", "run-1", "json1", "run1", "run1", "run1"]


@pytest.mark.parametrize("wrong", ["{", "[1]", [1], 3])
def test_arguments_of_a_row_that_are_no_object(chats: Any, with_effort: PreTrainedTokenizerBase, wrong: Any) -> None:
    fault = "row 2: column 'chat_template_kwargs' holds .*; it must be an object, or JSON of one"
    with pytest.raises(DataError, match=fault):
        chats([{"prompt": "1"}, {"prompt": "1", "chat_template_kwargs": wrong}])


def test_arguments_of_a_row_that_the_template_does_not_read(chats: Any, with_effort: PreTrainedTokenizerBase) -> None:
    fault = (
        "row 1: column 'chat_template_kwargs' has 'thinking': the chat template never reads it; it reads effort, style"
    )
    with pytest.raises(DataError, match=fault):
        chats([{"prompt": "1", "chat_template_kwargs": {"thinking": True}}])


def test_arguments_do_not_hide_that_a_template_leaves_tools_out(
    chats: Any, with_effort: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match=r"row 1: it has tools .*which the chat template leaves out"):
        chats([{"prompt": "1", "tools": [TOOL], "chat_template_kwargs": {"effort": "high"}}])
