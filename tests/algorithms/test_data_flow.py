"""What of a step's data reaches the controller, on a real Ray with every column an object of its own."""

import pytest

from rlcore.config import compose
from rlcore.data.chat import load_tokenizer
from rlcore.data.loader import PromptLoader
from rlcore.plugins import PluginManager
from rlcore.protocol.glossary import fields
from rlcore.rewards.compose import resolve
from rlcore.training.run import open_run

pytestmark = pytest.mark.ray

TOKEN_LEVEL = {name for name, field in fields().items() if "ragged" in field.shapes}


def columns_read_here(tmp_path, *overrides):
    """Take one step and return the columns that this process fetched from the workers, and the step's metrics."""
    plugins = PluginManager.load()
    small = ["data.batch_size=4", "data.prompt_len=64", "rollout.response_len=6", "cluster.inline_kb=0"]
    config = compose([*overrides, *small], plugins)
    algorithm = plugins.algorithm(config.algorithm).algorithm(config.algo)
    dataset = plugins.datasets()[config.data.name]
    loader = PromptLoader(config.data, dataset, load_tokenizer(config.model), seed=0)
    rewards = resolve(config.reward, dataset.reward, plugins.rewards())
    with open_run(config, tmp_path, plugins, algorithm.roles(), rewards) as run:
        run.begin_step(1)
        metrics = algorithm.step(run, loader.next_batch())
        _, scored = run.end_step()
        groups = [role.group for role in run.roles.values()] + [run._scorer.workers]
        read = {name for group in groups for name in group.fetched}
        scored[0].view("responses")
        assert "responses" in {name for group in groups for name in group.fetched}, "a read is not counted"
        return read, metrics


@pytest.mark.timeout(400)
def test_no_token_level_column_of_ppo_reaches_the_controller(ray_cluster, tmp_path):
    read, metrics = columns_read_here(
        tmp_path, "algo=ppo", "algo.samples=4", "algo.kl_controller=adaptive", "algo.mini_batches=2"
    )
    assert {"responses", "old_log_probs", "values", "advantages", "returns", "rewards"} <= TOKEN_LEVEL
    assert not read & (TOKEN_LEVEL | {"ppo_kl", "ppo_advantages"})
    assert metrics["train/optimizer_steps"] == 2
