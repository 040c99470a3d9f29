"""Combinations that cannot work are refused before anything starts."""

from dataclasses import replace
from typing import Any

import pytest

from rlcore.config import Config
from rlcore.errors import ConfigError
from rlcore.plugins import CRITIC, Role
from rlcore.roles import placement
from rlcore.training.preflight import CHECKS, preflight


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    return config.with_values(
        {f"{name}.{key}": value for name, values in sections.items() for key, value in values.items()}
    )


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {
            "cluster": {"executor": "in_process", "workers": 1},
            "tracker": {"use": []},
            "reward": {"path": "my.py:score"},
        },
        {
            "reward": {"functions": {"exact": 0.5, "dir/my.py:score": -1.0, "arithmetic": 0}},
            "cluster": {"gpus_per_worker": 0.5},
        },
    ],
)
def test_a_sound_config_passes(sections, config, plugins):
    preflight(changed(config, **sections), plugins)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (
            "data",
            {"name": "ridles"},
            r"data.name = 'ridles' is not installed. Did you mean 'riddles'\? Installed: arith",
        ),
        ("rollout", {"name": "hff"}, r"rollout.name = 'hff' is not installed. Did you mean 'hf'\?"),
        ("engine", {"name": "torhc"}, r"engine.name = 'torhc' is not installed. Did you mean 'torch'\?"),
        ("tracker", {"use": ["console", "wandbb"]}, r"tracker.use = 'wandbb' is not installed. Did you mean 'wandb'\?"),
        ("reward", {"functions": {"exakt": 1}}, r"reward.functions = 'exakt' is not installed. Did you mean 'exact'\?"),
        ("reward", {"functions": {"exact": 0}}, r"reward.functions has only weights of 0"),
        ("trainer", {"eval_samples": 4, "eval_temperature": 0}, r"eval_samples = 4 greedy responses .* are all equal"),
        ("trainer", {"rollouts_ahead": 1, "importance_cap": 0.0}, "importance_cap = 0 gives every sample the weight 0"),
        ("trainer", {"importance": "sequence", "importance_cap": 0.0}, "with trainer.importance = sequence nothing"),
        ("trainer", {"importance_band": [0.5]}, r"importance_band = \[0.5\] must be two numbers"),
        ("trainer", {"importance_band": [1.5, 5.0]}, r"importance_band = \[1.5, 5.0\] must .* Use \[0.5, 5.0\]"),
        ("trainer", {"importance_band": [0.5, 0.9]}, "with 1 between them"),
        ("reward", {"functions": {"my.txt:score": 1}}, r"'my.txt:score' must be FILE.py:FUNCTION"),
        ("reward", {"path": "my.py"}, r"reward.path = 'my.py' must be FILE.py:FUNCTION"),
        ("reward", {"path": "my.py:f", "functions": {"exact": 1}}, r"'my.py:f' is used alone.*{my.py\\:f: 1.0}"),
        ("rollout", {"response_len": 8, "min_tokens": 9}, r"min_tokens = 9 is more than rollout.response_len = 8"),
        ("rollout", {"top_p": 0}, r"top_p = 0 leaves no token"),
        ("rollout", {"stop": [""]}, r"rollout.stop holds an empty text"),
        ("engine", {"betas": [0.9]}, r"engine.betas = \[0.9\] must be two numbers"),
        ("engine", {"betas": [0.9, 1.0]}, r"engine.betas = \[0.9, 1.0\] must be two numbers"),
        ("cluster", {"executor": "in_process"}, r"cluster.workers must be 1, not 2: choose cluster=in_process"),
        ("cluster", {"executor": "in_process", "workers": 1, "address": "a:1"}, r"address needs cluster.executor=ray"),
        (
            "cluster",
            {"executor": "in_process", "workers": 1, "gpus_per_worker": 1.0},
            r"gpus_per_worker = 1, but here is no GPU \(CUDA_VISIBLE_DEVICES is empty\). Set cluster.gpus_per_worker=0",
        ),
        ("cluster", {"gpus_per_worker": 1.5}, r"gpus_per_worker = 1.5 must be a whole number or a share below 1"),
        ("rollout", {"response_len": 2}, r"algo.group_size is more than rollout.response_len"),
        ("run", {"name": "forbidden"}, r"stand_in forbids run.name = 'forbidden'"),
    ],
)
def test_impossible_combinations(section, values, message, config, plugins):
    with pytest.raises(ConfigError, match=message):
        preflight(changed(config, **{section: values}), plugins)


def test_a_reward_model_scores_beside_a_function_that_only_counts(config, plugins):
    preflight(changed(config, reward={"functions": {"exact": 0}, "model": "some/folder"}), plugins, "evaluate")


def test_an_evaluation_needs_no_algorithm(config, plugins):
    without = replace(config, algorithm="", algo=None)
    preflight(without, plugins, "evaluate")
    for purpose in ("train", "plan"):
        with pytest.raises(ConfigError, match="no algorithm is chosen: add algo=NAME, one of echo"):
            preflight(without, plugins, purpose)


def test_a_plan_asks_nothing_of_this_machine_or_of_pools(config, plugins):
    elsewhere = changed(config, cluster={"pools": {"main": ["nobody"]}, "gpus_per_worker": 1.5})
    with pytest.raises(ConfigError, match=r"gpus_per_worker = 1.5 must be"):
        preflight(elsewhere, plugins)
    assert list(preflight(elsewhere, plugins, "plan").roles) == ["actor"]


def test_a_role_of_a_kind_that_the_engine_cannot_hold_is_refused(config, plugins, monkeypatch):
    algorithm = plugins.algorithm("echo").algorithm
    monkeypatch.setattr(
        algorithm, "roles", lambda self: {"actor": Role(generates=True), "value": Role(True, kind=CRITIC)}
    )
    with pytest.raises(ConfigError, match=r"role 'value' is a critic, which engine=torch does not support"):
        preflight(config, plugins)


def test_everything_is_made_once(config, plugins, monkeypatch):
    """Algorithm, roles and pools are what the run then uses, so a check and the run cannot see different ones."""
    planned = []
    check_pools = placement.check_pools
    monkeypatch.setattr(placement, "check_pools", lambda *args: planned.append(args) or check_pools(*args))
    checked = preflight(config, plugins)
    assert checked.algorithm is checked.algorithm
    assert checked.roles is checked.roles
    assert checked.placement is checked.placement
    assert len(planned) == 1


def test_every_check_is_made_for_something():
    assert all(check.purposes for check in CHECKS)
    assert len({check.function for check in CHECKS}) == len(CHECKS)
