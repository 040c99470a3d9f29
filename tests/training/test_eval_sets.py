"""Evaluations with a name, their data, rewards and samples: in runs, by `rlcore eval`, and the checks. About 15 s."""

import json
import re

import pytest

from rlcore.assets import TINY
from rlcore.cli import main
from rlcore.config import compose, same_run
from rlcore.config.eval_sets import set_config
from rlcore.errors import ConfigError, DataError, RewardsError
from rlcore.plugins import PluginManager
from rlcore.training.evaluate import OWN, evaluate, evaluate_target
from rlcore.training.preflight import preflight

TENS = [("1+9=", "10"), ("2+8=", "10"), ("3+7=", "10"), ("9-9=", "0")]
STARTS = """
from rlcore import RewardSpec

def with_one(prompt, response, answer):
    return float(response.startswith("1"))

def first(response):
    return response[:1] or None

def breaks(prompt, response, answer):
    if answer == "0":
        raise ValueError("no zeros")
    return 0.0

voting = RewardSpec("voting", with_one, extract=first)
elsewhere = RewardSpec("elsewhere", with_one, imports=("no_such_module",))
"""
GRPO = ["algo=grpo", "algo.group_size=2", "engine.lr=1e-5"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with tens.jsonl, four problems under other column names than the run's, and a file of rewards."""
    folder = tmp_path_factory.mktemp("sets")
    rows = [{"problem": prompt, "solution": answer} for prompt, answer in TENS]
    (folder / "tens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "starts.py").write_text(STARTS)
    return folder


@pytest.fixture(scope="module")
def tens(files):
    """The data of the set as the command line has it."""
    return f"data: {{path: {files / 'tens.jsonl'}, prompt_key: problem, answer_key: solution}}"


@pytest.fixture(scope="module")
def sets(files, tens):
    """Two evaluations: one with its own data, reward and samples, one with another number of samples alone."""
    reward = f"reward: {{path: {files / 'starts.py'}\\:voting}}"
    first = f"tens: {{{tens}, {reward}, samples: 4, temperature: 1.0, response_len: 2}}"
    return f"eval.sets={{{first}, more: {{samples: 2, temperature: 0.5}}}}"


@pytest.fixture(scope="module")
def trained(train_small, sets, tmp_path_factory):
    """Two steps with both sets, and the same two without any."""
    folder = tmp_path_factory.mktemp("trained")
    options = [*GRPO, "trainer.eval_every=1", "trainer.total_steps=2", "trainer.best=eval/tens/maj@4"]
    summary = train_small(folder / "with", *options, sets)
    train_small(folder / "without", *options[:-1])
    return folder, summary


def test_a_run_has_the_metrics_of_its_sets_and_all_others_as_without_them(trained, metrics_of):
    folder, summary = trained
    with_sets, without = metrics_of(folder / "with"), metrics_of(folder / "without")
    own = [{k: v for k, v in row.items() if not k.startswith(("eval/tens/", "eval/more/"))} for row in with_sets]
    assert own == without
    for row in with_sets:
        assert (row["eval/tens/samples"], row["eval/more/samples"], row["eval/samples"]) == (16, 12, 6)
        assert {"eval/tens/pass@4", "eval/tens/maj@4", "eval/more/pass@2"} <= set(row)
        assert not {"eval/more/pass@4", "eval/pass@2"} & set(row)
        assert row["eval/tens/response_length"] <= 2
    values = [row["eval/tens/maj@4"] for row in with_sets]
    assert summary["best"] == {"step": values.index(max(values)), "value": max(values)}


def test_a_set_is_scored_by_its_own_reward_on_its_own_rows(small, sets):
    plugins = PluginManager.load()
    found = evaluate_target(TINY, compose([*small, "trainer.eval_temperature=0", sets], plugins), plugins)
    assert list(found) == [OWN, "tens", "more"]
    batch = found["tens"].batch
    assert sorted(zip(batch["prompt_text"], batch["answer"], strict=True)) == sorted(4 * TENS)
    scores = [float(text.startswith("1")) for text in batch["response_text"]]
    assert batch["scores"].tolist() == scores
    assert 0 < sum(scores) < 16
    assert found["tens"].metrics["eval/tens/accuracy"] == pytest.approx(sum(scores) / 16)
    assert set(batch["uid"]) == {f"eval/tens:{row}" for row in range(4)}
    # The other has the run's own prompts and rewards, with two samples each.
    more, own = found["more"].batch, found[OWN].batch
    assert sorted(more["prompt_text"]) == sorted(2 * list(own["prompt_text"]))
    right = [text == answer for text, answer in zip(more["response_text"], more["answer"], strict=True)]
    assert found["more"].metrics["eval/more/accuracy"] == pytest.approx(sum(right) / 12)


def test_the_sets_alone_of_a_run_and_compared(trained, capsys):
    folder, _ = trained
    run = str(folder / "with")
    assert main(["eval", run, "eval.held_out=false"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^tens/accuracy +[0-9.]+ +95 % interval", printed, re.MULTILINE)
    assert not re.search(r"^accuracy", printed, re.MULTILINE)
    assert main(["eval", run, str(folder / "with" / "checkpoints" / "best"), "eval.held_out=false"]) == 0
    lines = capsys.readouterr().out.splitlines()
    compared = {line.split()[0]: line for line in lines if " B - A " in line}
    assert {"tens/accuracy", "tens/maj@4", "more/pass@2"} <= set(compared)
    assert "accuracy" not in compared
    assert compared["tens/accuracy"].endswith("4 prompts)")
    assert compared["more/accuracy"].endswith("6 prompts)")


def test_failed_rewards_of_a_set_name_it(small, files, tens, caplog):
    plugins = PluginManager.load()
    reward = f"reward: {{path: {files / 'starts.py'}\\:breaks, max_failures: 0.25}}"
    metrics = evaluate(
        TINY,
        compose([*small, "trainer.eval_temperature=0", f"eval.sets={{tens: {{{tens}, {reward}}}}}"], plugins),
        plugins,
    )
    assert (metrics["eval/tens/reward_errors"], metrics["eval/reward_errors"]) == (1, 0)
    warned = [record.getMessage() for record in caplog.records if record.name == "rlcore.training.evaluate"]
    assert warned[0].startswith(
        "the evaluation tens leaves out 1 of 4 samples, which have no reward; the first, eval/te"
    )
    strict = f"eval.sets={{tens: {{{tens}, {reward.replace('0.25', '0.2')}}}}}"
    with pytest.raises(RewardsError, match=r"^eval\.sets\.tens: 1 of 4 .* eval\.sets\.tens\.reward\.max_failures=0\.2"):
        evaluate(TINY, compose([*small, "trainer.eval_temperature=0", strict], plugins), plugins)


def test_another_data_set_starts_from_the_defaults_and_is_evaluated_on_whole(small):
    plugins = PluginManager.load()
    run = [*small, "data.prompt_key=q", "data.prompt_len=64", "data.eval_size=5", "reward.timeout=3"]
    sets = "{a: {data: {path: other.jsonl}}, b: {data: {prompt_len: 32}}, c: {reward: {functions: {math: 1}}}}"
    config = compose([*run, f"eval.sets={sets}"], plugins)
    other, same, scored = (set_config(config, name) for name in "abc")
    assert (other.data.prompt_key, other.data.held_out_share, other.data.eval_size) == ("prompt", 1.0, 0)
    assert (other.data.prompt_len, other.data.name) == (64, "file")
    assert (same.data.prompt_key, same.data.held_out_share, same.data.eval_size) == ("q", 0.1, 5)
    assert (scored.reward.functions, scored.reward.timeout) == ({"math": 1.0}, 3.0)
    assert other.reward == config.reward
    changed = compose([*run, f"eval.sets={sets}", "eval.sets.a.samples=2"], plugins)
    assert same_run(config, changed) == ["eval.sets.a.samples"]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("{a: {data: {pth: x}}}", r"unknown key 'eval\.sets\.a\.data\.pth'\. Did you mean 'eval\.sets\.a\.data\.path'"),
        ("{a: {smples: 1}}", r"unknown key 'eval\.sets\.a\.smples'\. Did you mean 'eval\.sets\.a\.samples'"),
        ("{a: {data: {name: fil}}}", r"eval\.sets\.a\.data\.name = 'fil' is not installed\. Did you mean 'file'"),
        ("{a: {reward: {functions: {mth: 1}}}}", r"eval\.sets\.a\.reward\.functions = 'mth' is not installed\."),
        ("{a: {reward: {path: score}}}", r"^eval\.sets\.a\.reward\.path = 'score' must be FILE\.py:FUNCTION"),
        ("{a: {reward: {model: tiny}}}", r"eval\.sets\.a\.reward\.model=tiny: evaluations do not read reward\.model"),
        ("{a: {data: {batch_size: 2}}}", r"eval\.sets\.a\.data\.batch_size=2: evaluations do not read"),
        (
            "{a: {samples: 2, temperature: 0}}",
            r"^eval\.sets\.a\.samples = 2 greedy .* eval\.sets\.a\.temperature above",
        ),
        ("{a b: {}}", r"eval\.sets\.a b: the name is part of metrics"),
        ("{a: {env: {name: calculator}}}", r"'eval\.sets\.a\.env'\. .* in another: rlcore eval RUN env=NAME\."),
    ],
)
def test_the_config_of_a_set_is_checked_before_anything_starts(sets, message):
    plugins = PluginManager.load()
    with pytest.raises(ConfigError, match=message):
        preflight(compose(["algo=grpo", "cluster=in_process", f"eval.sets={sets}"], plugins), plugins)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["algo=grpo", "trainer.best=eval/a/pass@4"], r"'eval/a/pass@4', .* needs eval\.sets\.a\.samples of at least"),
        (["algo=grpo", "trainer.best=eval/b/accuracy"], r"Did you mean 'eval/a/accuracy'\?"),
        (["algo=grpo", "trainer.best=eval/accuracy", "eval.held_out=false"], r"'eval/accuracy', which no evaluation"),
        (["algo=grpo", "eval.held_out=false", "~eval.sets.a"], r"eval\.held_out=false leaves nothing to evaluate on"),
        (["algo=dpo"], r"eval\.sets samples from the role `actor`, which does not generate with algo=dpo"),
    ],
)
def test_what_needs_the_sets_is_checked_before_anything_starts(options, message):
    plugins = PluginManager.load()
    with pytest.raises(ConfigError, match=message):
        preflight(compose(["cluster=in_process", "eval.sets={a: {samples: 2}}", *options], plugins), plugins)


@pytest.mark.parametrize(
    ("data", "more", "error", "message"),
    [
        ("{path: none.jsonl}", "", ConfigError, r"^eval\.sets\.a\.data\.path=none\.jsonl: there is no such file"),
        (
            "{path: TENS, prompt_key: problm}",
            "",
            DataError,
            r"^eval\.sets\.a\.data\.prompt_key=problm|^eval",
        ),
        ("{path: TENS, prompt_key: problem}", "", DataError, r"^eval\.sets\.a: data=file, .* needs a reference answer"),
        ("{}", "response_len: 600", ConfigError, r"^eval\.sets\.a: .*eval\.sets\.a\.response_len=600.* rows of 517,"),
        ("{rendered: [x]}", "", ConfigError, r"^eval\.sets\.a\.data\.rendered names 'x', which no row has"),
    ],
)
def test_the_data_of_a_set_is_checked_before_the_run(train_small, files, tmp_path, data, more, error, message):
    data = data.replace("TENS", str(files / "tens.jsonl"))
    sets = f"eval.sets={{a: {{data: {data}{', ' if more else ''}{more}}}}}"
    with pytest.raises(error, match=message):
        train_small(tmp_path / "run", "trainer.eval_every=1", "trainer.total_steps=1", sets)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("function", ["lacking", "elsewhere"])
def test_a_reward_of_a_set_that_cannot_be_loaded_ends_the_run_before_it_starts(train_small, files, tmp_path, function):
    sets = f"eval.sets={{a: {{reward: {{path: {files / 'starts.py'}\\:{function}}}}}}}"
    with pytest.raises(ConfigError, match=r"^eval\.sets\.a: .*(lacking|no_such_module)"):
        train_small(tmp_path / "run", "trainer.eval_every=1", sets)
    assert not (tmp_path / "run").exists()
