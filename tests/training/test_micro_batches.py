"""A run measures its micro-batches once, and a resumed one keeps them. The figures of a GPU's memory are made up."""

import json

import pytest
import torch

from rlcore.engine import room, worker
from rlcore.errors import CheckpointError
from rlcore.plugins import PluginManager
from rlcore.training import trainer

OPTIONS = ["trainer.total_steps=4", "trainer.checkpoint_every=1", "trainer.keep_checkpoints=0"]
PLACE = "pp=1 tp=1 dp=1 shard=1"
ROLES = 2
"""GRPO trains an actor beside a frozen reference."""


class Stopped(PluginManager):
    """Ends a run at the end of step 2, after which its newest checkpoint is that of step 1."""

    def step_end(self, run, step, metrics):
        super().step_end(run, step, metrics)
        if step == 2:
            raise RuntimeError("stop here")


@pytest.fixture
def card(monkeypatch):
    """The name of the card of this process, which may be changed, and the number of measurements so far."""
    here = {"name": "NVIDIA H100", "measured": 0}
    measure = worker.measure

    def counted(*args):
        here["measured"] += 1
        return measure(*args, 512)

    monkeypatch.setattr(trainer, "uses_gpus", lambda cluster: True)
    monkeypatch.setattr(worker, "has_memory_figures", lambda device: True)
    monkeypatch.setattr(worker, "peak_bytes", lambda device, run: [run(), 10**6][1])
    monkeypatch.setattr(worker, "measure", counted)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: here["name"])
    for module in (room, worker):
        monkeypatch.setattr(module, "free_bytes", lambda device: (10**9, 10**9))
    return here


@pytest.fixture
def stopped(train_small, card, tmp_path):
    """The folder of a run that has measured and then broke in its second step."""
    with pytest.raises(RuntimeError, match="stop here"):
        train_small(tmp_path / "run", *OPTIONS, plugins=Stopped.load())
    return tmp_path / "run"


def kept(folder):
    return json.loads((folder / "micro_batches.json").read_text())


def test_the_number_is_measured_kept_and_said(stopped, card):
    assert card["measured"] == ROLES
    actor = kept(stopped)["actor"]
    assert (actor["tokens"], actor["place"]) == (256, f"NVIDIA H100, {PLACE}")
    assert f"micro-batches of 256 tokens ({actor['reason']})" in (stopped / "rlcore.log").read_text()


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(stopped, card, train_small, metrics_of, tmp_path):
    train_small(stopped, *OPTIONS)
    assert card["measured"] == ROLES
    train_small(tmp_path / "straight", *OPTIONS)
    assert card["measured"] == 2 * ROLES
    assert metrics_of(stopped) == metrics_of(tmp_path / "straight")


def test_the_kept_number_is_the_one_that_trains(stopped, card, train_small):
    changed = kept(stopped)
    changed["actor"]["tokens"] = 300
    (stopped / "micro_batches.json").write_text(json.dumps(changed))
    train_small(stopped, *OPTIONS)
    assert "micro-batches of 300 tokens" in (stopped / "rlcore.log").read_text()
    assert kept(stopped) == changed


def test_on_another_card_it_is_measured_again(stopped, card, train_small):
    changed = kept(stopped)
    changed["actor"]["tokens"] = 300
    (stopped / "micro_batches.json").write_text(json.dumps(changed))
    card["name"] = "NVIDIA A100"
    train_small(stopped, *OPTIONS)
    assert card["measured"] == 2 * ROLES
    assert kept(stopped)["actor"]["place"] == f"NVIDIA A100, {PLACE}"
    assert (
        f"actor: micro-batches have 256 tokens, and had 300 on NVIDIA H100, {PLACE}. On NVIDIA A100, {PLACE} they were "
        "measured again, so sums may round differently"
    ) in (stopped / "rlcore.log").read_text()


def test_a_given_number_needs_no_measurement_and_may_be_given_to_a_resumed_run(stopped, card, train_small):
    train_small(stopped, *OPTIONS, "engine.micro_batch_tokens=2048")
    assert card["measured"] == ROLES


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", r"micro_batches.json cannot be read: .*remove it to measure again"),
        ('{"actor": {"size": 1}}', r"micro_batches.json has \{'size': 1\} for actor: .*remove this file"),
    ],
)
def test_a_damaged_file_is_an_error_that_says_what_to_do(stopped, train_small, text, told):
    (stopped / "micro_batches.json").write_text(text)
    with pytest.raises(CheckpointError, match=told):
        train_small(stopped, *OPTIONS)


def test_a_folder_in_which_no_run_began_keeps_no_number(stopped, card, train_small):
    (stopped / "metrics.jsonl").unlink()
    (stopped / "summary.json").unlink()
    for file in sorted((stopped / "checkpoints").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (stopped / "checkpoints").rmdir()
    train_small(stopped, *OPTIONS)
    assert card["measured"] == 2 * ROLES
