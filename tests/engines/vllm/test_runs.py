"""Whole runs that sample with vLLM."""

import re

import pytest
import torch

from rlcore.engines.vllm import internals

pytestmark = pytest.mark.e2e
SMALL = [
    "data.batch_size=4",
    "data.max_rows=128",
    "data.eval_size=4",
    "trainer.total_steps=4",
    "engine.lr=1e-3",
    "trainer.eval_every=4",
]


@pytest.mark.timeout(600)
def test_the_quickstart_learns_as_much_as_with_the_hugging_face_engine(train_here, tmp_path):
    settings = ["cluster=in_process", "trainer.total_steps=160", "trainer.eval_every=160"]
    summary, metrics = train_here(tmp_path / "run", *settings)
    assert summary["accuracy_before"] <= 0.40
    assert summary["accuracy_after"] >= 0.90
    assert metrics[-1]["health/truncated"] < 0.05


def test_one_run_after_another_in_one_process_the_second_with_a_trial_and_equal(train_here, tmp_path, monkeypatch):
    """The second sleeps, and finds a version that no test has seen; samples, losses and gradients are the first's."""
    found = []
    for name, sleep in (("one", "off"), ("two", "on")):
        settings = ["cluster=in_process", "trainer.total_steps=2", f"rollout.vllm.sleep={sleep}"]
        summary, metrics = train_here(tmp_path / name, *SMALL, *settings)
        assert summary["status"] == "finished"
        assert not torch.distributed.is_initialized()
        log = (tmp_path / name / "rlcore.log").read_text()
        assert re.search(r"actor: CPU, .*vLLM \S+ with its V1 model runner, ", log)
        assert log.count("it was tried with its first weights and passed. Known to pass: ") == (name == "two")
        samples = [path.read_text() for path in sorted((tmp_path / name / "samples").iterdir())]
        figures = ("train/loss", "train/grad_norm", "rollout/train_rollout_logprob_diff")
        found.append((samples, [[row.get(figure) for figure in figures] for row in metrics]))
        monkeypatch.setattr(internals, "TESTED", {"V1": (), "V2": ()})
    assert found[0] == found[1]


def test_a_run_that_sleeps_between_its_steps_is_the_run_that_does_not(train_here, tmp_path):
    runs = {}
    for sleep in ("on", "off"):
        _, metrics = train_here(tmp_path / sleep, *SMALL, "cluster=in_process", f"rollout.vllm.sleep={sleep}")
        runs[sleep] = metrics
    asleep = [row for row in runs["on"] if "time/rollout_sleep" in row]
    assert asleep
    assert not any("time/rollout_sleep" in row for row in runs["off"])
    for on, off in zip(runs["on"], runs["off"], strict=True):
        for name in ("train/loss", "reward/mean", "rollout/train_rollout_logprob_diff"):
            assert on.get(name) == off.get(name), name


@pytest.mark.ray
def test_two_workers_on_ray_sample_each_with_an_engine_of_its_own(ray_cluster, train_here, tmp_path):
    summary, metrics = train_here(tmp_path / "run", *SMALL, "cluster.workers=2")
    assert summary["status"] == "finished"
    assert sum(row.get("train/optimizer_steps", 0) for row in metrics) > 0


@pytest.mark.ray
def test_two_workers_on_ray_train_and_sample_tensor_parallel(ray_cluster, train_here, tmp_path):
    summary, metrics = train_here(tmp_path / "run", *SMALL, "cluster.workers=2", "engine.tp=2", "rollout.tp=2")
    assert summary["status"] == "finished"
    assert sum(row.get("train/optimizer_steps", 0) for row in metrics) > 0
    assert (
        max(
            row["rollout/train_rollout_logprob_diff_max"]
            for row in metrics
            if "rollout/train_rollout_logprob_diff_max" in row
        )
        < 1e-4
    )


@pytest.mark.ray
def test_on_a_pool_of_its_own_ahead_of_training(ray_cluster, train_here, tmp_path):
    pools = "cluster.pools={main: [actor, ref], gen: [rollout]}"
    summary, metrics = train_here(tmp_path / "run", *SMALL, pools, "cluster.workers=1", "trainer.rollouts_ahead=1")
    assert summary["status"] == "finished"
    assert [row["rollout/staleness"] > 0 for row in metrics[1:]] == [False, True, True, True]
