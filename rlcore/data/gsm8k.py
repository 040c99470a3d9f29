"""GSM8K, grade-school word problems (arXiv 2110.14168): train.jsonl and test.jsonl, or `openai/gsm8k` of the hub.

The prompt is the question plus an instruction on the answer's format. The answer is the text after `####` in the file's
solution.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlcore.config.schema import DataConfig
from rlcore.data.files import data_path
from rlcore.data.formats import Row, read_rows, require_column
from rlcore.data.splits import split_files
from rlcore.errors import ConfigError, DataError
from rlcore.hub import is_pinned

MARK = "####"
INSTRUCTION = f"Think step by step, then write the final answer as a plain number after {MARK}."


def load(config: DataConfig, split: str) -> list[Row]:
    """Return a split ("train" or "eval") with the prompt and the answer, under the configured names, and `solution`.

    Raises ConfigError when the folder or its file is missing, DataError naming file and row for faults in the file.
    """
    expected = "openai/gsm8k, or a folder with train.jsonl and test.jsonl of GSM8K, or with shards of them"
    if config.subset is None and config.path is not None and is_pinned(config.path):
        config = replace(config, subset="main")
    folder = data_path(config, expected)
    if not folder.is_dir():
        raise ConfigError(f"data.path={config.path} is not a folder; give {expected}")
    files = split_files(folder, config, split)
    if files is None:
        raise ConfigError(f"data.path={config.path} has no test.jsonl; give {expected}")
    rows = [row for path in files for row in _read(path)]
    return [
        {
            config.prompt_key: f"{row['question']}\n{INSTRUCTION}",
            config.answer_key: row["answer"].rpartition(MARK)[2].strip(),
            "solution": row["answer"],
        }
        for row in rows
    ]


def _read(path: Path) -> list[Row]:
    rows = read_rows(path)
    for column in ("question", "answer"):
        require_column(rows, column, path, "data.path")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row["question"], str) or not isinstance(row["answer"], str) or MARK not in row["answer"]:
            raise DataError(
                f"{path}, row {number}: question and answer must be strings, and the answer must give its result after "
                f"{MARK!r}, got {str(row['answer'])[-40:]!r}"
            )
    return rows
