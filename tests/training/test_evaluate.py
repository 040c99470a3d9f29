"""Evaluation: pass@k, what accuracy counts, and whose weights are evaluated."""

import itertools
import json
import math
import re
import shutil
from dataclasses import replace

import pytest
import torch

from rlcore.assets import TINY
from rlcore.config import compose
from rlcore.errors import CheckpointError, RewardsError
from rlcore.plugins import PluginManager
from rlcore.protocol import DataProto
from rlcore.training.evaluate import evaluate, evaluate_prompts, pass_at_k, sample_rows


@pytest.mark.parametrize(
    ("samples", "correct", "k", "chance"),
    [
        (4, 1, 2, 1 / 2),  # the right one is in 3 of the 6 pairs
        (4, 2, 2, 5 / 6),  # all pairs but one
        (4, 3, 2, 1.0),  # no pair of wrong ones
        (8, 0, 4, 0.0),
        (8, 8, 1, 1.0),
        (8, 3, 1, 3 / 8),
        (5, 1, 5, 1.0),
    ],
)
def test_pass_at_k_by_hand(samples, correct, k, chance):
    assert pass_at_k(samples, correct, k) == pytest.approx(chance)


def test_pass_at_k_counts_the_subsets_that_hold_a_right_one():
    for samples in range(1, 7):
        for correct in range(samples + 1):
            right = [index < correct for index in range(samples)]
            for k in range(1, samples + 1):
                subsets = list(itertools.combinations(right, k))
                share = sum(any(subset) for subset in subsets) / len(subsets)
                assert pass_at_k(samples, correct, k) == pytest.approx(share), (samples, correct, k)


def test_greedy_evaluation_is_the_same_each_time(open_small):
    run, prompts = open_small("trainer.eval_temperature=0")
    run.config = replace(run.config, trainer=replace(run.config.trainer, eval_samples=2))
    first, second = evaluate_prompts(run, prompts), evaluate_prompts(run, prompts)
    assert first.metrics == second.metrics
    assert first.metrics["eval/samples"] == 2 * len(prompts) == 12
    texts = {}
    for uid, text in zip(first.batch["uid"], first.batch["response_text"], strict=True):
        texts.setdefault(uid, []).append(text)
    assert len(texts) == 6
    assert all(one == two for one, two in texts.values())
    right = [text == answer for text, answer in zip(first.batch["response_text"], first.batch["answer"], strict=True)]
    assert first.metrics["eval/accuracy"] == pytest.approx(sum(right) / 12)
    assert first.metrics["eval/pass@1"] == pytest.approx(first.metrics["eval/pass@2"])


def test_sampled_evaluation_gives_pass_at_powers_of_two(open_small):
    run, prompts = open_small("trainer.eval_samples=4")
    found = evaluate_prompts(run, prompts)
    metrics = found.metrics
    by_prompt: dict[str, list[bool]] = {}
    for uid, score in zip(found.batch["uid"], found.batch["scores"].tolist(), strict=True):
        by_prompt.setdefault(uid, []).append(score == 1.0)
    assert [len(right) for right in by_prompt.values()] == [4] * 6
    for k in (1, 2, 4):
        shares = [sum(map(any, itertools.combinations(right, k))) / math.comb(4, k) for right in by_prompt.values()]
        assert metrics[f"eval/pass@{k}"] == pytest.approx(sum(shares) / 6)
    assert not {"eval/pass@3", "eval/pass@8"} & set(metrics)
    assert metrics["eval/accuracy"] == pytest.approx(metrics["eval/pass@1"])
    assert 0 < metrics["eval/pass@1"] < metrics["eval/pass@2"] < metrics["eval/pass@4"]
    assert len(set(found.batch["response_text"])) > 6  # the samples of a prompt are not all one


BY_ANSWER = """
def score(prompt, response, answer):
    if answer in ("4", "8"):
        raise ValueError("no score for this one")
    return {"5": 0.25, "12": 0.5, "17": 0.75, "10": 2.0}[answer]
"""


@pytest.mark.parametrize("error_value", ["1.0", "null"])
def test_accuracy_counts_scores_from_the_pass_score_on_and_no_failed_reward(open_small, tmp_path, error_value):
    """A sample without a reward is neither right nor wrong, whatever score it gets in training."""
    (tmp_path / "by_answer.py").write_text(BY_ANSWER)
    reward = [f"reward.path={tmp_path / 'by_answer.py'}:score", "reward.functions={}", "reward.pass_score=0.5"]
    limits = [f"reward.error_value={error_value}", "reward.max_failures=0.4", "rollout.response_len=1"]
    run, prompts = open_small("~reward", *reward, *limits)
    found = evaluate_prompts(run, prompts)
    assert sorted(prompts["answer"]) == ["10", "12", "17", "4", "5", "8"]
    assert found.metrics == pytest.approx(
        {
            "eval/accuracy": 3 / 4,
            "eval/score": (0.25 + 0.5 + 0.75 + 2.0) / 4,
            "eval/response_length": 1,
            "eval/truncated": 1.0,  # one digit is never the end of a response
            "eval/reward_errors": 2,
            "eval/samples": 6,
        }
    )


def test_too_many_failed_rewards_end_an_evaluation_and_show_the_first(open_small, tmp_path):
    (tmp_path / "by_answer.py").write_text(BY_ANSWER)
    run, prompts = open_small("~reward", f"reward.path={tmp_path / 'by_answer.py'}:score", "reward.functions={}")
    with pytest.raises(RewardsError, match=r"2 of 6 samples .* reward\.max_failures=0\.25") as caught:
        evaluate_prompts(run, prompts)
    assert "by_answer.score raised ValueError: no score for this one; its prompt is '" in str(caught.value)


@pytest.fixture(scope="module")
def trained(train_small, tmp_path_factory):
    """Two steps, with a greedy evaluation and a checkpoint at each."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train_small(folder, *GREEDY, "trainer.eval_every=1", "trainer.checkpoint_every=1", "trainer.total_steps=2")
    return folder


GREEDY = ["trainer.eval_temperature=0", "engine.lr=1e-5"]


def test_a_run_is_evaluated_with_its_newest_checkpoint(trained, small, metrics_of, forget, tmp_path, capsys):
    """As the run evaluated itself; and where the newest weights are all 0, the likeliest token is always the first."""
    from safetensors.torch import load_file, save_file

    evaluations = [{k: v for k, v in row.items() if k.startswith("eval/")} for row in metrics_of(trained)]
    assert len(evaluations) == 3
    plugins = PluginManager.load()
    config = compose([*small, *GREEDY], plugins)
    folder = shutil.copytree(trained, tmp_path / "run")
    assert evaluate(folder, config, plugins) == evaluations[2]
    assert re.search(rf"^accuracy +{evaluations[2]['eval/accuracy']:.4g}$", capsys.readouterr().out, re.MULTILINE)
    assert evaluations[2]["eval/truncated"] < 1

    checkpoint, name = folder / "checkpoints" / "step_00000002", "actor/model/model.safetensors"
    weights = checkpoint / name
    save_file({k: torch.zeros_like(v) for k, v in load_file(weights).items()}, weights, {"format": "pt"})
    forget(checkpoint, name)
    found = evaluate(folder, config, plugins)
    assert (found["eval/truncated"], found["eval/response_length"]) == (1.0, 5.0)


def test_a_model_folder_is_evaluated_with_its_own_weights(trained, small, metrics_of):
    plugins = PluginManager.load()
    config = compose([*small, *GREEDY], plugins)
    before, between, _ = [{k: v for k, v in row.items() if k.startswith("eval/")} for row in metrics_of(trained)]
    assert evaluate(TINY, config, plugins) == before
    model = trained / "checkpoints" / "step_00000001" / "actor" / "model"
    assert evaluate(model, replace(config, model=replace(config.model, path=str(model))), plugins) == between


def test_a_run_without_a_checkpoint_cannot_be_evaluated(trained, small, tmp_path):
    (tmp_path / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    (tmp_path / "checkpoints" / ".writing-step_00000001").mkdir(parents=True)
    plugins = PluginManager.load()
    with pytest.raises(CheckpointError, match=r"has no checkpoint to evaluate"):
        evaluate(tmp_path, compose(small, plugins), plugins)


def test_sample_rows_say_what_was_sampled_and_why_it_got_its_reward():
    failure = {"function": "exact", "cause": "ValueError: no"}
    batch = DataProto.from_single_dict(
        {
            "uid": ["0:1", "0:1", "0:2"],
            "sample_index": torch.tensor([0, 1, 0]),
            "prompt_text": ["1+1=", "1+1=", "2+2="],
            "response_text": ["2", "3", "é"],
            "answer": ["2", "2", None],
            "scores": torch.tensor([1.0, 0.0, -1.0]),
            "score/exact": torch.tensor([1.0, 0.0, 0.5]),
            "response_length": torch.tensor([2, 2, 4]),
            "finished": torch.tensor([True, True, False]),
            "reward_error": torch.tensor([False, False, True]),
            "reward_detail": [None, None, failure],
            "weights_version": torch.tensor([0, 0, 0]),
        }
    )
    rows = sample_rows(batch, most=10)
    assert json.loads(json.dumps(rows)) == rows
    assert len(rows) == 3
    assert rows[2] == {
        "uid": "0:2",
        "sample_index": 0,
        "prompt_text": "2+2=",
        "response_text": "é",
        "answer": None,
        "weights_version": 0,
        "scores": -1.0,
        "score/exact": 0.5,
        "response_length": 4,
        "finished": False,
        "reward_error": True,
        "reward_detail": failure,
    }
    assert [row["response_text"] for row in sample_rows(batch, most=2)] == ["2", "3"]
    assert sample_rows(batch, most=0) == []
