"""A config to YAML and back, and whether two configs are one run."""

import shlex
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.cli import main
from rlcore.config import Config, EngineConfig, RolloutConfig, RunConfig, compose, from_yaml, same_run, to_yaml
from rlcore.config.environment import EnvConfig
from rlcore.config.files import read_values, run_dir_word
from rlcore.config.schema import SECTIONS
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager

text = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "1e-6",
        "1e5",
        "null",
        "true",
        "~",
        "???!",
        "${a.b}",
        "1_000",
        "0x1f",
        "on",
        "2024-01-01",
        " lead",
        "a: b",
        "-",
        "é",
        "\x85",
        "\u2028 ",
        "\u2029",
    ]
)
positive = st.floats(min_value=0.0, allow_infinity=True, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(lr=positive, eps=positive, stop=st.lists(text, max_size=3), name=st.none() | text, directory=text)
def test_yaml_round_trip(plugins, lr, eps, stop, name, directory):
    config = Config(
        algorithm="",
        algo=None,
        engine=EngineConfig(lr=lr, eps=eps),
        rollout=RolloutConfig(stop=stop),
        run=RunConfig(dir=directory, name=name),
        sections={"env": EnvConfig()},
    )
    assert from_yaml(to_yaml(config), plugins) == config


def test_round_trip_with_an_algorithm(make, plugins):
    config = make("algo.mode=loud", "reward.functions={exact: 0.5}")
    assert from_yaml(to_yaml(config), plugins) == config


def test_numbers_as_people_write_them(config, plugins):
    written = to_yaml(config).replace("lr: 1.0e-06", "lr: 1e-5").replace("eps: 1.0e-08", "eps: 2E-7")
    read = from_yaml(written, plugins)
    assert (read.engine.lr, read.engine.eps) == (1e-5, 2e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("algorithm: echo", "algorithm: ecko"), r"algorithm 'ecko' is not installed. Did you mean 'echo'\?"),
        (("  target: you\n", ""), "algo.target must be given"),
        (("batch_size: 16", "batch_sise: 16"), "unknown key 'data.batch_sise'. Did you mean 'data.batch_size'"),
        (("algorithm: echo", "algorithm: [echo"), "not valid YAML"),
    ],
)
def test_wrong_files(change, message, config, plugins):
    written = to_yaml(config)
    assert change[0] in written
    with pytest.raises(ConfigError, match=message):
        from_yaml(written.replace(*change), plugins)


def test_not_a_mapping(plugins):
    with pytest.raises(ConfigError, match="must hold a mapping of keys to values, not list"):
        from_yaml("- a\n- b\n", plugins)


def test_saved_values_come_without_the_run_folder(make, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(make("run.dir=runs/x", "run.name=y")))
    values = read_values(tmp_path / "config.yaml")
    assert "run" not in values
    assert values["algo"] == {"target": "you", "group_size": 4, "mode": "quiet"}
    with pytest.raises(ConfigError, match=r"none.yaml' cannot be read: No such file"):
        read_values(tmp_path / "none.yaml")


def test_same_run(config, make):
    assert same_run(config, replace(config)) == []
    incidental = make(
        "run.dir=d",
        "run.name=n",
        "tracker=none",
        "cluster.address=a:1",
        "cluster.start_timeout=9",
        "trainer.keep_checkpoints=9",
        "trainer.on_nonfinite=skip",
        "cluster.workers=1",
        "engine.tp=2",
        "engine.micro_batch_rows=2",
        "engine.micro_batch_tokens=4096",
    )
    assert same_run(config, incidental) == []
    changed = make("trainer.seed=1", "algo.group_size=5", "reward.functions={exact: 1}", "rollout.stop=[x]")
    assert same_run(config, changed) == [
        "algo.group_size",
        "reward.functions",
        "rollout.stop",
        "trainer.seed",
        "reward.functions.exact",
    ]
    assert same_run(config, replace(config, algorithm="other")) == ["algorithm"]


NAMES = [
    "runs/a-1.b",
    "a,b",
    "a'b",
    'a"b',
    "a(b)",
    "a=b",
    "quick start",
    "a{b}",
    "ä",
    "[x]",
    "null",
    "12",
    "a:b",
    "True",
    "1e5",
    "inf",
    "-5",
    "a\\",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_any_name_is_a_word_that_is_read_back(name):
    (word,) = shlex.split(run_dir_word(Path(name)))
    assert compose(["algo=grpo", word], PluginManager.load()).run.dir == name


def test_the_keys_that_a_resume_may_change_are_those_that_same_run_does_not_compare(capsys):
    """Each key of the core and of the chosen engines is given another value in turn."""
    plugins = PluginManager.load()
    assert main(["config", "--resumable"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if " = " in line}
    assert {"trainer.total_steps", "trainer.epochs", "trainer.stop_at", "engine.tp", "env.timeout", "run.dir"} <= listed
    config = compose(["algo=grpo"], plugins)
    sections = {**SECTIONS, **{path: type(section) for path, section in config.sections.items()}}
    keys = [f"{path}.{field.name}" for path, cls in sections.items() for field in fields(cls)]
    assert len(keys) > 100
    for key in keys:
        differs = same_run(config, config.with_values({key: "another"})) != []
        assert differs == (key not in listed), key
