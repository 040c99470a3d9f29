"""`engine.layouts`: layouts of single roles, checked before anything starts."""

import pytest

from rlcore.config import compose
from rlcore.engine import Layout, engine_of, layout_of
from rlcore.errors import ConfigError
from rlcore.plugins import CRITIC, PluginManager, Role
from rlcore.roles.placement import plan_pools, restrict_to_roles

ROLES = {
    "actor": Role(trains=True, generates=True),
    "critic": Role(trains=True, kind=CRITIC),
    "ref": Role(follows="actor"),
}


@pytest.fixture(scope="module")
def checked():
    """Compose a config, check its pools, and return it."""
    plugins = PluginManager.load()

    def check(*overrides: str, roles=ROLES):
        config = compose(["algo=grpo", "cluster.workers=4", *overrides], plugins)
        plan_pools(config, roles)
        return config

    return check


def test_roles_have_their_own_and_the_others_the_common_one(checked):
    config = checked("engine.layouts={critic: [2, 2]}", "engine.tp=2")
    assert layout_of(engine_of(config.engine, "critic"), 4) == Layout(2, 2, 1)
    assert layout_of(engine_of(config.engine, "actor"), 4) == Layout(1, 2, 2)


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ("{crtic: [1, 2]}", "engine.layouts has 'crtic', but this run has no such role. Did you mean 'critic'"),
        ("{critic: [2]}", r"engine.layouts.critic = \[2\] must be \[pp, tp\], two numbers from 1"),
        ("{critic: [1, 0]}", r"engine.layouts.critic = \[1, 0\] must be \[pp, tp\], two numbers from 1"),
        ("{critic: [1, 3]}", "engine.pp=1, engine.tp=3 does not fit 4 workers"),
        ("{critic: [1, 4]}", "tp=4 does not divide its num_key_value_heads=2"),
        ("{actor: [1, 2]}", "ref follows actor and copies its weights shard by shard"),
    ],
)
def test_what_cannot_be_is_refused(checked, layouts, message):
    with pytest.raises(ConfigError, match=message):
        checked(f"engine.layouts={layouts}")


def test_a_leader_on_another_pool_may_have_another_layout(checked):
    checked("engine.layouts={actor: [1, 2]}", "cluster.pools={a: [actor, critic], b: [ref]}")


def test_an_evaluation_leaves_out_roles_that_it_has_not(checked):
    config = checked("engine.layouts={critic: [1, 2]}", "cluster.pools={a: [actor, critic], b: [ref]}")
    roles = {"actor": ROLES["actor"]}
    assert restrict_to_roles(config, roles).engine.layouts == {}
    plan_pools(restrict_to_roles(config, roles), roles)


def test_auto_is_for_train(checked):
    with pytest.raises(ConfigError, match=r"cluster\.pools=auto works in `rlcore train` only"):
        checked("cluster.pools=auto")
