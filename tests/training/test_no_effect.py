"""A key that was set and is not read by this run is named at its start. About 2 s."""

import pytest

from rlcore.config import compose
from rlcore.config.files import from_yaml, to_yaml
from rlcore.plugins import PluginManager
from rlcore.training.no_effect import no_effect_lines
from rlcore.training.preflight import Preflight

EXTRA = """
from dataclasses import dataclass

from rlcore import ConfigSpec, hookimpl, option

RLCORE_API = 1

@dataclass(frozen=True)
class Extra:
    on: bool = option(False, "does something")
    depth: int = option(3, "how much of it", needs="extra.on")
    width: int = option(3, "how much of another", needs="not_installed.on or extra.depth=7")

@hookimpl
def rlcore_configs():
    return ConfigSpec("extra", Extra)
"""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    file = tmp_path_factory.mktemp("plugin") / "extra.py"
    file.write_text(EXTRA)
    return PluginManager.load([str(file)])


@pytest.fixture
def lines(plugins):
    def of(*overrides):
        config = compose(["algo=grpo", "cluster=in_process", *overrides], plugins)
        return no_effect_lines(config, Preflight(config, plugins, "train").roles)

    return of


def test_the_defaults_and_what_is_read_are_not_named(lines):
    read = ["trainer.importance=token", "trainer.importance_cap=3", "model.lora={rank: 4, dropout: 0.1}"]
    assert lines() == []
    assert lines(*read, "rollout.hf.batch_size=8", "engine.schedule=cosine", "engine.min_lr_ratio=0.1") == []
    assert (
        lines("algo.kl_coef=0.1", "roles.ref.rollout={temperature: 0.5}", "extra={on: true, depth: 7, width: 4}") == []
    )


@pytest.mark.parametrize(
    ("override", "others", "needs"),
    [
        ("trainer.importance_cap=3.0", [], "it needs trainer.importance=token|sequence"),
        ("trainer.importance_cap=3.0", ["trainer.importance=mask"], "it needs trainer.importance=token|sequence"),
        ("trainer.importance_band=[0.2, 5.0]", [], "it needs trainer.importance=mask|sequence_mask"),
        ("reward.model_weight=0.5", [], "it needs reward.model"),
        ("trainer.eval_samples=4", ["trainer.eval_every=0"], "it needs trainer.eval_every"),
        ("data.eval_size=8", ["trainer.eval_every=0"], "it needs trainer.eval_every"),
        ("model.lora.alpha=8.0", [], "it needs model.lora.rank or model.lora.path"),
        ('model.lora.targets=["q_proj"]', [], "it needs model.lora.rank or model.lora.path"),
        ("engine.min_lr_ratio=0.1", [], "it needs engine.schedule=linear|cosine"),
        ("roles.ref.lr=0.001", ["algo.kl_coef=0.1"], "role 'ref' does not train"),
        ("extra.depth=4", [], "it needs extra.on"),  # a plugin's section
        ("extra.width=4", [], "it needs not_installed.on or extra.depth=7"),
    ],
)
def test_a_key_that_is_not_read_is_named_with_what_it_needs(lines, override, others, needs):
    assert lines(override, *others) == [f"has no effect: {override} ({needs})"]


def test_a_run_with_a_rollout_pool_reads_the_cap_of_auto(lines):
    assert lines("trainer.importance_cap=3", "trainer.rollouts_ahead=1") == []


def test_an_adapter_of_one_role_reads_the_shared_keys(lines):
    assert lines("model.lora.dropout=0.1", "roles.actor.lora={rank: 4}") == []


def test_the_keys_of_an_engine_that_is_not_chosen_are_named(lines, plugins):
    """Of any engine: its section is dropped, and what was given in it is kept for the line."""
    other = next(name for name in plugins.rollout_engines() if name != "hf")
    key = f"rollout.{other}.batch_size=7"
    assert lines(key) == [f"has no effect: {key} (the run does not use rollout={other})"]
    config = compose(["algo=grpo", key], plugins)
    assert config.unused == {f"rollout.{other}.batch_size": 7}
    assert from_yaml(to_yaml(config), plugins).unused == {}


def test_the_line_is_among_the_first_of_a_run(train_small, tmp_path):
    train_small(tmp_path / "run", "trainer.total_steps=1", "trainer.eval_samples=4", "rollout.response_len=2")
    assert (
        "has no effect: trainer.eval_samples=4 (it needs trainer.eval_every)"
        in (tmp_path / "run/rlcore.log").read_text()
    )
