"""Roles with settings of their own: precision, engines and rollout keys, in what a plan counts."""

import math
from dataclasses import replace

import pytest
from rlcore_plugin_plan.model_size import ModelSize, size_of
from rlcore_plugin_plan.options import UNITS, Options
from rlcore_plugin_plan.overrides import values
from rlcore_plugin_plan.plans import problem_of
from rlcore_plugin_plan.problem import Devices, OwnSettings
from rlcore_plugin_plan.profile import load
from rlcore_plugin_plan.search import search

from rlcore import RolloutCapabilities, TrainCapabilities
from rlcore.config import compose
from rlcore.engine import Layout
from rlcore.plugins import PluginManager

TINY = size_of("tiny")
ROUND = replace(
    load("h100"),
    **{"flops_fp32": 1e11, "flops_bf16": 2e11, "forward": 1.0, "bandwidth": 1e30},
    **{"layer_seconds": 0.0, "call_seconds": 0.0},
)


@pytest.fixture(scope="module")
def plugins():
    return PluginManager.load()


@pytest.fixture(scope="module")
def planned(plugins):
    """Return the problem of GRPO with a reference, on two devices of one byte a unit of memory."""
    profile = replace(load("h100"), memory=256.0 * UNITS, usable=1.0)

    def make(*overrides: str):
        config = compose(["algo=grpo", "algo.kl_coef=0.1", "plan.gpus=2", *overrides], plugins)
        return problem_of(config, plugins, (Devices(profile, 2),))

    return make


def test_a_frozen_bf16_teacher_beside_an_fp32_student(planned):
    problem = planned("roles.ref.dtype=bf16")
    assert (problem.work_of("actor").dtype_bytes, problem.work_of("ref").dtype_bytes) == (4, 2)
    assert problem.frozen == {"ref"}
    options, plain = Options(problem), Options(planned())
    assert options.unit(0) == 256
    # Two bytes a parameter in place of four, but for the embeddings, which the tiny model has once.
    (teacher,), (exact,) = options.of_role("ref", 0, 1, False), plain.of_role("ref", 0, 1, False)
    assert exact.resident == math.ceil(4 * TINY.parameters / 256)
    assert teacher.resident == math.ceil((2 * TINY.layers * TINY.layer + 4 * TINY.embeddings) / 256)
    (student,), (same,) = options.of_role("actor", 0, 1, False), plain.of_role("actor", 0, 1, False)
    assert student == same
    assert (student.resident, student.generating) == (math.ceil(16 * TINY.parameters / 256), 0)


def test_a_bf16_teachers_forward_takes_half_the_time(planned):
    # Products decide: 1e11 a second in fp32, 2e11 in bf16. 16 rows of 60 + 40 tokens, which see 50 others each, take
    # 2e6 + 4 * 10 * 50 operations a token and layer, and the head 2 * 10 * 100 on 16 * 40 of them.
    rows = ["algo.group_size=2", "data.batch_size=8", "data.prompt_len=60", "rollout.response_len=40"]
    operations = 1600 * 4 * (2e6 + 2000) + 640 * 2000
    seconds = {}
    for dtype in ("fp32", "bf16"):
        problem = planned(*rows, f"roles.ref.dtype={dtype}", "engine.torch.padding_free=false")
        sizes = dict.fromkeys(problem.sizes, ModelSize(4, 10, 10**6, 1, 1, 10, 100, tied=True))
        options = Options(replace(problem, sizes=sizes, devices=(Devices(ROUND, 1),)))
        seconds[dtype] = sum(options.of_role("ref", 0, 1, False)[0].stages)
    assert seconds == pytest.approx({"fp32": operations / 1e11, "bf16": operations / 2e11})


def test_the_whole_run_in_bf16_keeps_an_fp32_teacher(planned):
    problem = planned("model.dtype=bf16", "roles.ref.dtype=fp32")
    (teacher,) = Options(problem).of_role("ref", 0, 1, False)
    assert teacher.resident == math.ceil(4 * TINY.parameters / 256)
    # A change of the run's precision, as the message of a shortage suggests one, leaves the role's alone.
    changed = replace(problem, work=replace(problem.work, dtype_bytes=4, offload=True))
    assert changed.work_of("ref") == changed.work
    changed = replace(problem, work=replace(problem.work, micro_batch_rows=3))
    assert (changed.work_of("ref").dtype_bytes, changed.work_of("ref").micro_batch_rows) == (4, 3)


def test_rollout_keys_of_the_role_that_samples(planned):
    problem = planned("roles.actor.rollout={response_len: 32}", "rollout.response_len=8", "data.prompt_len=16")
    for role in ("actor", "ref"):  # both read the rows that the actor samples
        assert problem.work_of(role).lengths.row == 16 + 32
    other = planned("roles.ref.rollout={response_len: 32}", "rollout.response_len=8", "data.prompt_len=16")
    assert other.work_of("ref").lengths.row == other.work_of("actor").lengths.row == 16 + 8


def test_tensor_shards_of_one_roles_sampling(planned, plugins):
    problem = planned("roles.actor.rollout={tp: 2}", "engine.tp=2")
    problem = replace(problem, devices=(Devices(load("h100"), 2),))
    assert problem.fixed.generation_tp == {"actor": 2}
    best = search(problem)[0]
    (part,) = [part for pool in best.pools for part in pool.parts if part.role == "actor"]
    assert part.generation.tp == 2
    assert "rollout.tp" not in values(best, compose(["algo=grpo"], plugins))
    ahead = planned("roles.actor.rollout={tp: 2}", "trainer.rollouts_ahead=1")
    assert ahead.fixed.generation_tp == {"actor": 2, "rollout": 2}


def test_a_roles_own_engine_is_asked_what_it_can_do(planned):
    problem = planned()
    single = OwnSettings("mini", TrainCapabilities(), RolloutCapabilities())
    options = Options(replace(problem, own={"ref": single}))
    assert options.of_role("ref", 0, 2, False) == ()  # it has one worker
    assert {part.layout for part in options.of_role("actor", 0, 2, False)} >= {Layout(tp=2), Layout(dp=2)}
    # A role that follows takes the weights place by place, so its engine is its leader's where they share processes.
    wide = replace(problem, leaders={"ref": "actor"}, devices=(Devices(load("h100"), 2),))
    assert Options(wide).of_pool(("actor", "ref"), 0, 1)
    assert not Options(replace(wide, own={"ref": single})).of_pool(("actor", "ref"), 0, 1)


def test_the_settings_of_an_engine_are_read_from_its_own_section(plugins):
    """hf shares the trained module and gives each row room for the longest; vLLM has a copy and a pool."""
    profile = Devices(load("h100"), 2)
    hf, vllm = (
        problem_of(compose(["algo=grpo", "plan.gpus=2", f"rollout={name}"], plugins), plugins, (profile,))
        for name in ("hf", "vllm")
    )
    assert (hf.work.continuous, hf.work.shares_module, hf.work.pooled_cache) == (True, True, False)
    assert (vllm.work.continuous, vllm.work.shares_module, vllm.work.pooled_cache) == (True, False, True)
