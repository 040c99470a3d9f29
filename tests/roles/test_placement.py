"""Pools: what `cluster.pools` means, what it cannot mean, and that a step gives the same numbers whatever it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlcore.cli import main
from rlcore.config import compose
from rlcore.errors import ConfigError
from rlcore.plugins import CRITIC, PluginManager, Role
from rlcore.roles.placement import plan_pools, restrict_to_roles
from rlcore.roles.pools import PoolPlan

ROLES = {
    "actor": Role(trains=True, generates=True),
    "ref": Role(),
    "critic": Role(trains=True, kind=CRITIC),
}
REWARD = PoolPlan("reward", ("reward",), 3)


@pytest.fixture(scope="module")
def config():
    composed = compose(["algo=grpo", "cluster.workers=2", "cluster.cpus_per_worker=4"], PluginManager.load())
    return replace(composed, reward=replace(composed.reward, workers=3))


def with_pools(config, pools, **cluster):
    return replace(config, cluster=replace(config.cluster, pools=pools, **cluster))


def test_without_pools_all_models_share_processes_and_the_reward_functions_have_their_own(config):
    assert plan_pools(config, ROLES) == [PoolPlan("main", ("actor", "ref", "critic"), 2, 4), REWARD]
    assert plan_pools(config, ROLES)[0].process_sets == [("actor", "ref", "critic")]
    apart = plan_pools(with_pools(config, {}, colocate="fractional"), ROLES)
    assert apart[0].process_sets == [("actor",), ("ref",), ("critic",)]


def test_a_pool_takes_from_the_cluster_what_it_does_not_say(config):
    side = {"roles": ["critic", "rollout"], "workers": 1, "gpus_per_worker": 0.5, "node": "west"}
    plans = plan_pools(with_pools(config, {"main": ["actor", "ref"], "side": side}, colocate="fractional"), ROLES)
    assert plans == [
        PoolPlan("main", ("actor", "ref"), 2, 4, colocate="fractional"),
        PoolPlan("side", ("critic", "rollout"), 1, 4, 0.5, "west", "fractional"),
        REWARD,
    ]


def test_reward_functions_may_have_places_of_models_or_a_pool_that_is_spelled_out(config):
    (shared,) = plan_pools(with_pools(config, {"all": ["actor", "ref", "critic", "reward"]}), ROLES)
    assert shared.process_sets == [("actor", "ref", "critic")]
    own = {"all": ["actor", "ref", "critic"], "scores": {"roles": ["reward"], "node": "west"}}
    assert plan_pools(with_pools(config, own), ROLES)[1] == PoolPlan("scores", ("reward",), 3, 1, node="west")


def test_who_runs_some_of_the_roles_keeps_their_pools(config):
    pools = {"main": {"roles": ["actor", "ref"], "node": "west"}, "side": ["critic"], "more": ["rollout"]}
    ahead = replace(with_pools(config, pools), trainer=replace(config.trainer, rollouts_ahead=1))
    plan_pools(ahead, ROLES)
    some = restrict_to_roles(ahead, {"actor": Role(generates=True)})
    assert some.cluster.pools == {"main": {"roles": ["actor"], "node": "west"}}
    assert plan_pools(some, {"actor": Role(generates=True)}) == [
        PoolPlan("main", ("actor",), 2, 4, node="west"),
        REWARD,
    ]


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ({"main": "actor"}, r"cluster.pools.main = 'actor' must be a list of roles, as \[actor, ref\], or a mapping"),
        ({"main": None}, "cluster.pools.main = None must be a list"),
        ({"main": ["actor", 3]}, r"cluster.pools.main.roles\[1\] = 3 has the wrong type: it is int and must be str"),
        ({"main": {"workers": 1}}, "cluster.pools.main.roles must be given"),
        ({"main": {"roles": ["actor"], "worker": 1}}, "unknown key 'cluster.pools.main.worker'. Did you mean 'cluster"),
        ({"main": {"roles": ["actor"], "workers": 0}}, "cluster.pools.main.workers = 0 is out of bounds"),
        ({"main": {"roles": ["actor"], "workers": "two"}}, "cluster.pools.main.workers = 'two' has the wrong type"),
        ({"main": {"roles": ["actor"], "colocate": "fuse"}}, "main.colocate = 'fuse' is not one of .*mean 'fused'"),
        ({"main": {"roles": ["actor"], "gpus_per_worker": 1.5}}, "pools.main: gpus_per_worker = 1.5 must be a whole"),
        ({"main": []}, "cluster.pools.main lists no role; list one, or leave the pool out"),
        ({"main": ["actor", "ref"]}, "cluster.pools lacks critic; add each to one of the pools main, "),
        (
            {"main": ["actor", "ref", "crtic"]},
            "main lists 'crtic', but this run has no such role. Did you mean 'cri",
        ),
        ({"main": ["actor", "ref"], "side": ["critic", "ref"]}, "'ref' is in pools main and side; list it once"),
        ({"main": ["actor", "ref", "critic", "ref"]}, "'ref' is in pool main twice"),
        ({"a": ["actor", "ref", "critic", "reward"], "b": ["reward"]}, "'reward' is in pools a and b"),
        (
            {"main": ["actor", "ref", "critic", "rollout"]},
            "main lists rollout together with actor, which samples there",
        ),
        (
            {"main": {"roles": ["actor", "ref", "critic"], "gpus_per_worker": 2, "colocate": "fractional"}},
            "main: actor, ref, critic are separate processes and cannot share places of 2 GPUs; set gpus_per_worker",
        ),
    ],
)
def test_pools_that_cannot_be(config, pools, message):
    with pytest.raises(ConfigError, match=message):
        plan_pools(with_pools(config, pools), ROLES)


def test_the_command_config_checks_pools(capsys):
    assert main(["config", "algo=grpo", "cluster.pools={main: [actr]}"]) == 2
    assert "lists 'actr', but this run has no such role. Did you mean 'actor'?" in capsys.readouterr().err


def test_rollouts_need_a_role_to_copy_and_ahead_a_pool_of_their_own(config):
    roles = {"one": Role(trains=True, generates=True), "two": Role(trains=True, generates=True), "ref": Role()}
    pools = {"main": [*roles], "side": ["rollout"]}
    with pytest.raises(ConfigError, match=r"exactly one role must do both.*these do: one, two"):
        plan_pools(with_pools(config, pools), roles)
    with pytest.raises(ConfigError, match=r"these do: none; leave rollout out"):
        plan_pools(with_pools(config, {"main": ["ref"], "side": ["rollout"]}), {"ref": Role(generates=True)})
    ahead = replace(config, trainer=replace(config.trainer, rollouts_ahead=1))
    with pytest.raises(ConfigError, match=r"add one, as cluster.pools=\{main: \[actor, ref, critic\], side: \[rollout"):
        plan_pools(ahead, ROLES)


def test_in_process_a_pool_of_models_has_one_worker(config):
    here = with_pools(config, {"main": [*ROLES]}, executor="in_process", workers=1)
    assert plan_pools(here, ROLES)[0].workers == 1
    with pytest.raises(ConfigError, match=r"pools.main: workers = 2, but cluster.executor = in_process"):
        plan_pools(with_pools(here, {"main": {"roles": [*ROLES], "workers": 2}}), ROLES)
