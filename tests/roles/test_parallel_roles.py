"""GRPO's calls through Ray workers under a layout, against one worker in this process."""

import sys
import time

import pytest
import torch
from rlcore_grpo import GRPOConfig, grpo_loss

from rlcore.config import ClusterConfig, Config, EngineConfig, ModelConfig, RolloutConfig
from rlcore.engine.weights.transfer import RemoteWeights
from rlcore.engine.worker import ModelWorker
from rlcore.errors import WorkerError
from rlcore.ops import needs, objective
from rlcore.plugins import Role
from rlcore.roles.handles import PolicyHandle, StepClock
from rlcore.roles.weight_exporter import WeightExporter
from rlcore.workers import ClassWithInitArgs, make_executor
from rlcore.workers.executor import ProcessRequest

pytestmark = pytest.mark.ray
ACTOR = Role(trains=True, generates=True)
LAYOUTS = {"tensor": {"tp": 2}, "pipeline": {"pp": 2}}


def config_of(folder, **engine):
    return Config(
        algorithm="grpo",
        algo=GRPOConfig(kl_coef=0.1),
        model=ModelConfig(path=str(folder)),
        rollout=RolloutConfig(response_len=8),
        engine=EngineConfig(lr=1e-3, micro_batch_rows=3, **engine),
    )


def worker_of(engine_models, config):
    return ClassWithInitArgs(
        ModelWorker,
        engine_models.role_setup(ACTOR, config.model, config.engine, config.rollout),
    )


@pytest.fixture(scope="module")
def actors(ray_cluster, engine_models, model_folder):
    """One actor in this process; and one for each layout, which share two processes."""
    configs = {"one": config_of(model_folder())}
    configs |= {name: config_of(model_folder(), **engine) for name, engine in LAYOUTS.items()}
    one = make_executor(ClusterConfig(executor="in_process", workers=1))
    two = make_executor(ClusterConfig(executor="ray", workers=2), by_value_modules=[sys.modules[__name__]])
    with one, two:
        groups = {"one": one.worker_group(one.resource_pool(), worker_of(engine_models, configs["one"]), name="one")}
        classes = {name: worker_of(engine_models, configs[name]) for name in LAYOUTS}
        groups |= two.worker_groups([ProcessRequest(two.resource_pool(), classes, "layouts")])[0]
        for group in groups.values():
            group.start().get()
        yield {
            name: PolicyHandle(name, ACTOR, group, configs[name], StepClock(step=1)) for name, group in groups.items()
        }


def steps(actor, prompts):
    """Two steps of GRPO's calls, with a reward that is made up; what came of them."""
    found = []
    for step in (1, 2):
        actor._clock.start(step)
        batch = actor.generate(prompts)
        batch = batch.union(actor.log_probs(batch, name="old_log_probs"))
        batch = batch.union(actor.log_probs(batch, name="ref_log_probs", entropy=True))
        batch["advantages"] = torch.linspace(-1, 1, len(batch))
        metrics = dict(actor.update(batch, loss=grpo_loss, mini_batches=2, keep_together="uid"))
        found.append((batch["responses"], batch["entropy"].values, batch["weights_version"].tolist(), metrics))
    return found


@pytest.fixture(scope="module")
def prompts(random_batch):
    return random_batch(5, 2).select(["prompts"], ["uid"])


@pytest.fixture(scope="module")
def of_one(actors, prompts):
    return steps(actors["one"], prompts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_steps_are_those_of_one_worker(actors, prompts, of_one, layout):
    for got, want in zip(steps(actors[layout], prompts), of_one, strict=True):
        assert got[0].equal(want[0])
        torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5)
        assert got[2] == want[2]
        # The largest gap between the engines is of rounding alone, on either side; all else is the same number.
        largest = "rollout/train_rollout_logprob_diff_max"
        assert max(got[3][largest], want[3][largest]) < 1e-5
        assert {**got[3], largest: 0.0} == pytest.approx({**want[3], largest: 0.0}, rel=1e-4, abs=1e-6)
    mesh = actors[layout].group.mesh
    assert {axis: mesh.size(axis) for axis in ("pp", "tp", "dp")} == {"pp": 1, "tp": 1, "dp": 1, **LAYOUTS[layout]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_for_another_pool_are_packed_once_and_by_all_ranks(actors, layout):
    of_one = RemoteWeights(WeightExporter(actors["one"].group, torch.float32).send())
    sent = WeightExporter(actors[layout].group, torch.float32).send()
    by_rank = [list(block.column().view()) for block in sent.table.columns["name"].blocks]
    assert len(by_rank) == 2
    assert [name for names in by_rank for name in names] == list(of_one)
    assert all(torch.allclose(RemoteWeights(sent)[name], of_one[name], atol=1e-5) for name in of_one)


@needs("log_probs")
def breaking_loss(out, batch, config):
    """Raise where it sees what a model made; counts are found from made-up outputs, which have no gradient."""
    if out.log_probs.requires_grad:
        raise ValueError("of this rank alone")
    return {"policy": objective(out.log_probs.sum(), batch["response_mask"].sum())}


def test_a_rank_that_fails_amid_a_pipeline_ends_the_call_and_is_named(actors, random_batch):
    """The loss runs on the last stage; the first one waits for a gradient that will never come."""
    started = time.monotonic()
    with pytest.raises(
        WorkerError, match=r"pipeline rank 1 of 2 \(pp=1, tp=0, dp=0, micro_dp=\d\) on .*, in update\(\)"
    ) as failed:
        actors["pipeline"].update(random_batch(4, 2), loss=breaking_loss)["train/lr"]
    assert "ValueError: of this rank alone" in str(failed.value)
    with pytest.raises(WorkerError):  # the group is broken, and says so rather than hang
        actors["pipeline"].group.version()
    assert time.monotonic() - started < 60
