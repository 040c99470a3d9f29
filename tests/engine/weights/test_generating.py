"""Four ranks that train under a layout and generate under another, against one rank with whole weights."""

import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.config import ClusterConfig, Config, EngineConfig, ModelConfig, RolloutConfig, compose
from rlcore.engine.parallel.layout import Layout
from rlcore.engine.weights.generation import GenerationLayout
from rlcore.engine.worker import ModelWorker
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager, Role, RolloutCapabilities
from rlcore.roles.handles import PolicyHandle, StepClock
from rlcore.roles.placement import plan_pools
from rlcore.training.preflight import preflight
from rlcore.workers import ClassWithInitArgs, make_executor

pytestmark = pytest.mark.timeout(400)  # the first test waits for the ranks

ACTOR = Role(trains=True, generates=True)
WORLD = 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, model_folder):
    """Return what each rank found."""
    result = tmp_path_factory.mktemp("generating") / "result.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folders = [str(model_folder(kind)) for kind in ("qwen2", "llama", "qwen3")]
    script = str(Path(__file__).with_name("generating.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", script, str(rank), str(WORLD), str(port), str(result), *folders],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)[-4000:]
    return json.loads(result.read_text())


def cases(ranks):
    return [case for found in ranks for case in found["cases"]]


@pytest.mark.e2e
def test_tensor_parallel_tokens_are_those_of_one_rank_after_every_update(ranks):
    for case in cases(ranks):
        for number, figures in enumerate(case["rounds"]):
            assert figures["version"] == number
            assert figures["apart"] == 0, case["layout"]
            assert figures["log_probs"] < 1e-5


@pytest.mark.e2e
def test_what_generates_is_bit_for_bit_the_fully_gathered_weights(ranks):
    assert all(figures["wrong"] == [] for case in cases(ranks) for figures in case["rounds"])


@pytest.mark.e2e
def test_checksums_of_shards_add_up_to_those_of_whole_parameters_under_every_layout(ranks):
    assert all(case["unequal"] == [] for case in cases(ranks))


@pytest.mark.e2e
def test_resharded_weights_that_differ_on_one_rank_are_named_by_its_replica(ranks):
    """By rank 0 alone where it generates alone, and by all ranks of its tensor group."""
    for number, case in enumerate(ranks[0]["cases"]):
        pp, tp, shards = case["layout"]
        refused = [rank for rank, found in enumerate(ranks) if found["cases"][number]["refusal"]]
        assert refused == (
            [0] if shards == 1 else GenerationLayout(Layout(pp, tp, 4 // pp // tp), tp=2).groups("tp")[0]
        )
        for rank in refused:
            message = ranks[rank]["cases"][number]["refusal"]
            assert "by the route Resharded: 1 of " in message
            assert "parameters differ: model.layers.1.mlp.up_proj.weight." in message


@pytest.mark.e2e
def test_a_trial_that_fails_on_one_rank_stops_all(ranks):
    """Those that passed have stood by every other test of this file: weights, tokens and received bytes."""
    tried = [case for case in cases(ranks) if case["trial"] is not None]
    assert {tuple(case["layout"]) for case in tried} >= {(2, 2, 2), (1, 2, 1)}
    for case in tried:
        assert case["trial"].startswith("engine 9 was tried with its first weights")
        assert "with a log-prob of -4.575 nats, but its log-probs are -5.575 to -5.575" in case["trial"]


@pytest.mark.e2e
def test_a_changed_shard_of_a_copy_is_seen_by_its_tensor_group(ranks):
    """Rank 1's shard; the copies are of ranks 0 and 1, and of 2 and 3."""
    differ = [found["copy"]["differ"].partition("differ: ")[2] for found in ranks]
    assert differ == ["model.layers.0.self_attn.o_proj.weight"] * 2 + [""] * 2


@pytest.mark.e2e
def test_the_engine_generates_from_the_buffer_itself(ranks):
    assert all(case["held"] == case["parameters"] for case in cases(ranks))


@pytest.mark.e2e
def test_a_worker_receives_what_table_2_says(ranks):
    """On one stage what tensor ranks do not divide is there already."""
    on_one_stage = [case for case in cases(ranks) if case["layout"][0] == 1 and case["layout"][1] > 1]
    assert on_one_stage
    for case in on_one_stage:
        _, tp, shards = case["layout"]
        assert case["received"] == case["divided"] * (tp - shards) / (shards * tp)


@pytest.mark.e2e
def test_a_copy_takes_its_shards_of_whole_weights(ranks):
    for found in ranks:
        assert found["copy"]["apart"] == 0
        assert found["copy"]["log_probs"] < 1e-5
        assert found["copy"]["version"] == 7


@pytest.mark.ray
def test_rows_go_to_generating_replicas_and_come_back_in_order(ray_cluster, engine_models, model_folder, random_batch):
    """Training 1-2-1 to generation 1-1-2-1 and 1-2-1-1: two replicas of one rank, and one of two."""
    model, batch = ModelConfig(path=str(model_folder())), random_batch(groups=5, size=3)
    prompts, found = batch.select(["prompts"], ["uid"]), []
    for workers, shards in ((1, 1), (2, 1), (2, 2)):
        config = Config(
            algorithm="",
            algo=None,
            model=model,
            engine=EngineConfig(tp=workers),
            rollout=RolloutConfig(response_len=12, tp=shards),
        )
        setup = engine_models.role_setup(ACTOR, model, config.engine, config.rollout)
        kind = "in_process" if workers == 1 else "ray"
        with make_executor(ClusterConfig(executor=kind, workers=workers)) as executor:
            group = executor.worker_group(executor.resource_pool(), ClassWithInitArgs(ModelWorker, setup))
            group.start()
            out = PolicyHandle("actor", ACTOR, group, config, StepClock(step=1)).generate(prompts)
            found.append([row.tolist() for row in out["responses"].to_list()])
            assert out["uid"].tolist() == prompts["uid"].tolist()
            assert (group.mesh.size("micro_dp"), group.mesh.size("dp")) == (workers // shards, 1)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("options", "pools", "message"),
    [
        ({"tp": 2}, {}, "pool main, actor: rollout.tp=2 does not divide engine.tp=1.*rollout.tp can be 1"),
        (
            {"tp": 3},
            {"main": ["actor"], "side": {"roles": ["rollout"], "workers": 4}},
            "pool side, rollout: rollout.tp=3 does not divide its 4 workers; it can be 1, 2, 4",
        ),
    ],
)
def test_layouts_that_cannot_be_are_refused_before_anything_starts(options, pools, message):
    config = Config(
        algorithm="", algo=None, rollout=RolloutConfig(**options), cluster=ClusterConfig(workers=4, pools=pools)
    )
    with pytest.raises(ConfigError, match=message):
        plan_pools(config, {"actor": ACTOR})


def test_other_engines_do_not_generate_tensor_parallel():
    plugins = PluginManager.load()
    spec = plugins.rollout_engines()["hf"]
    plugins.rollout_engines()["other"] = dataclasses.replace(spec, name="other", capabilities=RolloutCapabilities())
    config = compose(["algo=grpo", "rollout=other", "rollout.tp=2"], plugins)
    with pytest.raises(ConfigError, match=r"rollout=other cannot shard .* set rollout.tp=1, or choose .*: hf, vllm$"):
        preflight(config, plugins)
