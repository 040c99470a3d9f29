from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.schema import DataConfig
from rlcore.data.files import load
from rlcore.data.formats import read_rows
from rlcore.errors import ConfigError, DataError

ROWS = [{"prompt": f"question {i}", "answer": i} for i in range(20)]


def config(path: Path | None, **changes: Any) -> DataConfig:
    return DataConfig(name="file", path=None if path is None else str(path), **changes)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    from datasets import Dataset

    Dataset.from_list(rows).to_parquet(path)
    return path


def test_the_formats_hold_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    files = [
        write_jsonl(tmp_path / "a.jsonl", ROWS),
        tmp_path / "rows.json",
        write_parquet(tmp_path / "b.parquet", ROWS),
    ]
    for file in files:
        assert read_rows(file) == ROWS


def test_a_folder_names_its_splits(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "validation.jsonl", ROWS[:3])
    assert load(config(tmp_path), "train") == ROWS
    assert load(config(tmp_path), "eval") == ROWS[:3]


def test_a_single_file_holds_out_a_tenth_by_its_prompts(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", ROWS + ROWS[:5])
    train, held_out = load(config(file), "train"), load(config(file), "eval")
    assert len({row["prompt"] for row in held_out}) == 2
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert len(train) + len(held_out) == 25
    shuffled = write_jsonl(tmp_path / "other.jsonl", ROWS[::-1])
    assert {row["prompt"] for row in load(config(shuffled), "eval")} == {row["prompt"] for row in held_out}


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    first = load(config(file), "train")
    first.clear()  # the caller's own list
    assert len(load(config(file), "train")) == 18
    write_jsonl(file, ROWS[:10])
    assert len(load(config(file), "train")) == 9
    assert len(load(config(file, held_out_share=0.5), "train")) == 5
    other = [{"question": str(number)} for number in range(4)]
    assert len(load(config(write_jsonl(file, other), prompt_key="question"), "train")) == 3


def test_a_single_prompt_cannot_be_trained_on(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing is left to train on"):
        load(config(write_jsonl(tmp_path / "one.jsonl", ROWS[:1])), "train")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": \n', r"a\.jsonl, line 2, column \d+: not valid JSON"),
        ("a.jsonl", '{"prompt": "x"}\n\n[1]\n', r"a\.jsonl, line 3: each line must be a JSON object, got a list"),
        ("a.jsonl", "", r"a\.jsonl is empty"),
        ("a.jsonl", "\n\n", r"a\.jsonl holds no rows"),
        ("a.json", "[\n{]\n", r"a\.json, line 2, column 2: not valid JSON"),
        ("a.json", '{"prompt": "x"}\n{"prompt": "y"}\n', r"It looks like JSON Lines: name it \.jsonl"),
        ("a.json", '{"prompt": "x"}', r"must hold a list of objects, got an object"),
        ("a.json", '[{"prompt": "x"}, 3]', r"row 2: each row must be a JSON object, got a number"),
        ("a.parquet", "no parquet", r"a\.parquet is not a readable Parquet file"),
        ("a.txt", "x", r"cannot read \.txt; allowed: \.jsonl, \.json, \.parquet"),
        ("a.jsonl", '{"promt": "x", "answer": 1}\n', r"'prompt'; its columns are promt, answer.*Did you mean 'promt'"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": null}\n', r"a\.jsonl, row 2: nothing in column 'prompt'"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load(config(tmp_path / name), "train")


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(DataError, match="not UTF-8"):
        load(config(tmp_path / "a.jsonl"), "train")


def test_an_answer_column_asked_for_by_name_must_be_there(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"{i}"} for i in range(20)])
    assert len(load(config(file), "train")) == 18
    with pytest.raises(DataError, match=r"'target'.*data\.answer_key"):
        load(config(file, answer_key="target"), "train")


def test_missing_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path, which is not set"):
        load(config(None), "train")
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        load(config(tmp_path / "absent.jsonl"), "train")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"no file for the train split.*the folder holds notes\.txt"):
        load(config(tmp_path), "train")


def test_two_files_for_one_split(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "test.jsonl", ROWS)
    write_jsonl(tmp_path / "eval.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"several held-out splits: test, eval; choose one, as data\.eval_split=test"):
        load(config(tmp_path), "eval")
