from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcore.config.schema import DataConfig
from rlcore.data.gsm8k import INSTRUCTION, load
from rlcore.errors import ConfigError, DataError

ROW = {"question": "How many eggs?", "answer": "9 * 2 = <<9*2=18>>1,018 eggs.\n#### 1,018"}


def folder(tmp_path: Path, *rows: object) -> DataConfig:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(name="gsm8k", path=str(tmp_path), prompt_key="q")


def test_prompt_answer_and_solution(tmp_path: Path) -> None:
    rows = load(folder(tmp_path, ROW), "eval")
    assert rows[0] == {"q": f"How many eggs?\n{INSTRUCTION}", "answer": "1,018", "solution": ROW["answer"]}


def test_bad_folders(tmp_path: Path) -> None:
    config = folder(tmp_path, ROW)
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"has no test\.jsonl"):
        load(config, "eval")
    with pytest.raises(ConfigError, match=r"is not a folder; give openai/gsm8k, or a folder with train\.jsonl"):
        load(DataConfig(name="gsm8k", path=str(tmp_path / "train.jsonl")), "train")
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        load(DataConfig(name="gsm8k", path=str(tmp_path / "absent")), "train")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x", "answer": "no result"}, r"train\.jsonl, row 2: .*after '####', got 'no result'"),
        ({"question": 3, "answer": "#### 3"}, r"train\.jsonl, row 2: question and answer must be strings"),
        ({"prompt": "x", "answer": "#### 3"}, r"row 2: nothing in column 'question'; its columns are prompt, answer"),
    ],
)
def test_bad_rows(tmp_path: Path, row: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(folder(tmp_path, ROW, row), "train")
