"""Workers of plugins in a run: started with the roles, on a pool, reached from the step, waited for at its end."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.cli import main
from rlcore.config import Config
from rlcore.errors import ConfigError, PluginError
from rlcore.plugins import Role, WorkerSpec
from rlcore.roles.placement import plan_pools
from rlcore.roles.plugin_groups import PluginGroups
from rlcore.roles.pools import PoolPlan
from rlcore.workers import Worker

PLUGIN = Path(__file__).parents[1] / "fixtures" / "plugins" / "memory.py"
ROLES = {"actor": Role(trains=True, generates=True)}
SPECS = {"memory": WorkerSpec("memory", Worker, workers=2), "scorer": WorkerSpec("scorer", Worker, gpus_per_worker=1.0)}


def run_it(folder, *overrides):
    """Train two steps with the plugin; return the exit status and the metrics of each step."""
    command = ["train", "-p", str(PLUGIN), "algo=memory", "tracker=none", "trainer.eval_every=0", f"run.dir={folder}"]
    command += [
        "trainer.total_steps=2",
        "data.max_rows=128",
        "data.batch_size=4",
        "rollout.response_len=4",
        "trainer.trace=true",
    ]
    status = main([*command, *(overrides or ["cluster=in_process"])])
    path = folder / "metrics.jsonl"
    return status, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def spans_of(folder):
    # The trace format allows a missing closing bracket, and the writer leaves it out.
    events = json.loads((folder / "timeline.json").read_text().rstrip().rstrip(",").removesuffix("]") + "]")
    return [event["name"] for event in events if event.get("ph") == "X"]


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_run_asks_the_workers_of_a_plugin(tmp_path):
    status, metrics = run_it(tmp_path)
    assert status == 0
    assert [row["memory/asked"] for row in metrics] == [4.0, 4.0]  # by the handle's end_step
    assert metrics[0]["novel"] >= 1 > 0 == metrics[0]["novel"] - round(metrics[0]["novel"])
    assert any("novelty" in name for name in spans_of(tmp_path))


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_calls_that_nobody_waits_for_end_with_their_step(tmp_path, capsys):
    status, metrics = run_it(tmp_path / "waits", "cluster=in_process", "algo.later=wait")
    assert (status, len(metrics)) == (0, 2)
    status, metrics = run_it(tmp_path / "fails", "cluster=in_process", "algo.later=fail")
    assert (status, metrics) == (1, [])
    assert "memory" in (printed := capsys.readouterr().err)
    assert "the memory is full" in printed


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.ray
def test_on_ray_a_group_has_a_process_on_each_place_of_its_pool(ray_cluster, tmp_path):
    status, metrics = run_it(tmp_path / "own", "cluster=local", "cluster.workers=1")
    assert (status, metrics[0]["world_size"]) == (0, 1.0)
    assert (tmp_path / "own" / "logs" / "memory-0.log").exists()
    pools = "cluster.pools={main: [actor], side: {roles: [reward, memory], workers: 2}}"
    status, metrics = run_it(tmp_path / "shared", "cluster=local", "cluster.workers=1", pools)
    assert (status, metrics[0]["world_size"]) == (0, 2.0)
    assert any("novelty" in name for name in spans_of(tmp_path / "shared"))


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_group_that_is_not_there(tmp_path, capsys):
    status, _ = run_it(tmp_path, "cluster=in_process", "algo.ask=memories")
    assert status == 2
    printed = capsys.readouterr().err
    assert "this run has no worker group 'memories'. Did you mean 'memory'? Its groups: memory." in printed
    assert "pip install rlcore-plugin-memories" in printed
    assert "starts no workers with this config: see its keys, `judge.*`" in missing("judge", {"judge": None})
    assert "pip install rlcore-plugin-judge" in missing("judge", {})


def missing(name, sections):
    with pytest.raises(PluginError) as caught:
        PluginGroups({}, {}, Config("", None, sections=sections)).get(name)
    return str(caught.value)


def planned(pools, specs=SPECS, **cluster):
    config = Config("", None)
    config = replace(config, cluster=replace(config.cluster, pools=pools, workers=2, **cluster))
    return plan_pools(config, ROLES, groups=specs)


def test_a_group_that_no_pool_lists_has_one_as_its_spec_says():
    assert planned({})[2:] == [
        PoolPlan("memory", (), 2, groups=("memory",)),
        PoolPlan("scorer", (), 1, gpus_per_worker=1.0, groups=("scorer",)),
    ]


def test_a_pool_that_lists_a_group():
    pools = planned({"main": ["actor", "memory"], "side": ["scorer"], "more": ["reward"]})
    assert pools == [
        PoolPlan("main", ("actor",), 2, groups=("memory",)),
        PoolPlan("side", (), 1, gpus_per_worker=1.0, groups=("scorer",)),
        PoolPlan("more", ("reward",), 1),
    ]
    assert pools[0].process_sets == [("actor",)]
    large = planned({"main": ["actor"], "side": {"roles": ["memory"], "workers": 5, "node": "west"}})
    assert large[1] == PoolPlan("side", (), 5, node="west", groups=("memory",))


@pytest.mark.parametrize(
    ("pools", "specs", "message"),
    [
        ({"main": ["actor", "scorer"]}, SPECS, "lists 'scorer' together with actor, but its workers need GPUs"),
        ({"main": ["actor", "memry"]}, SPECS, r"lists 'memry'.*Did you mean 'memory'\? .*: actor; .*, memory, scorer"),
        ({"main": ["actor", "memory"], "side": ["memory"]}, SPECS, "'memory' is in pools main and side"),
        ({}, {"actor": WorkerSpec("actor", Worker)}, "a plugin's workers are named 'actor', like a role"),
        (
            {"main": ["actor"], "side": {"roles": ["memory", "scorer"], "gpus_per_worker": 2}},
            SPECS,
            "memory, scorer are separate processes and cannot share places of 2 GPUs",
        ),
    ],
)
def test_groups_that_cannot_be_placed(pools, specs, message):
    with pytest.raises(ConfigError, match=message):
        planned(pools, specs)
