"""What the rollout engine says of its samples against what the train engine says of them."""

import json
import logging

import pytest
from safetensors.torch import load_file

from rlcore.model_folder import model_path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
SMALL = ["data.batch_size=4", "rollout.response_len=6", "data.max_rows=128", "data.eval_size=4", "trainer.eval_every=0"]
HERE = "cluster=in_process"
GAP = "rollout/train_rollout_logprob_diff"


def test_at_a_learning_rate_that_rounds_to_0_nothing_moves(ray_cluster, train_here, tmp_path):
    """1e-60 is 0 in fp32. 20 steps on two FSDP ranks, which sample with a copy of the weights.

    No bit of them moves, and the gap does not grow.
    """
    settings = [
        "algo=grpo",
        "engine.lr=1e-60",
        "trainer.total_steps=20",
        "cluster.workers=2",
        "engine.torch.shard=0",
        "trainer.samples_per_step=64",
    ]
    run = train_here(tmp_path / "run", *SMALL, *settings)
    steps = [row for row in run.numbers if GAP in row]
    assert len(steps) == 20
    assert max(row[GAP] for row in steps) < 1e-5
    assert all(
        row["rollout/train_rollout_logprob_diff_max"] < 1e-4 and row["rollout/train_rollout_logprob_diff_beyond"] == 0
        for row in steps
    )
    (saved,) = (tmp_path / "run" / "checkpoints").glob("*/actor/model/model.safetensors")
    before, after = load_file(f"{model_path('tiny')}/model.safetensors"), load_file(saved)
    assert before.keys() >= after.keys()
    assert all((before[name] == after[name]).all() for name in after)
    taken = [0]
    for row in steps:
        taken.append(taken[-1] + int(row["train/optimizer_steps"]))
    files = sorted((tmp_path / "run" / "samples").glob("*.jsonl"))
    versions = [{json.loads(line)["weights_version"] for line in file.read_text().splitlines()} for file in files]
    assert versions == [{version} for version in taken[:-1]], "each step sampled with the weights of the one before"


def test_a_cut_distribution_is_noticed_and_named(train_here, tmp_path, caplog):
    settings = [
        "algo=grpo",
        "trainer.total_steps=2",
        "rollout.top_k=2",
        "trainer.train_rollout_logprob_diff=0.01",
        HERE,
    ]
    with caplog.at_level(logging.WARNING, "rlcore"):
        run = train_here(tmp_path / "run", *SMALL, *settings)
    assert run.numbers[-1][GAP] > 0.01
    (warning, *_) = [
        record.getMessage() for record in caplog.records if "trainer.train_rollout_logprob_diff" in record.getMessage()
    ]
    assert "Likely cause: rollout.top_k=2 samples from part of the distribution" in warning


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
@pytest.mark.parametrize("kind", ["sequence", "mask"])
def test_algorithms_take_a_correction_by_config(train_here, tmp_path, algo, kind):
    """Equal engines have ratios of 1, which every kind leaves alone: the run is the one without."""
    settings = [*SMALL, f"algo={algo}", "trainer.total_steps=2", "engine.lr=1e-3", HERE]
    plain = train_here(tmp_path / "plain", *settings)
    weighed = train_here(tmp_path / "weighed", *settings, f"trainer.importance={kind}")
    assert weighed.numbers[-1]["train/importance_weight"] == pytest.approx(1.0, abs=1e-4)
    assert weighed.numbers[-1]["train/importance_truncated"] == 0
    assert weighed.numbers[-1]["train/grad_norm"] == pytest.approx(plain.numbers[-1]["train/grad_norm"], rel=1e-3)
