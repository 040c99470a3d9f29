"""The difference of the engines' log-probs is warned of, and ends a run where it jumps. Together 15 CPU seconds."""

import json
import logging
import math
from pathlib import Path

import pytest

from rlcore.config import Config, LoraConfig, ModelConfig, RolloutConfig, TrainerConfig
from rlcore.errors import WeightsError
from rlcore.plugins import PluginManager
from rlcore.training.logprob_diff import DIFF, SAME_WEIGHTS, LogprobDiffWatch, warning

PLUGIN = Path(__file__).parents[1] / "fixtures" / "plugins" / "uses_wrongly.py"


def config(dtype="fp32", lora=None, trainer=None, **rollout):
    model = ModelConfig(dtype=dtype, lora=lora or LoraConfig())
    rollouts = RolloutConfig(name="hf", **rollout)
    return Config(algorithm="grpo", algo=None, model=model, rollout=rollouts, trainer=trainer or TrainerConfig())


@pytest.mark.parametrize(
    ("gap", "options", "cause"),
    [
        (math.nan, {}, "are NaN: rollout=hf has wrong weights"),
        (0.3, {"temperature": 0.0}, "rollout.temperature=0.0 samples from part of the distribution"),
        (0.3, {"lora": LoraConfig(rank=2, dropout=0.1)}, "model.lora.dropout=0.1 drops a part"),
        (0.3, {"trainer": TrainerConfig(rollouts_ahead=1)}, "trainer.rollouts_ahead samples with weights"),
        (0.3, {"dtype": "bf16"}, "rollout=hf rounds bf16 differently"),
        (0.3, {}, "in fp32 the two compute the same"),
    ],
)
def test_the_likely_cause_of_a_gap(gap, options, cause):
    assert cause in warning(gap, config(**options))


def test_a_warning_comes_again_when_the_gap_doubles(caplog):
    watch, warned = LogprobDiffWatch(config()), []
    for step, gap in enumerate((0.04, 0.06, 0.11, 0.13, math.nan, math.nan)):
        caplog.clear()
        watch.warn(step, {DIFF: gap})
        warned.append(bool(caplog.records))
    assert warned == [False, True, False, True, True, False]
    silent = LogprobDiffWatch(config(trainer=TrainerConfig(train_rollout_logprob_diff=0.0)))
    caplog.clear()
    silent.warn(1, {DIFF: math.nan})
    assert not caplog.records


@pytest.mark.parametrize(
    ("dtype", "first", "goes_on", "ends"),
    [
        ("fp32", 1e-6, 0.0099, 0.0101),
        ("fp32", 0.004, 0.0199, 0.0201),
        ("bf16", 0.004, 0.0499, 0.0501),
        ("bf16", 0.02, 0.0999, 0.1001),
    ],
)
def test_a_run_ends_at_five_times_its_first_difference(dtype, first, goes_on, ends):
    watch = LogprobDiffWatch(config(dtype))
    assert watch.judge(1, {SAME_WEIGHTS: first}) == ""
    assert watch.judge(2, {SAME_WEIGHTS: goes_on, DIFF: 3.0}) == ""
    assert watch.judge(3, {DIFF: 3.0}) == ""  # no row of the same weights
    assert watch.first == first
    said = watch.judge(4, {SAME_WEIGHTS: ends})
    assert said.startswith("step 4: the rollout engine's log-probs of samples of the same weights differ")
    assert f"the {first:.3g} of the run's start" in said
    assert "are NaN" in watch.judge(4, {SAME_WEIGHTS: math.nan})


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 4},
        {"min_tokens": 2},
        {"lora": LoraConfig(rank=2, dropout=0.1)},
        {"trainer": TrainerConfig(train_rollout_logprob_diff=0.0)},
    ],
)
def test_nothing_is_judged_where_both_engines_may_be_right(options):
    watch = LogprobDiffWatch(config(**options))
    assert watch.judge(1, {SAME_WEIGHTS: 0.0}) == watch.judge(2, {SAME_WEIGHTS: 9.0}) == ""


@pytest.fixture
def train_wrongly(train_small, tmp_path):
    def run(fault, *overrides):
        fixed = [f"rollout.uses_wrongly.fault={fault}", "rollout=uses_wrongly", "engine.lr=1e-4"]
        plugins = PluginManager.load([str(PLUGIN)])
        return train_small(tmp_path / "run", *fixed, "trainer.checkpoint_every=1", *overrides, plugins=plugins)

    return run


def steps(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if DIFF in line}


@pytest.mark.parametrize("fault", ["weight", "layout", "norm", "rope"])
def test_weights_that_are_used_wrongly_end_the_run(train_wrongly, tmp_path, fault):
    """Version 2 samples step 3: what it is compared with was measured in step 1."""
    with pytest.raises(WeightsError, match=r"step 3: .* rollout=uses_wrongly uses them wrongly"):
        train_wrongly(fault, "tracker=jsonl", "trainer.total_steps=4")
    found = steps(tmp_path / "run")
    assert [found[step][SAME_WEIGHTS] < 1e-4 for step in (1, 2, 3)] == [True, True, False]
    assert found[3][SAME_WEIGHTS] == found[3][DIFF]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step_00000001",
        "step_00000002",
    ]


def test_what_was_measured_at_the_start_is_known_after_a_resume(train_wrongly, tmp_path):
    with pytest.raises(WeightsError, match="step 3"):
        train_wrongly("rope", "trainer.total_steps=4")
    state = json.loads((tmp_path / "run" / "checkpoints" / "step_00000002" / "trainer.json").read_text())
    assert 0 <= state["logprob_diff"] < 1e-4
    with pytest.raises(WeightsError, match=f"the {state['logprob_diff']:.3g} of the run's start"):
        train_wrongly("rope", "trainer.total_steps=4")


def test_the_end_can_be_turned_off_for_a_resume(train_wrongly, tmp_path):
    with pytest.raises(WeightsError, match=r"with trainer\.train_rollout_logprob_diff=0 also where"):
        train_wrongly("rope", "trainer.total_steps=3")
    off = "trainer.train_rollout_logprob_diff=0"
    assert train_wrongly("rope", "trainer.total_steps=3", off)["status"] == "finished"


def test_rows_of_older_weights_are_not_compared(train_small, tmp_path, caplog):
    """Two optimizer steps a batch: the difference is measured in the first, before the weights change."""
    with caplog.at_level(logging.WARNING, "rlcore"):
        train_small(tmp_path / "run", "tracker=jsonl", "trainer.total_steps=2", "algo.mini_batches=2", "engine.lr=0.05")
    assert all(row[SAME_WEIGHTS] < 1e-4 for row in steps(tmp_path / "run").values())
