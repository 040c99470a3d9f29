"""Keys that plugins bring: composed, checked, saved and compared as the core's own."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rlcore.config import compose, from_yaml, same_run, to_yaml
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager, Role, installed
from rlcore.roles.settings import own_section
from rlcore.training.preflight import preflight

FIXTURES = Path(__file__).parents[1] / "fixtures" / "plugins"
BLOCKED = [f"no:{entry.name}" for entry in installed()]
STAND_IN, SECTIONS = (str(FIXTURES / f"{name}.py") for name in ("stand_in", "sections"))


@pytest.fixture(scope="module")
def own() -> PluginManager:
    return PluginManager.load([*BLOCKED, STAND_IN, SECTIONS])


@pytest.fixture(scope="module")
def make(own):
    return lambda *overrides: compose(["algo=echo", "algo.target=you", *overrides], own)


@pytest.fixture
def classes(own):
    import sections

    return sections


def test_a_run_has_the_sections_of_its_engines_and_of_all_plugins(make, classes):
    config = make("inspector.strictness=0.25", "rollout.slow.batch_size=2", "engine.plain.chunk=3")
    assert list(config.sections) == ["env", "inspector"]
    assert config.section(classes.Inspector).strictness == 0.25
    with pytest.raises(ConfigError, match=r"no config section Slow: .* an engine that the run does not use"):
        config.section(classes.Slow)
    config = make("rollout=slow", "rollout.slow.batch_size=2", "engine=plain")
    assert list(config.sections) == ["env", "inspector", "rollout.slow", "engine.plain"]
    assert (config.section(classes.Slow).batch_size, config.section(classes.Plain).chunk) == (2, 8)
    assert config.rollout == make("rollout.name=slow").rollout


def test_values_of_sections_refer_to_others_and_are_referred_to(make, classes):
    config = make("rollout=slow", "rollout.slow.batch_size=${data.batch_size}", "trainer.seed=${engine.plain.chunk}")
    assert (config.section(classes.Slow).batch_size, config.trainer.seed) == (16, 8)


def test_a_folder_of_ones_own_may_have_options_of_a_plugins_section(make, classes, tmp_path):
    (tmp_path / "inspector").mkdir()
    (tmp_path / "inspector" / "strict.yaml").write_text("strictness: 0.75\nname: Ann\n")
    config = make("inspector=strict", "inspector.name=Bob", f"hydra.searchpath=['file://{tmp_path}']")
    assert config.section(classes.Inspector) == classes.Inspector("Bob", 0.75)
    with pytest.raises(ConfigError, match=r"inspector=strikt is unknown. Did you mean 'strict'\?"):
        make("inspector=strikt", f"hydra.searchpath=['file://{tmp_path}']")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["inspector.strictness=2"],
            "inspector.strictness = 2.0 is out of bounds: it must be at least 0 and at most 1",
        ),
        (["inspector.strict=1"], r"unknown key 'inspector.strict'. Did you mean 'inspector.strictness'\?"),
        (["inspectr.name=x"], r"unknown key 'inspectr'. Did you mean 'inspector'\?"),
        (["rollout.slow.batch_size=0"], "rollout.slow.batch_size = 0 is out of bounds"),
        (["rollout.slo.batch_size=1"], r"unknown key 'rollout.slo'. Did you mean 'rollout.slow'\?"),
        (
            ["trainer.log_prob_gap=0.1"],
            "the key trainer.log_prob_gap is now trainer.train_rollout_logprob_diff: "
            "write trainer.train_rollout_logprob_diff=0.1",
        ),
        (["engine.chunk=5"], "the key engine.chunk is now engine.plain.chunk: write engine.plain.chunk=5"),
        (["engine.dp=2"], r"there is no key engine.dp any more; the data-parallel size is cluster.workers / "),
        (
            ["trainer.importance_floor=0.4"],
            r"no key trainer.importance_floor any more; .* trainer.importance_band=\[0.5, 5",
        ),
        (["cluster.inspector=Ann"], "the key cluster.inspector is now inspector.name: write inspector.name=Ann"),
        (["sections=1"], r"unknown key 'sections'"),
        (["inspector=3"], "inspector = 3 must be a mapping"),
        (["rollout.slow=3"], "rollout.slow = 3 must be a mapping"),
    ],
)
def test_wrong_values_of_sections(make, overrides, message):
    with pytest.raises(ConfigError, match=message):
        make(*overrides)


def test_checks_of_sections_and_engines_are_asked(make, own):
    preflight(make("rollout=slow"), own)
    with pytest.raises(ConfigError, match="strictness = 1 lets no row pass"):
        preflight(make("inspector.strictness=1"), own)
    with pytest.raises(ConfigError, match=r"rollout.slow.batch_size is more than data.batch_size"):
        preflight(make("rollout=slow", "data.batch_size=2"), own)
    with pytest.raises(ConfigError, match="engine=plain cannot move its weights off the GPU"):
        preflight(make("engine=plain", "engine.offload=true"), own)


@pytest.fixture
def with_roles(own, make, monkeypatch):
    """Compose a config of an algorithm that declares roles with engines of their own."""
    engines = {"ref": Role(engine="plain"), "actor": Role(generates=True, rollout={"name": "slow"})}
    monkeypatch.setattr(own.algorithm("echo").algorithm, "roles", lambda self: engines)
    return lambda *overrides: make("cluster.workers=1", *overrides)


def test_an_engine_that_only_a_role_of_the_algorithm_names_has_its_keys(with_roles, own, classes):
    config = with_roles("engine.plain.chunk=3", "rollout.slow.batch_size=2")
    assert list(config.sections) == ["env", "inspector", "rollout.slow", "engine.plain"]
    assert (config.section(classes.Plain).chunk, config.section(classes.Slow).batch_size) == (3, 2)
    assert own_section(config, "engine.plain", classes.Plain).chunk == 3
    assert yaml.safe_load(to_yaml(config))["engine"]["plain"] == {"chunk": 3}
    assert from_yaml(to_yaml(config), own) == config
    assert compose([], own, base=yaml.safe_load(to_yaml(config))) == config
    assert same_run(config, with_roles("rollout.slow.batch_size=2")) == ["engine.plain.chunk"]
    assert [info.name for info in own.used_by(config)] == ["stand_in", "sections"]
    with pytest.raises(ConfigError, match=r"engine.plain.chunk = 0 is out of bounds"):
        with_roles("engine.plain.chunk=0")
    # Where the user chooses another engine for the role, the algorithm's has no keys in the run.
    assert "engine.plain" not in with_roles("roles.ref.engine=torch").sections


def test_an_engine_of_a_role_is_asked_for_its_own_check(with_roles, make, own, monkeypatch):
    preflight(with_roles(), own)
    seen = []
    plain = replace(own.train_engines()["plain"], check=lambda config: seen.append(config))
    monkeypatch.setitem(own.train_engines(), "plain", plain)
    config = with_roles("roles.ref.dtype=bf16")
    preflight(config, own)
    assert [(each.engine.name, each.model.dtype) for each in seen] == [("plain", "bf16")]
    for purpose in ("train", "evaluate"):
        with pytest.raises(ConfigError, match=r"role 'actor': rollout.slow.batch_size is more than data.batch_size"):
            preflight(with_roles("data.batch_size=2"), own, purpose)


def test_an_engine_of_the_users_choice_for_one_role(make, own):
    config = make("roles.actor.rollout={name: slow}", "data.batch_size=2")
    assert list(config.sections) == ["env", "inspector", "rollout.slow"]
    with pytest.raises(ConfigError, match=r"role 'actor': rollout.slow.batch_size is more than data.batch_size"):
        preflight(config, own)
    preflight(make("roles.actor.rollout={name: slow}", "data.batch_size=2", "rollout.slow.batch_size=2"), own)
    with pytest.raises(ConfigError, match=r"roles.actor.engine = 'plan' is not installed. Did you mean 'plain'"):
        preflight(make("roles.actor.engine=plan"), own)


def test_saved_and_read_back(make, own):
    config = make("rollout=slow", "rollout.slow.batch_size=2", "inspector.name=Ann")
    saved = yaml.safe_load(to_yaml(config))
    assert saved["rollout"]["slow"] == {"batch_size": 2}
    assert saved["inspector"] == {"name": "Ann", "strictness": 0.5, "log_level": "quiet"}
    assert "sections" not in saved
    assert "plain" not in saved["engine"]
    assert from_yaml(to_yaml(config), own) == config
    assert compose([], own, base=saved) == config
    assert compose(["rollout=hf"], own, base=saved).sections.keys() == {"env", "inspector"}


def test_a_section_at_its_defaults_does_not_tie_a_run_to_its_plugin(make, own):
    """Nor is the plugin among those that the run needs."""
    alone = PluginManager.load([*BLOCKED, STAND_IN])
    assert "inspector" not in yaml.safe_load(to_yaml(make()))
    assert from_yaml(to_yaml(make()), alone).trainer == make().trainer
    assert [info.name for info in own.used_by(make())] == ["stand_in"]
    assert [info.name for info in own.used_by(make("inspector.name=Ann"))] == ["stand_in", "sections"]


def test_two_runs_are_compared_by_what_is_computed(make):
    config = make("rollout=slow")
    assert same_run(config, make("rollout=slow", "inspector.log_level=loud")) == []
    changed = make("rollout=slow", "inspector.strictness=0.75", "rollout.slow.batch_size=1")
    assert same_run(config, changed) == ["inspector.strictness", "rollout.slow.batch_size"]
    assert same_run(config, make()) == ["rollout.name", "rollout.slow.batch_size"]


def test_values_by_dotted_key(make, classes):
    config = make("rollout=slow")
    assert (config.value("rollout.slow.batch_size"), config.value("trainer.seed")) == (4, 0)
    changed = config.with_values({"rollout.slow.batch_size": 3, "trainer.seed": 7, "inspector.name": "Ann"})
    assert (changed.section(classes.Slow).batch_size, changed.trainer.seed) == (3, 7)
    assert (config.section(classes.Slow).batch_size, config.trainer.seed) == (4, 0)
    for key in ("rollout.fast.batch_size", "trainer.sed", "sections.inspector", "trainer", ""):
        with pytest.raises(ConfigError, match="this run's config has no key"):
            config.value(key)
