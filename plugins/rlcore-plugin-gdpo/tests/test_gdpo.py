"""GDPO: its advantages by hand, and a step with two rewards."""

import json
from dataclasses import replace

import pytest
import torch
from rlcore_plugin_gdpo import gdpo_advantages, named_weights

from rlcore import DataProto
from rlcore.cli import main
from rlcore.config import compose
from rlcore.plugins import PluginManager

UID = ["a", "b", "a", "b"]


def advantages(first, second, weights=(1.0, 1.0), **options):
    scores = [torch.tensor(first), torch.tensor(second)]
    return gdpo_advantages(scores, weights, UID, **{"divide_by_std": True, "lengths": None, **options}).tolist()


def test_advantages_by_hand():
    """The paper's example: the sums (0, 1) and (0, 2) have advantages in the ratio 1 to 2, where GRPO's are equal.

    Group a: the first reward is (0, 1), so -+0.7071; group b: both are, so -+1.4142. The batch's mean is 0, and its
    standard deviation sqrt(2 (0.5 + 2) / 3) = 1.2910.
    """
    got = advantages([0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0])
    assert got == pytest.approx([-0.54772, -1.09545, 0.54772, 1.09545], rel=1e-4)


def test_a_weight_counts_whatever_the_scale():
    """Group a: 2 * -0.7071 + 0.7071; group b: 2 * -0.7071 - 0.7071, before the division by sqrt(2 (0.5 + 4.5) / 3)."""
    got = advantages([0.0, 0.0, 100.0, 100.0], [1.0, 0.0, 0.0, 1.0], weights=(2.0, 1.0))
    std = (2 * (0.5 + 4.5) / 3) ** 0.5
    assert got == pytest.approx([-0.70711 / std, -2.12132 / std, 0.70711 / std, 2.12132 / std], rel=1e-4)


def test_without_the_groups_deviation_scales_count():
    """(-50, 50) and (-0.5, 0.5) in both groups, so the second reward only moves the sums."""
    got = advantages([0.0, 0.0, 100.0, 100.0], [1.0, 0.0, 0.0, 1.0], divide_by_std=False)
    std = (2 * (49.5**2 + 50.5**2) / 3) ** 0.5
    assert got == pytest.approx([-49.5 / std, -50.5 / std, 49.5 / std, 50.5 / std], rel=1e-5)


def test_the_baseline_may_be_weighted_by_length():
    """Group a: baseline 3/4; group b: 1/4. The sums -0.75, -0.25, 0.25 and 0.75 have the mean 0."""
    lengths = torch.tensor([1, 3, 3, 1])
    got = advantages([0.0, 0.0, 1.0, 1.0], [0.0] * 4, divide_by_std=False, lengths=lengths)
    std = (2 * (0.75**2 + 0.25**2) / 3) ** 0.5
    assert got == pytest.approx([-0.75 / std, -0.25 / std, 0.25 / std, 0.75 / std], rel=1e-5)


def test_rewards_that_are_all_equal_teach_nothing():
    assert advantages([0.1] * 4, [1.0] * 4) == [0.0] * 4


@pytest.mark.parametrize(
    ("words", "names", "weights"),
    [
        ("reward.functions={arithmetic:2,gsm8k_flexible:0.5}", ["arithmetic", "gsm8k_flexible"], [2.0, 0.5]),
        (
            "reward.functions={arithmetic:2} reward.model=folder reward.model_weight=3",
            ["arithmetic", "model"],
            [2.0, 3.0],
        ),
        ("reward.path=f.py:score reward.model=folder reward.model_weight=3", ["f.score", "model"], [1.0, 3.0]),
        ("", [], [1.0]),
    ],
)
def test_weights_are_the_runs(words, names, weights):
    config = compose(["algo=gdpo", *words.split()], PluginManager.load())
    columns = [f"score/{name}" for name in names]
    batch = DataProto.from_dict({name: torch.zeros(2) for name in ["scores", *columns]})
    assert named_weights(batch, replace(config)) == dict(zip(columns or ["scores"], weights, strict=True))


@pytest.mark.e2e
def test_a_step_with_two_rewards(tmp_path):
    """One reward is the share of 7s and the other its opposite: with equal weights, nothing is learned; else it is."""
    (tmp_path / "two.py").write_text(
        "def sevens(prompt, response, answer):\n    return response.count('7') / max(len(response), 1)\n"
        "def others(prompt, response, answer):\n    return -sevens(prompt, response, answer)\n"
    )
    norms = {}
    for weight in (1, 0.5):
        functions = f"{{{tmp_path}/two.py\\:sevens:1,{tmp_path}/two.py\\:others:{weight}}}"
        run = tmp_path / f"run-{weight}"
        words = [
            "algo=gdpo",
            "cluster=in_process",
            "data.max_rows=128",
            "tracker=none",
            "data.batch_size=4",
            "rollout.response_len=6",
        ]
        words += ["trainer.total_steps=1", "trainer.eval_every=0", "algo.group_size=4", f"run.dir={run}"]
        words += ["rollout.temperature=2", f"reward.functions={functions}"]
        assert main(["train", *words]) == 0
        (step,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        norms[weight] = step["train/grad_norm"]
    assert norms[1] == 0
    assert norms[0.5] > 0.01
