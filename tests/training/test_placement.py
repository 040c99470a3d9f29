"""Where roles are does not change what a run does: PPO with an actor, a reference and a critic, two steps."""

import pytest

from rlcore.assets import TINY
from rlcore.cli import main
from rlcore.config import compose
from rlcore.plugins import PluginManager
from rlcore.training.evaluate import evaluate

PPO = ["algo=ppo", "algo.kl_coef=0.05", "algo.samples=2", "trainer.total_steps=2"]
APART = "cluster.pools={a: [actor], b: [ref], c: [critic], d: [reward]}"
TWO = "cluster.pools={main: {roles: [actor, ref], colocate: fractional}, side: [critic, reward]}"


@pytest.fixture(scope="module")
def fused(train_small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fused")
    train_small(folder, *PPO)
    return folder


@pytest.fixture
def same_as_fused(fused, train_small, metrics_of, samples_of, tmp_path):
    def check(*overrides):
        train_small(tmp_path, *PPO, *overrides)
        assert samples_of(tmp_path) == samples_of(fused)
        for metrics, expected in zip(metrics_of(tmp_path), metrics_of(fused), strict=True):
            assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert metrics["train/grad_norm"] > 0
        assert metrics["ppo/kl"] > 0, "the reference stayed behind the actor"

    return check


@pytest.mark.parametrize(
    "pools",
    [APART, "cluster.pools={main: [actor, ref], side: [critic]}"],
)
def test_in_process(same_as_fused, pools, tmp_path):
    same_as_fused(pools)
    assert main(["eval", str(tmp_path)]) == 0, "an evaluation has the actor alone, on its pool"


@pytest.mark.ray
@pytest.mark.parametrize("pools", [APART, TWO])
def test_on_ray(ray_cluster, same_as_fused, pools):
    """Every role on a pool of its own; actor and reference as two processes on one place, critic on another."""
    same_as_fused("cluster=local", "cluster.workers=1", pools)


def test_rewards_of_an_evaluation_of_its_own_share_the_processes_of_the_runs(ray_cluster, small, tmp_path):
    """On Ray two classes of reward workers are in each of two processes; the metrics are those in process."""
    (tmp_path / "even.py").write_text(
        "def score(prompt, response, answer):\n    return float(response[-1:] in '02468')\n"
    )
    own = f"eval.sets={{even: {{reward: {{path: {tmp_path / 'even.py'}\\:score}}, samples: 2}}}}"
    plugins = PluginManager.load()
    here, there = (
        evaluate(TINY, compose([*small, own, *options], plugins), plugins)
        for options in ([], ["cluster=local", "cluster.workers=1", "reward.workers=2"])
    )
    assert here == there
    assert 0 < here["eval/even/accuracy"] < 1
    assert here["eval/even/accuracy"] != here["eval/accuracy"]
