"""Data sets by their names on the hub: subsets, splits, shards, one commit for a whole run. About 4 s."""

import io
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from rlcore.config import compose
from rlcore.config.eval_sets import set_config
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager
from rlcore.training.trainer import train

ROWS = [{"question": f"What is {n} + 1?", "answer": f"One more than {n}. #### {n + 1}"} for n in range(40)]
SMALL = [
    *("cluster=in_process", "tracker=none", "algo=grpo", "algo.group_size=2", "data.batch_size=2"),
    *("data.prompt_len=256", "rollout.response_len=4", "trainer.eval_every=0", "trainer.total_steps=2"),
    "trainer.checkpoint_every=1",
]
SOLUTION = ["reward=gsm8k", "data.prompt_len=256"]


def as_parquet(rows):
    """Return the bytes of a Parquet file of these rows."""
    data = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), data)
    return data.getvalue()


def as_jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def gsm8k(hub):
    """Push a data set in the form of openai/gsm8k; return its commit."""
    files = {
        "README.md": b"# GSM8K",
        "dataset_infos.json": b"{}",
        "main/train-00000-of-00002.parquet": as_parquet(ROWS[:20]),
        "main/train-00001-of-00002.parquet": as_parquet(ROWS[20:32]),
        "main/test-00000-of-00001.parquet": as_parquet(ROWS[32:]),
        "socratic/train-00000-of-00001.parquet": as_parquet(ROWS[:3]),
        "socratic/test-00000-of-00001.parquet": as_parquet(ROWS[3:5]),
    }
    return hub.push("openai/gsm8k", files, kind="dataset")


def rows_of(config, split):
    """Return the rows of a split, as a run reads them."""
    return list(PluginManager.load().datasets()[config.data.name].load(config.data, split))


def test_gsm8k_is_the_same_as_its_two_files(hub, gsm8k, composed, tmp_path):
    (tmp_path / "train.jsonl").write_bytes(as_jsonl(ROWS[:32]))
    (tmp_path / "test.jsonl").write_bytes(as_jsonl(ROWS[32:]))
    here = composed("data=gsm8k", f"data.path={tmp_path}")
    there = composed("data=gsm8k", "data.path=openai/gsm8k")
    assert there.data.path == f"openai/gsm8k@{gsm8k}"
    for split, number in (("train", 32), ("eval", 8)):
        assert rows_of(there, split) == rows_of(here, split)
        assert len(rows_of(there, split)) == number
    assert {name for name in hub.downloads() if name.endswith("parquet")} == {
        *("train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "test-00000-of-00001.parquet")
    }
    assert not any("socratic" in line for line in hub.requests)


def test_a_subset_and_splits_are_chosen(hub, gsm8k, composed):
    file = ["data=file", "data.path=openai/gsm8k", "data.answer_key=answer", *SOLUTION]
    assert rows_of(composed(*file, "data.subset=socratic"), "train") == ROWS[:3]
    swapped = composed(*file, "data.subset=main", "data.train_split=test", "data.eval_split=train")
    assert (rows_of(swapped, "train"), len(rows_of(swapped, "eval"))) == (ROWS[32:], 32)
    with pytest.raises(
        ConfigError, match=r"@[0-9a-f]{40} has no rows at its top .*data\.subset to one .*: main, socra"
    ):
        rows_of(composed(*file), "train")
    with pytest.raises(ConfigError, match=r"no subset 'mian'\. Did you mean 'main'\?"):
        rows_of(composed(*file, "data.subset=mian"), "train")


@pytest.mark.parametrize("folder", ["", "data/"])
def test_without_a_held_out_split_a_tenth_is_held_out(hub, composed, folder):
    hub.push("acme/sums", {f"{folder}train.jsonl": as_jsonl(ROWS), "notes/extra.jsonl": b"{}\n"}, kind="dataset")
    config = composed("data=file", "data.path=acme/sums", "data.prompt_key=question", *SOLUTION)
    train, held_out = rows_of(config, "train"), rows_of(config, "eval")
    assert (len(train), len(held_out)) == (36, 4)
    assert sorted(str(row) for row in [*train, *held_out]) == sorted(map(str, ROWS))
    assert "extra.jsonl" not in hub.downloads()


def test_the_data_of_an_evaluation_is_pinned_and_whole(hub, composed):
    commit = hub.push("acme/sums", {"train.jsonl": as_jsonl(ROWS)}, kind="dataset")
    sets = "eval.sets={sums: {data: {name: file, path: acme/sums, prompt_key: question}}}"
    config = composed(sets)
    assert config.eval.sets["sums"].data["path"] == f"acme/sums@{commit}"
    assert rows_of(set_config(config, "sums"), "eval") == ROWS
    with pytest.raises(ConfigError, match=r"^eval\.sets\.sums\.data\.path=acme/absent is neither a folder here nor"):
        composed(sets.replace("acme/sums", "acme/absent"))


@pytest.mark.e2e
def test_a_run_keeps_its_rows_when_the_branch_moves(hub, gsm8k, stopping, tmp_path):
    def run(plugins):
        config = compose([*SMALL, "data=gsm8k", "data.path=openai/gsm8k", f"run.dir={tmp_path / 'run'}"], plugins)
        train(config, plugins)
        return config

    with pytest.raises(RuntimeError, match="stop here"):
        run(stopping.load())
    second = hub.push("openai/gsm8k", {"main/train.jsonl": as_jsonl(ROWS[:2])}, kind="dataset")
    downloads = hub.downloads()
    assert run(PluginManager.load()).data.path == f"openai/gsm8k@{gsm8k}"
    assert hub.downloads() == downloads, "all files are in the cache"
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    samples = [json.loads(line) for line in next((tmp_path / "run" / "samples").iterdir()).read_text().splitlines()]
    assert all(sample["prompt_text"].startswith("What is ") for sample in samples)
    assert compose(["algo=grpo", "data.path=openai/gsm8k"], PluginManager.load()).data.path.endswith(second)


def test_data_that_cannot_be_read_or_fetched(hub, composed):
    hub.push("acme/table", {"train.csv": b"a,b\n1,2\n"}, kind="dataset")
    config = composed("data=file", "data.path=acme/table", *SOLUTION)
    with pytest.raises(ConfigError, match=r"its files: train\.csv\. .*load_dataset\('acme/table'\)\.save_to_disk\('F"):
        rows_of(config, "train")
    hub.push("acme/gated", {"train.jsonl": as_jsonl(ROWS)}, kind="dataset", gated=True)
    with pytest.raises(ConfigError, match=r"data\.path=acme/gated is gated: ask for access at .*/datasets/acme/gated"):
        composed("data=file", "data.path=acme/gated", *SOLUTION)
    with pytest.raises(ConfigError, match=r"data\.path=acme/absent is neither a folder here nor a data set on the hub"):
        composed("data=file", "data.path=acme/absent", *SOLUTION)
    before = len(hub.requests)
    composed("data=file", "data.path=rows/train.jsonl", *SOLUTION)
    assert len(hub.requests) == before, "a file's name is no name of a data set"
