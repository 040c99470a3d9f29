"""Rows of TRL, verl, OpenRLHF and verifiers are read as they are; conversational responses become texts. About 2 s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlcore import DatasetSpec
from rlcore.config.schema import DataConfig, ModelConfig
from rlcore.data.chat import ResponseEncoder
from rlcore.data.files import load
from rlcore.data.loader import PromptLoader
from rlcore.end_tokens import find_end_tokens
from rlcore.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
SYSTEM = {"role": "system", "content": "Add."}
ASK = {"role": "user", "content": "1+2="}
GOOD, BAD = {"role": "assistant", "content": "3"}, {"role": "assistant", "content": "4"}
PROMPT = "<|user|>1+2=<|end|><|assistant|>"
VERL = {
    "data_source": "sums",
    "prompt": [ASK],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"index": 7},
}


@pytest.fixture
def made(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the loader of rows."""

    def make(*rows: Row, held_out: Row | None = None, **config: Any) -> PromptLoader:
        renamed = json.loads(json.dumps(rows[0]).replace("1+2=", "9+9="))
        other = [held_out or (renamed if renamed != rows[0] else {config.get("prompt_key", "prompt"): "9+9="})]
        dataset = DatasetSpec("own", lambda _, split: list(rows) if split == "train" else other, reward="gsm8k")
        return PromptLoader(DataConfig(name="own", **{"batch_size": 1, **config}), dataset, tokenizer, seed=0)

    return make


@pytest.mark.parametrize(
    ("row", "line", "answer"),
    [
        (VERL, "verl, prompt in 'prompt', answer in 'reward_model.ground_truth'", "3"),
        ({"messages": [ASK, GOOD]}, "TRL, prompt in 'messages'", "3"),
        (
            {"prompt": "1+2=", "messages": [ASK, GOOD], "completion": "3"},
            "TRL, prompt in 'prompt', answer in 'comple",
            "3",
        ),
        ({"prompt": [ASK], "completion": [GOOD]}, "TRL, prompt in 'prompt', answer in 'completion'", "3"),
        ({"prompt": "1+2=", "chosen": "3", "rejected": "4"}, None, None),  # the keys stay the config's
        ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, None, None),
        ({"question": "1+2=", "answer": "3", "info": {}}, "verifiers, prompt in 'question', answer in 'answer'", "3"),
        (
            {"question": "1+2=", "info": {"answer": "3"}},
            "verifiers, prompt in 'question', answer in 'info.answer'",
            "3",
        ),
        ({"prompt": [ASK], "info": {"answer": "3"}}, "verifiers, prompt in 'prompt', answer in 'info.answer'", "3"),
        ({"input": "1+2=", "label": "3"}, "OpenRLHF, prompt in 'input', answer in 'label'", "3"),
        ({"input": "1+2=", "output": "3"}, "OpenRLHF, prompt in 'input', answer in 'output'", "3"),
        ({"context_messages": [ASK], "label": "3"}, "OpenRLHF, prompt in 'context_messages', answer in 'label'", "3"),
        ({"input": "1+2="}, "OpenRLHF, prompt in 'input'", None),
        ({"context_messages": [ASK]}, "OpenRLHF, prompt in 'context_messages'", None),
    ],
)
def test_each_schema(made: Any, row: Row, line: str | None, answer: str | None) -> None:
    loader = made(row)
    batch = loader.next_batch()
    assert loader.schema_line is None if line is None else loader.schema_line.startswith(f"columns of {line}")
    assert loader._train.chat(0) == PROMPT
    assert batch["answer"].tolist() == [answer]


def test_unknown_rows_have_no_schema(made: Any) -> None:
    assert made({"prompt": "1+2=", "answer": "3"}).schema_line is None
    with pytest.raises(DataError, match=r"row 1: nothing in column 'prompt'; its columns are task, solution"):
        made({"task": "1+2=", "solution": "3"})


def test_the_columns_stay_for_rewards(made: Any) -> None:
    batch = made(VERL).next_batch()
    assert {name: batch[name].tolist()[0] for name in VERL if name != "prompt"} == {
        name: value for name, value in VERL.items() if name != "prompt"
    }
    batch = made({"prompt": "1+2=", "completion": [GOOD], "label": True}).next_batch()
    assert (batch["completion"].tolist(), batch["label"].tolist(), batch["answer"].tolist()) == (["3"], [True], ["3"])


def test_keys_that_are_set_come_first(made: Any) -> None:
    row = {"question": "1+2=", "text": "2+2=", "right": "4", "info": {"answer": "3"}}
    loader = made(row, prompt_key="text", answer_key="right", held_out={"text": "9+9="})
    assert loader.schema_line is None
    with pytest.raises(DataError, match="reserves the column name 'prompt'"):
        made({"prompt": "1+2=", "text": "2+2="}, prompt_key="text")
    loader = made(VERL, answer_key="extra_info.index")
    assert loader.schema_line is None
    assert loader.next_batch()["answer"].tolist() == [7]
    # A default whose column is there is as if it were set.
    assert made({**VERL, "answer": "three"}).next_batch()["answer"].tolist() == ["three"]
    assert made({"prompt": "1+2=", "input": "2+2=", "label": "4"}).schema_line is None


def test_a_reserved_name_of_the_schema_is_left_out(made: Any) -> None:
    """As in UltraChat, where `prompt` repeats the first message."""
    loader = made(
        {"prompt": "1+2=", "messages": [ASK, GOOD]}, prompt_key="messages", held_out={"messages": [SYSTEM, ASK]}
    )
    batch = loader.next_batch()
    assert batch["answer"].tolist() == ["3"]
    assert "prompt" not in batch


def test_files_are_recognised_before_a_tenth_is_held_out(tmp_path: Path) -> None:
    for name, keyed in (("verl", lambda i: {**VERL, "prompt": str(i)}), ("rlhf", lambda i: {"input": str(i)})):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(keyed(i)) + "\n" for i in range(20)))
        config = DataConfig(name="file", path=str(path))
        assert (len(load(config, "train")), len(load(config, "eval"))) == (18, 2)
    path.write_text('{"input": "x"}\n{"text": "y"}\n')
    with pytest.raises(DataError, match=r"rlhf\.jsonl, row 2: nothing in column 'input'"):
        load(config, "train")


def test_max_rows_takes_the_first_training_rows(made: Any) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(9)]
    loader = made(*rows, max_rows=4)
    assert loader.counts["train_prompts"] == 4
    assert sorted(loader.next_batch()["answer"].tolist()[0] for _ in range(4)) == ["1", "2", "3", "4"]
    assert made(*rows, max_rows=0).counts["train_prompts"] == made(*rows, max_rows=10).counts["train_prompts"] == 9
    # Rows behind the bound are not rendered.
    assert made(*rows, {"prompt": None}, max_rows=9).counts["train_prompts"] == 9


def test_max_rows_bounds_a_datasets_dataset(tokenizer: PreTrainedTokenizerBase) -> None:
    from datasets import Dataset

    rows = Dataset.from_list([{"prompt": f"{i}+1=", "completion": [GOOD]} for i in range(9)])
    dataset = DatasetSpec("own", lambda _, split: rows if split == "train" else [{"prompt": "9+9="}], reward="gsm8k")
    loader = PromptLoader(DataConfig(name="own", batch_size=1, max_rows=2), dataset, tokenizer, seed=0)
    assert loader.counts["train_prompts"] == 2
    assert loader.next_batch()["completion"].tolist() == ["3"]


TURNS = [SYSTEM, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}, ASK]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": TURNS, "completion": [GOOD], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": TURNS, "completion": [*TURNS, GOOD], "chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]},
        {"chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]},
        {"messages": [*TURNS, GOOD]},
    ],
    ids=["apart", "repeated", "implicit", "messages"],
)
def test_tokens_are_those_of_the_whole_conversation(made: Any, tokenizer: PreTrainedTokenizerBase, row: Row) -> None:
    batch = made(row, held_out={"prompt": "9+9=", "messages": [ASK]}).next_batch()
    encoder = ResponseEncoder(tokenizer, 9, find_end_tokens(ModelConfig(), tokenizer))
    given = {"chosen": GOOD, "completion": GOOD, "rejected": BAD, "answer": GOOD if "chosen" not in row else None}
    for column in [name for name in given if name in row or (name == "answer" and "messages" in row)]:
        whole = tokenizer.apply_chat_template([*TURNS, given[column]], tokenize=True, return_dict=False)
        start = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, tokenize=True, return_dict=False)
        response = encoder.encode(batch, column)["responses"].to_list()[0].tolist()
        assert batch["prompts"].to_list()[0].tolist() == start
        assert start + response == whole


def test_a_text_prompt_that_the_pair_repeats_is_taken_off(made: Any) -> None:
    """As in UltraFeedback."""
    batch = made(
        {"prompt": "1+2=", "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "messages": [ASK, GOOD]}
    ).next_batch()
    assert (batch["prompt_text"].tolist(), batch["chosen"].tolist()) == (["1+2="], ["3"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a", "rejected": "b"}, "row 2: there is nothing in column 'prompt'; set data"),
        ({"chosen": [ASK, GOOD], "rejected": [SYSTEM, ASK, BAD]}, "row 2: there is nothing in column 'prompt'"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "row 2: there is nothing in column 'prompt'; set data"),
        (
            {"prompt": "x", "chosen": [{**GOOD, "content": [{"type": "image"}]}], "rejected": [BAD]},
            "row 2: a message's content has the part",
        ),
    ],
)
def test_pairs_without_a_prompt_name_their_row(made: Any, row: Row, message: str) -> None:
    with pytest.raises(DataError, match=message):
        made({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, row)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "tool_calls"])
def test_what_would_not_be_learned_is_no_text(made: Any, key: str) -> None:
    more = {**GOOD, key: ["so"]}
    kept = made({"prompt": [ASK], "completion": [more]}).next_batch()["completion"].tolist()
    assert kept == [[more]]  # an algorithm's check_row refuses it
    with pytest.raises(DataError, match=r"last message (has 'reasoning_content'|has 'thinking'|calls tools)"):
        made({"messages": [ASK, more]})


def test_several_messages_stay_messages(made: Any) -> None:
    kept = made({"prompt": [ASK], "completion": [GOOD, ASK, GOOD]}).next_batch()["completion"].tolist()
    assert kept == [[GOOD, ASK, GOOD]]


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Translate.", "input": "1+2=", "output": "3"},
        {"question": "Which?", "choices": ["3", "4"], "answer": "3"},
        {"context": "A text.", "question": "1+2=", "answer": "3"},
        {"input": "1+2=", "hypothesis": "3", "label": "0"},
    ],
)
def test_a_question_in_several_columns_is_not_guessed(made: Any, row: Row) -> None:
    with pytest.raises(DataError, match=r"nothing in column 'prompt'; its columns are .*Set data\.prompt_key"):
        made(row)


def test_a_held_out_split_is_read_as_the_training_rows(made: Any) -> None:
    loader = made(
        {"input": "1+2=", "label": None}, {"input": "1+3=", "label": "4"}, held_out={"input": "9+9=", "label": "18"}
    )
    assert loader.schema_line == "columns of OpenRLHF, prompt in 'input', answer in 'label'"
    assert loader.held_out()["answer"].tolist() == ["18"]
    assert loader.schema_line.endswith("'label'")


def test_answers_to_one_question_are_held_out_together(tmp_path: Path, made: Any) -> None:
    """A conversation's prompt is without its last message, as a training prompt that is held out is dropped."""
    asked = [{"role": "user", "content": f"question {number}"} for number in range(20)]
    rows = [{"messages": [ask, {"role": "assistant", "content": str(i)}]} for ask in asked for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(name="file", path=str(tmp_path / "rows.jsonl"))
    train, held_out = load(config, "train"), load(config, "eval")
    assert (len(train), len(held_out)) == (90, 10)
    assert not {row["messages"][0]["content"] for row in train} & {row["messages"][0]["content"] for row in held_out}


def test_a_repeated_prompt_is_taken_off_once(tmp_path: Path, made: Any) -> None:
    rows = [{"prompt": [ASK], "completion": [ASK, ASK, GOOD]}] * 2
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(name="file", path=str(tmp_path))
    (tmp_path / "train.jsonl").write_text((tmp_path / "rows.jsonl").read_text())
    (tmp_path / "rows.jsonl").unlink()
    assert made(*load(config, "eval")).next_batch()["completion"].tolist() == [[ASK, GOOD]]


def test_responses_as_json_of_messages_and_with_other_keys(made: Any) -> None:
    assert made({"prompt": "1+2=", "completion": json.dumps([GOOD])}).next_batch()["completion"].tolist() == ["3"]
    called = {**GOOD, "function_call": {"name": "add"}}
    assert made({"prompt": "1+2=", "completion": [called]}).next_batch()["completion"].tolist() == [[called]]
    with pytest.raises(DataError, match="the last message has 'reasoning' besides its content"):
        made({"messages": [ASK, {**GOOD, "reasoning": "Add."}]})


def test_pairs_of_texts_need_a_prompt_and_labels_are_no_answers(made: Any) -> None:
    with pytest.raises(DataError, match=r"nothing in column 'prompt'; set data\.prompt_key to the prompt's column"):
        made({"question": "1+2=", "chosen": "3", "rejected": "4"})
    batch = made({"input": "1+2=", "chosen": "3", "rejected": "4"}).next_batch()
    assert batch["prompt_text"].tolist() == ["1+2="]
    assert made({"input": "1+2=", "output": "3", "label": True}).next_batch()["answer"].tolist() == ["3"]
