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
from rlcore.cli import main
from rlcore.config import compose
from rlcore.errors import CheckpointError, ConfigError, RewardsError, WorkerError
from rlcore.plugins import PluginManager
from rlcore.protocol import DataProto
from rlcore.training.compare import compare
from rlcore.training.evaluate import OWN, evaluate, evaluate_prompts, metric_names, prepare_target, sample_rows


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
    assert set(metrics) == set(metric_names(run.config, extracts=True))
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
            # Wilson's interval of 3/4 with 3 samples: the standard error 1/4 is theirs. z = 1.959964, z^2 = 3.841459.
            "eval/accuracy_low": (0.75 * 3 + 3.841459 / 2 - 1.959964 * 1.2340441) / 6.841459,
            "eval/accuracy_high": (0.75 * 3 + 3.841459 / 2 + 1.959964 * 1.2340441) / 6.841459,
            "eval/score": (0.25 + 0.5 + 0.75 + 2.0) / 4,
            "eval/response_length": 1,
            "eval/truncated": 1.0,  # one digit is never the end of a response
            "eval/reward_errors": 2,
            "eval/samples": 6,
        }
    )


def test_failed_rewards_of_an_evaluation_are_on_the_console(open_small, tmp_path, caplog):
    (tmp_path / "by_answer.py").write_text(BY_ANSWER)
    reward = [f"reward.path={tmp_path / 'by_answer.py'}:score", "reward.functions={}", "reward.max_failures=0.4"]
    run, prompts = open_small("~reward", *reward, "rollout.response_len=1")
    evaluate_prompts(run, prompts)
    warned = [record.getMessage() for record in caplog.records if record.name == "rlcore.training.evaluate"]
    assert len(warned) == 1
    assert warned[0].startswith("the evaluation leaves out 2 of 6 samples, which have no reward; the first, eval:0/0: ")
    assert "by_answer.score raised ValueError: no score for this one" in warned[0]


VOTING = """
from rlcore import RewardSpec

def score(prompt, response, answer):
    return float(answer in response)

def last_digit(response):
    return response.rstrip()[-1:] or None

spec = RewardSpec("voting", score, extract=last_digit)
plain = score
"""


def test_the_majority_votes_where_the_reward_extracts_answers(open_small, tmp_path):
    (tmp_path / "voting.py").write_text(VOTING)
    options = ["~reward", "reward.functions={}", "trainer.eval_samples=4"]
    run, prompts = open_small(*options, f"reward.path={tmp_path / 'voting.py'}:spec")
    found = evaluate_prompts(run, prompts)
    rows = zip(found.batch["uid"], found.batch["response_text"], found.batch["answer"], strict=True)
    by_prompt: dict[str, list[tuple[str, bool]]] = {}
    for uid, text, answer in rows:
        by_prompt.setdefault(uid, []).append((text.rstrip()[-1:], answer in text))

    def majority(subset):
        counts = [sum(other == answer for other, _ in subset) if answer else 0 for answer, _ in subset]
        winners = [right for (_, right), count in zip(subset, counts, strict=True) if count and count == max(counts)]
        return sum(winners) / len(winners) if winners else 0

    for k in (2, 4):
        subsets = [itertools.combinations(samples, k) for samples in by_prompt.values()]
        shares = [sum(map(majority, each)) / math.comb(4, k) for each in subsets]
        assert found.metrics[f"eval/maj@{k}"] == pytest.approx(sum(shares) / 6)
        assert found.metrics[f"eval/maj@{k}_low"] < found.metrics[f"eval/maj@{k}"]
    assert len({answer for samples in by_prompt.values() for answer, _ in samples}) > 2
    assert "eval/maj@1" not in found.metrics

    run, prompts = open_small(*options, f"reward.path={tmp_path / 'voting.py'}:plain")
    without = evaluate_prompts(run, prompts).metrics
    assert {name for name in found.metrics if "maj@" not in name} == set(without)


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
    accuracy, low, high = (evaluations[2][f"eval/accuracy{bound}"] for bound in ("", "_low", "_high"))
    line = rf"^accuracy +{accuracy:.4g} +95 % interval {low:.4g} to {high:.4g}$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)
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


def test_a_checkpoint_of_a_run_is_evaluated_by_its_path(trained, small, metrics_of):
    plugins = PluginManager.load()
    between = {k: v for k, v in metrics_of(trained)[1].items() if k.startswith("eval/")}
    config = compose([*small, *GREEDY], plugins)
    assert evaluate(trained / "checkpoints" / "step_00000001", config, plugins) == between


def test_two_checkpoints_are_compared_on_the_same_prompts(trained, small, metrics_of, capsys):
    before, between, _ = metrics_of(trained)
    options = [*small, *GREEDY, "algo=grpo"]
    model = trained / "checkpoints" / "step_00000001"
    assert main(["eval", str(TINY), str(model), *options]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("score "))
    one, two, difference = (float(number) for number in re.findall(r"[AB] ([-+]?[0-9][.0-9]*) ", line))
    assert (one, two) == pytest.approx((before["eval/score"], between["eval/score"]), abs=1e-4)
    assert difference == pytest.approx(two - one, abs=2e-4)
    assert "6 prompts" in line


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A file of three prompts as messages, and a copy of the shipped model whose chat template differs."""
    folder = tmp_path_factory.mktemp("chats")
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(3)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = shutil.copytree(TINY, folder / "model")
    template = model / "chat_template.jinja"
    template.write_text("{{ '<|system|>count<|end|>' }}" + template.read_text())
    return folder / "chats.jsonl", model


def test_prompts_of_messages_are_the_same_for_models_with_other_chat_templates(small, chats, capsys):
    file, model = chats
    plugins = PluginManager.load()
    data = [f"data.path={file}", "data.eval_size=0", "data.held_out_share=0.9"]
    configs = [compose([*small, *GREEDY, *data, f"model.path={path}"], plugins) for path in (TINY, model)]
    first, second = (prepare_target(path, config, plugins) for path, config in zip((TINY, model), configs, strict=True))
    assert set(first.prompts[OWN]["prompt_text"]).isdisjoint(second.prompts[OWN]["prompt_text"])
    rows = compare([TINY, model], configs, plugins)
    assert rows["accuracy"].pairs == len(first.prompts[OWN]) >= 2
    assert "differ" not in capsys.readouterr().out  # in model.path alone


def test_other_prompts_end_a_comparison_before_a_model_loads(small, chats, tmp_path):
    """The model's weights are cut off, so a run of it would end with another error."""
    model = shutil.copytree(TINY, tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    plugins = PluginManager.load()
    options = [*small, *GREEDY, f"model.path={model}"]
    other = [f"data.path={chats[0]}", "data.held_out_share=0.9"]
    sets = ["eval.held_out=false", "eval.sets={a: {samples: 2}}"]
    own, on_other, on_set = (compose([*options, *more], plugins) for more in ([], other, sets))
    with pytest.raises(ConfigError, match=r"share 0 of their prompts \(6 and \d\), and a difference needs two"):
        compare([model, model], [own, on_other], plugins)
    with pytest.raises(ConfigError, match=r"no evaluation in common: the run's own and a; give both"):
        compare([model, model], [own, on_set], plugins)
    with pytest.raises(WorkerError, match="file not fully covered"):
        compare([model, model], [own, own], plugins)


def test_two_runs_that_are_measured_differently_say_so(small, capsys):
    plugins = PluginManager.load()
    short = ["rollout.response_len=2", "reward.pass_score=0.5", "trainer.eval_every=5", "data.system_prompt=Add"]
    configs = [compose([*small, *GREEDY, *more], plugins) for more in ([], short)]
    compare([TINY, TINY], configs, plugins)
    line = capsys.readouterr().out.splitlines()[2]
    assert line.startswith("A and B differ in data.system_prompt, reward.pass_score, rollout.response_len; an override")


def test_an_evaluation_of_its_own_cannot_be_compared(trained, small):
    plugins = PluginManager.load()
    config = compose([*small, "algo=dpo"], plugins)
    with pytest.raises(ConfigError, match=r"is a run of algo=dpo, whose own evaluation has no values by prompt"):
        compare([trained, trained], [config, config], plugins)
    best = trained / "checkpoints" / "step_00000001"
    with pytest.raises(ConfigError, match=rf"as {trained}/checkpoints/step_NUMBER/actor/model$"):
        compare([best, trained], [config, config], plugins)


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
