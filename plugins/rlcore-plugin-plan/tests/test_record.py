"""What is recorded of real algorithms, installed ones and a stranger's."""

import random
from dataclasses import replace

import pytest
import torch
from rlcore_plugin_plan.dataflow import Call, Dataflow
from rlcore_plugin_plan.record import record

from rlcore.config import compose
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager


@pytest.fixture(scope="module")
def plugins():
    return PluginManager.load()


def stages(flow):
    return [sorted(str(call) for call in stage) for stage in flow.stages]


def test_ppo_has_the_papers_three_stages(plugins):
    flow = record(compose(["algo=ppo", "algo.kl_coef=0.1", "model.dtype=bf16"], plugins), plugins)
    assert stages(flow) == [
        ["actor.generate"],
        ["actor.log_probs", "critic.values", "ref.log_probs"],
        ["actor.update", "critic.update"],
    ]
    assert flow.names == ["generation", "preparation", "training"]


def test_log_probs_that_the_rollout_gave_take_no_time(plugins):
    flow = record(compose(["algo=ppo", "algo.kl_coef=0.1"], plugins), plugins)
    assert stages(flow)[1] == ["critic.values", "ref.log_probs"]
    (served,) = [call for call in flow.calls if call.served]
    assert str(served) == "actor.log_probs"


def test_rows_mini_batches_and_epochs(plugins):
    settings = ["algo.group_size=6", "algo.epochs=3", "algo.mini_batches=2", "algo.kl_coef=0.1", "model.dtype=bf16"]
    flow = record(compose(["algo=grpo", *settings], plugins), plugins)
    calls = {str(call): call for stage in flow.stages for call in stage}
    assert (calls["actor.generate"].rows, calls["actor.generate"].prompts) == (6, 1)
    assert (calls["ref.log_probs"].rows, calls["ref.log_probs"].prompts) == (6, 1)
    assert (calls["actor.update"].prompts, calls["actor.update"].together) == (1, True)
    assert (calls["actor.update"].rows, calls["actor.update"].epochs, calls["actor.update"].mini_batches) == (6, 3, 2)


def test_arguments_for_the_models_template_are_not_for_the_tiny_one(plugins):
    given = "model.chat_template_kwargs={enable_thinking: false}"
    assert record(compose(["algo=grpo", given], plugins), plugins) == record(compose(["algo=grpo"], plugins), plugins)


def test_pairs_wait_for_the_scores_and_have_fewer_rows(plugins):
    flow = record(compose(["algo=online_dpo", "algo.group_size=4", "algo.reference=averaged"], plugins), plugins)
    assert stages(flow) == [["actor.generate"], ["ref.log_probs"], ["actor.update"], ["ref.follow"]]
    calls = {str(call): call for call in flow.calls}
    assert (calls["actor.generate"].rows, calls["ref.log_probs"].rows, calls["actor.update"].rows) == (4, 2, 2)
    scored = [number for number, call in enumerate(flow.calls) if str(call) == "reward.score"]
    assert set(scored) <= set(calls["ref.log_probs"].needs)
    assert flow.follows == {"ref": "actor"}


@pytest.mark.timeout(200)
def test_every_installed_algorithm_can_be_recorded(plugins):
    settings = {"safe_rlhf": ["algo.cost_model=elsewhere"], "on_policy_distill": ["algo.teacher=elsewhere"]}
    for name in plugins.algorithms():
        flow = record(compose([f"algo={name}", *settings.get(name, [])], plugins), plugins)
        assert any(call.method == "update" and call.rows > 0 for stage in flow.stages for call in stage), name


STRANGER = """
from rlcore import Algorithm, AlgorithmSpec, Role, hookimpl
from rlcore.ops import masked_sum, needs, objective
from dataclasses import dataclass

RLCORE_API = 1


@dataclass(frozen=True)
class Config:
    fails: bool = False


@needs("log_probs")
def loss(out, batch, config):
    return {"loss": objective(-masked_sum(out.log_probs, batch["response_mask"]), batch["response_mask"].sum())}


class Stranger(Algorithm):
    config_class = Config

    def roles(self):
        frozen = {name: Role() for name in ("first", "second", "third")}
        return {"actor": Role(trains=True, generates=True), **frozen}

    def step(self, run, prompts):
        batch = run.actor.generate(prompts.repeat(2))
        first = run.first.log_probs(batch, name="stranger_first")
        second = run.second.log_probs(batch[:4], name="stranger_second")
        if self.config.fails:
            raise ValueError("something of its own")
        chosen = second.union(batch[:4])[[0, 2]]
        third = run.third.log_probs(chosen, name="stranger_third")
        first["stranger_first"]  # read here, so the update waits
        return run.actor.update(batch, loss=loss)


@hookimpl
def rlcore_algorithm():
    return AlgorithmSpec("stranger", Stranger)
"""


@pytest.fixture
def stranger(tmp_path):
    file = tmp_path / "stranger.py"
    file.write_text(STRANGER)
    return PluginManager.load([str(file)])


def test_a_strangers_plugin_is_recorded_without_a_line_of_its_own(stranger):
    flow = record(compose(["algo=stranger"], stranger), stranger)
    calls = {str(call): call for call in flow.calls}
    numbers = {str(call): number for number, call in enumerate(flow.calls)}
    assert calls["first.log_probs"].rows == 2
    assert (calls["second.log_probs"].rows, calls["third.log_probs"].rows) == (1, 0.5)
    # Through a union and a choice of rows, a column is still that of its call.
    assert calls["third.log_probs"].needs == (numbers["actor.generate"],)
    # The update reads what `generate` made, and was called after `first` had been read.
    assert set(calls["actor.update"].needs) == {numbers["actor.generate"], numbers["first.log_probs"]}


def test_a_step_that_fails_says_so_and_leaves_random_numbers_alone(stranger):
    before = random.getstate(), torch.get_rng_state()
    with pytest.raises(ConfigError, match=r"algo=stranger cannot be recorded .* ValueError: something of its own"):
        record(compose(["algo=stranger", "algo.fails=true"], stranger), stranger)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_stages_are_the_longest_chains_of_working_calls():
    first, beside = Call("a", "generate", 1), Call("reward", "score", 1, needs=(0,), works=False)
    second = Call("b", "values", 1, needs=(1,))
    last = Call("a", "update", 1, needs=(0, 2))
    flow = Dataflow((first, beside, second, replace(first, role="c"), last))
    assert [[call.role for call in stage] for stage in flow.stages] == [["a", "c"], ["b"], ["a"]]
