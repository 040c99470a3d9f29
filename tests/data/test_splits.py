"""Formats and splits, in files that json, pyarrow and datasets wrote. About 4 s, most of them imports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.schema import DataConfig
from rlcore.data import files, gsm8k
from rlcore.data.formats import read_rows
from rlcore.errors import ConfigError, DataError

Rows = list[dict[str, Any]]
ROWS: Rows = [{"prompt": f"question {i}", "answer": i} for i in range(20)]
HELD: Rows = [{"prompt": f"held {i}", "answer": i} for i in range(3)]


def load(path: Path, split: str, **keys: Any) -> list[Any]:
    return list(files.load(DataConfig(name="file", path=str(path), **keys), split))


def write_jsonl(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_shards(folder: Path, split: str, rows: Rows, count: int, hashed: bool = False) -> list[Path]:
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    hashes = [f"-{number + 10:x}5a8b1c" if hashed else "" for number in range(count)]
    paths = [folder / f"{split}-{number:05d}-of-{count:05d}{each}.parquet" for number, each in enumerate(hashes)]
    size = len(rows) // count
    for number, path in enumerate(paths):
        parquet.write_table(pa.Table.from_pylist(rows[number * size : (number + 1) * size]), path)
    return paths


def test_arrow_files_and_streams(tmp_path: Path) -> None:
    import pyarrow as pa

    table = pa.Table.from_pylist(ROWS)
    for name, new in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        path = tmp_path / f"{name}.arrow"
        with new(str(path), table.schema) as writer:
            writer.write_table(table)
        assert read_rows(path) == ROWS
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=r"stream\.arrow is not a readable Arrow file"):
        read_rows(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_byte_order_mark_is_not_content(tmp_path: Path, name: str) -> None:
    text = json.dumps(ROWS[0]) if name == "a.jsonl" else json.dumps(ROWS[:1])
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_rows(tmp_path / name) == ROWS[:1]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("a.csv", r"pandas\.read_csv\('a\.csv'\)\.to_json\('a\.jsonl', orient='records', lines=True\)"),
        ("a.tsv", r"pandas\.read_csv\('a\.tsv', sep='\\t'\)\.to_json"),
        ("a.jsonl.gz", "Unpack it first"),
        ("a.txt", r"Write one JSON object a line into a \.jsonl file"),
    ],
)
def test_other_formats_are_refused_with_the_remedy(tmp_path: Path, name: str, remedy: str) -> None:
    (tmp_path / name).write_text("prompt,answer\n1,2\n")
    with pytest.raises(DataError, match=rf"allowed: \.jsonl, \.json, \.parquet, \.arrow\. .*{remedy}"):
        read_rows(tmp_path / name)


def test_a_folder_of_csv_files_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("prompt,answer\n1,2\n")
    with pytest.raises(ConfigError, match=r"no file for the train split.*pandas\.read_csv\('train\.csv'\)"):
        load(tmp_path, "train")


def test_the_remedy_for_csv_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas

    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("prompt,answer\nhow many?,2\n")
    with pytest.raises(DataError) as refused:
        read_rows(Path("a.csv"))
    eval(str(refused.value).partition("Convert it in Python: ")[2], {"pandas": pandas})
    assert read_rows(Path("a.jsonl")) == [{"prompt": "how many?", "answer": 2}]


def test_a_saved_data_set_is_one_table(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=3)
    train, held_out = load(tmp_path / "saved", "train"), load(tmp_path / "saved", "eval")
    assert len(held_out) == 2
    assert sorted(row["answer"] for row in train + held_out) == list(range(20))
    assert [row["answer"] for row in train] == sorted(row["answer"] for row in train)
    (tmp_path / "saved" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00003\.arrow is missing, one of the 3 files"):
        load(tmp_path / "saved", "train")


def test_a_saved_dict_of_data_sets_names_its_splits(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    parts = {"train": ROWS, "test": HELD, "hard": ROWS[:1]}
    DatasetDict({name: Dataset.from_list(rows) for name, rows in parts.items()}).save_to_disk(tmp_path / "saved")
    assert load(tmp_path / "saved", "train") == ROWS
    assert load(tmp_path / "saved", "eval") == HELD
    assert load(tmp_path / "saved", "eval", eval_split="hard") == ROWS[:1]
    with pytest.raises(ConfigError, match=r"data\.train_split=trian: .* only train, test, hard\. Did you mean 'train'"):
        load(tmp_path / "saved", "train", train_split="trian")
    (tmp_path / "saved" / "train" / "state.json").unlink()
    with pytest.raises(DataError, match=r"train has no state\.json, so it is not whole"):
        load(tmp_path / "saved", "train")


@pytest.mark.parametrize("place", [".", "data"])
@pytest.mark.parametrize("hashed", [False, True])
def test_shards_are_read_in_order(tmp_path: Path, place: str, hashed: bool) -> None:
    """Earlier versions of datasets wrote another hash into the name of each shard."""
    shards = write_shards(tmp_path / place, "train", ROWS, 4, hashed)
    write_shards(tmp_path / place, "test", HELD, 1, hashed)
    (tmp_path / "README.md").write_text("a card")
    assert load(tmp_path, "train") == ROWS
    assert load(tmp_path, "eval") == HELD
    shards[2].unlink()
    lacking = "train-00002-of-00004.parquet"
    with pytest.raises(DataError, match=rf"has 3 of the 4 shards of the split 'train': {lacking} is missing"):
        load(tmp_path, "train")
    assert load(tmp_path, "eval") == HELD


def test_a_folder_without_a_held_out_split_holds_out_a_tenth(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    write_shards(folder, "train", ROWS, 4)
    write_jsonl(tmp_path / "one.jsonl", ROWS)
    for split in ("train", "eval"):
        assert load(folder, split, train_split="train") == load(tmp_path / "one.jsonl", split)
    assert len(load(folder, "eval")) == 2


@pytest.mark.parametrize("name", ["test", "validation", "rows"])
def test_the_only_split_can_be_trained_on(tmp_path: Path, name: str) -> None:
    write_jsonl(tmp_path / f"{name}.jsonl", ROWS)
    parts = [load(tmp_path, split, train_split=name) for split in ("train", "eval")]
    assert [len(part) for part in parts] == [18, 2]


@pytest.mark.parametrize("name", ["val", "dev", "valid"])
def test_other_names_of_held_out_splits(tmp_path: Path, name: str) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / f"{name}.jsonl", HELD)
    assert (load(tmp_path, "train"), load(tmp_path, "eval")) == (ROWS, HELD)


def test_a_further_split_is_never_passed_over(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "test_set.jsonl", HELD)
    for split in ("train", "eval"):
        with pytest.raises(
            ConfigError, match=r"train, test_set; say which is held out, as data\.eval_split=test_set, or"
        ):
            load(tmp_path, split)
    assert load(tmp_path, "eval", eval_split="test_set") == HELD
    assert [len(load(tmp_path, split, eval_split="train")) for split in ("train", "eval")] == [18, 2]


def test_an_empty_split_is_an_error(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_dict({})}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"the split 'test' has no rows"):
        load(tmp_path / "saved", "eval")


def test_splits_by_name(tmp_path: Path) -> None:
    for name, rows in (("train", ROWS), ("test", HELD), ("validation", HELD[:1]), ("extra", ROWS[:5])):
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    with pytest.raises(ConfigError, match=r"held-out splits: test, validation; choose one, as data\.eval_split=test"):
        load(tmp_path, "eval")
    assert load(tmp_path, "eval", eval_split="validation") == HELD[:1]
    assert load(tmp_path, "train", train_split="extra", eval_split="test") == ROWS[:5]
    with pytest.raises(ConfigError, match=r"data\.eval_split=valid: .* only extra, test, train, validation\. Did you"):
        load(tmp_path, "eval", eval_split="valid")
    write_jsonl(tmp_path / "one.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"data\.eval_split=test: .*one\.jsonl is one file, which has no splits"):
        load(tmp_path / "one.jsonl", "train", eval_split="test")


def test_one_split_in_two_formats(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_shards(tmp_path / "data", "train", ROWS, 2)
    write_jsonl(tmp_path / "test.jsonl", HELD)
    with pytest.raises(ConfigError, match=r"several files for the split 'train': train\.jsonl, train-00000-of-00002"):
        load(tmp_path, "train")


def test_a_folder_without_train_names_its_splits(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"set data\.train_split to one of its splits: rows"):
        load(tmp_path, "train")
    assert len(load(tmp_path, "train", train_split="rows")) == 18


def test_a_subset_is_a_folder_inside(tmp_path: Path) -> None:
    """As openai/gsm8k has them: main and socratic, each with shards."""
    row = {"question": "How many?", "answer": "2\n#### 2"}
    for subset, rows in (("main", [row] * 3), ("socratic", [row])):
        write_shards(tmp_path / subset, "train", rows, 1)
        write_shards(tmp_path / subset, "test", [row], 1)
    (tmp_path / "images").mkdir()
    assert load(tmp_path, "train", subset="main") == [row] * 3
    assert load(tmp_path, "train", subset="socratic") == [row]
    with pytest.raises(ConfigError, match=r"set data\.subset to one of its subsets: main, socratic"):
        load(tmp_path, "train")
    with pytest.raises(ConfigError, match=r"data\.subset=mian: .* only main, socratic\. Did you mean 'main'"):
        load(tmp_path, "train", subset="mian")
    with pytest.raises(ConfigError, match="only main, socratic"):
        load(tmp_path, "train", subset="images")
    config = DataConfig(name="gsm8k", path=str(tmp_path), subset="main")
    assert [row["answer"] for row in gsm8k.load(config, "eval")] == ["2"]
    shutil.rmtree(tmp_path / "main")
    with pytest.raises(ConfigError, match="only socratic"):
        gsm8k.load(config, "eval")
