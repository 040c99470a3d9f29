"""Overrides and groups through hydra, and the messages for what cannot be composed."""

import copy
from pathlib import Path

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

from rlcore.config import compose, to_yaml
from rlcore.config.compose import GROUPS, sweep
from rlcore.config.environment import EnvConfig
from rlcore.config.reference import CORE_SECTIONS, group_options, markdown
from rlcore.config.schema import SECTIONS
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager, own_sections
from rlcore.training.preflight import preflight

ROOT = Path(__file__).parents[2]


def test_defaults_are_those_of_the_dataclasses(config):
    assert config.algorithm == "echo"
    assert type(config.algo).__name__ == "EchoConfig"
    assert (config.algo.target, config.algo.group_size) == ("you", 4)
    names = {"rollout": {"name": "hf"}, "engine": {"name": "torch"}}  # of configs/config.yaml
    for name, cls in SECTIONS.items():
        today = {"date": config.model.date} if name == "model" else {}
        assert getattr(config, name) == cls(**names.get(name, {}), **today)
    assert config.sections == {"env": EnvConfig()}  # the stand-ins bring no keys


def test_values_of_all_kinds(make):
    config = make(
        "model.path=../dir/with-dash_1.5",
        "model.dtype=bf16",
        "data.system_prompt='Hello, you {there}'",
        "data.shuffle=false",
        "rollout.stop=['\\n\\n', '<end>']",
        "engine.lr=3e-4",
        "engine.betas=[0.9,0.95]",
        r"reward.functions={exact: 1, dir/my.py\:score: 0.5}",
        "trainer.total_steps=7",
        "data.path=null",
    )
    assert config.model.path == "../dir/with-dash_1.5"
    assert config.model.dtype == "bf16"
    assert config.data.system_prompt == "Hello, you {there}"
    assert config.data.shuffle is False
    assert config.rollout.stop == ["\\n\\n", "<end>"]
    assert config.engine.lr == 3e-4
    assert config.engine.betas == [0.9, 0.95]
    assert config.reward.functions == {"exact": 1.0, "dir/my.py:score": 0.5}
    assert config.trainer.total_steps == 7
    assert config.data.path is None


def test_interpolation_and_dict_entries(make):
    config = make("trainer.seed=${trainer.total_steps}", "reward.functions.exact=2", "++algo.mode=loud", "~data.name")
    assert config.trainer.seed == 100
    assert config.reward.functions == {"exact": 2.0}
    assert config.algo.mode == "loud"
    assert config.data.name == "arithmetic"


def test_group_options_and_installed_names(make):
    config = make("cluster=in_process", "tracker=smoke_signals", "data=riddles", "data.path=DIR", "reward=exact")
    assert (config.cluster.executor, config.cluster.workers) == ("in_process", 1)
    assert config.tracker.use == ["smoke_signals"]
    assert (config.data.name, config.data.path) == ("riddles", "DIR")
    assert config.reward.functions == {"exact": 1.0}


def test_value_overrides_win_over_group_options_wherever_they_stand(make):
    assert make("cluster.workers=3", "cluster=local").cluster.workers == 3


def test_python_values_are_those_of_overrides(make, plugins):
    overrides = ["data=file", "trainer.total_steps=7", "engine.lr=1e-5", "rollout.stop=[a,b]", "trainer.best=null"]
    overrides += ["data.shuffle=false", "reward.functions={exact: 2}", "reward=exact", "data.path=some/file.jsonl"]
    values = {"trainer.total_steps": 7, "engine": {"lr": 1e-5}, "rollout.stop": ("a", "b"), "trainer.best": None}
    values |= {"data.shuffle": False, "reward.functions": {"exact": 2}, "reward": "exact"}
    given = {"algo": "echo", "algo.target": "you", "data": "file", "data.path": Path("some/file.jsonl"), **values}
    assert compose([], plugins, values=given) == make(*overrides)


def test_texts_of_python_are_read_as_they_are(plugins):
    texts = ["${trainer.seed}", "null", "1e-5", "true", "[a]", 'it\'s "so", {a: b}=\\']
    values = {"algo": "echo", "algo.target": "you", "rollout.stop": texts, "data.system_prompt": texts[0]}
    config = compose([], plugins, values=values)
    assert (config.rollout.stop, config.data.system_prompt) == (texts, texts[0])


def test_own_config_dir(make, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "riddles.yaml").write_text("name: riddles\nprompt_key: riddle\n")  # an installed name too
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /cluster: in_process\ntrainer: {total_steps: 3}\n"
    )
    config = make("experiment=mine", "data=riddles", f"hydra.searchpath=['file://{tmp_path}']")
    assert (config.trainer.total_steps, config.cluster.executor) == (3, "in_process")
    assert (config.data.name, config.data.prompt_key) == ("riddles", "riddle")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algo=ecko"], r"algo=ecko is unknown. Did you mean 'echo'\? Available: echo. Install its plugin, or .* -p"),
        (["data=ridles"], r"data=ridles is unknown. Did you mean 'riddles'\? Available: arithmetic, file"),
        (["cluster=locla"], r"cluster=locla is unknown. Did you mean 'local'\?"),
        (["experiment=quickstrat"], r"experiment=quickstrat is unknown. Did you mean 'quickstart'\?"),
        (["dat.path=x"], r"unknown key 'dat'. Did you mean 'data'\?"),
        (["dta=gsm8k"], r"unknown key 'dta'. Did you mean 'data'\?"),
        (["data.pth=x"], r"unknown key 'data.pth'. Did you mean 'data.path'\?"),
        (["+data.pth=x"], r"unknown key 'data.pth'. Did you mean 'data.path'\?"),
        (
            ["algo.group_sise=2"],
            r"unknown key 'algo.group_sise'. Did you mean 'algo.group_size'\? .*target, group_size",
        ),
        (["algo.group_size=65"], r"algo.group_size = 65 is out of bounds: it must be at least 2 and at most 64"),
        (["algo.mode=lod"], r"algo.mode = 'lod' is not one of loud, quiet. Did you mean 'loud'\?"),
        (["trainer.total_steps=many"], r"trainer.total_steps = 'many' has the wrong type: it is text and must be int"),
        (["data.path"], r"cannot read 'data.path'.* Write KEY=VALUE"),
        (["data.path=[1,"], r"cannot read 'data.path=\[1,'.* Write KEY=VALUE"),
        (["--what=1"], r"cannot read '--what=1'"),
        (["data.path=a,b"], r"'data.path=a,b' gives several values: add --multirun .* write data.path=\[a,b\]"),
        (["engine.lr=range(1,3)"], r"gives several values: add --multirun"),
        (["algorithm=other"], r"'algorithm=other': choose the algorithm with algo=NAME"),
        (["data.path.x=1"], r"data.path = {'x': 1} has the wrong type"),
        (["trainer.seed=${nowhere.to}"], r"cannot be composed: .*nowhere.to"),
        (["algo.target=???"], r"algo.target must be given \(str: what to say\): algo.target=VALUE"),
    ],
)
def test_wrong_overrides(overrides, message, make):
    with pytest.raises(ConfigError, match=message):
        make(*overrides)


def test_required_key_of_the_algorithm(plugins):
    with pytest.raises(ConfigError, match=r"algo.target must be given"):
        compose(["algo=echo"], plugins)


def test_no_algorithm(plugins):
    config = compose([], plugins)
    assert (config.algorithm, config.algo) == ("", None)
    preflight(config, plugins, "evaluate")
    with pytest.raises(ConfigError, match="no algorithm is chosen: add algo=NAME, one of echo"):
        preflight(config, plugins)
    with pytest.raises(ConfigError, match=r"algo.group_size needs an algorithm"):
        compose(["algo.group_size=3"], plugins)


def test_a_composition_leaves_nothing_in_hydra(make):
    make()  # loads hydra's own nodes
    before = copy.deepcopy(ConfigStore.instance().repo)
    make()
    with pytest.raises(ConfigError):
        make("data=none")
    assert ConfigStore.instance().repo == before
    assert "algo" not in before
    assert not GlobalHydra.instance().is_initialized()


def test_sweep_is_hydras():
    assert sweep(["algo=echo", "engine.lr=1e-3,1e-4", "trainer.seed=range(0,2)", "rollout.stop=[a,b]"]) == [
        ["algo=echo", f"engine.lr={lr}", f"trainer.seed={seed}", "rollout.stop=[a,b]"]
        for lr in ("0.001", "0.0001")
        for seed in (0, 1)
    ]


def test_sweep_with_another_sweeper():
    with pytest.raises(ConfigError, match="hydra's basic sweeper and launcher only"):
        sweep(["hydra/sweeper=optuna"])


def test_repeat_of_a_saved_config(make, plugins):
    first = make("data=riddles", "data.path=DIR", "trainer.seed=5", r"rollout.stop=['\${x}']", "algo.mode=loud")
    assert first.rollout.stop == ["${x}"]
    base = yaml.safe_load(to_yaml(first))
    assert compose([], plugins, base=base) == first
    changed = compose(["trainer.seed=6", "data=arithmetic", "algo.group_size=8"], plugins, base=base)
    assert (changed.trainer.seed, changed.data.name, changed.data.path) == (6, "arithmetic", "DIR")
    assert (changed.algo.group_size, changed.algo.mode) == (8, "loud")


def test_repeat_with_another_algorithm(config, plugins):
    base = yaml.safe_load(to_yaml(config))
    assert compose(["algo=echo"], plugins, base=base) == config
    with pytest.raises(ConfigError, match="algo=other, which cannot be changed to echo"):
        compose(["algo=echo"], plugins, base={**base, "algorithm": "other"})


def test_reference_page_is_current():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == markdown(own_sections()), (
        "run: python -m rlcore.plugins.reference configuration > docs/configuration.md"
    )


def test_every_shipped_yaml_is_an_option():
    shipped = {(path.parent.name, path.stem) for path in (ROOT / "configs").glob("*/*.yaml")}
    assert shipped == {(group, name) for group, names in group_options().items() for name in names}
    assert {group for group, _ in shipped} <= set(GROUPS)


@pytest.fixture(scope="module")
def own() -> PluginManager:
    return PluginManager.load()


@pytest.mark.parametrize("choice", [f"{group}={name}" for group, names in group_options().items() for name in names])
def test_every_shipped_config_composes_and_is_sound(choice, own):
    overrides = [choice] if choice.startswith("experiment=") else ["algo=grpo", choice]
    preflight(compose(overrides, own), own)


def test_core_keys_stay_few():
    count = sum(len(cls.__dataclass_fields__) for cls in CORE_SECTIONS.values())
    # 80 and trainer.deterministic; two of decision 0041; reward.max_failures, reward.special_tokens and data.rendered.
    # model.date: prompts that a run can be resumed with.
    # Four of decision 0047: which rows of a data set.
    # chat_template_kwargs, of the model and of a role: templates that think or not by an argument.
    # Three of decision 0050: the best checkpoint, and an early end.
    # Eight of decision 0052: named evaluations, and the share that is held out.
    # Four of decision 0054: a mix of data sets.
    # Seven of decision 0056: model.lora with five keys, and roles.NAME.lora.
    # Four of decision 0060: a curriculum.
    # One of decision 0057: trainer.epochs.
    # One of decision 0061: run.source.
    assert count <= 121, "about 60 core keys are meant to be enough; raise this only with a reason"


def test_wandbs_keys_are_its_trackers_own(own):
    config = compose(["algo=grpo", "tracker=wandb", "wandb.mode=offline"], own)
    assert config.section(own.configs()["wandb"].config_class).mode == "offline"
    with pytest.raises(ConfigError, match=r"the key tracker\.project is now wandb\.project: write wandb\.project=mine"):
        compose(["algo=grpo", "tracker.project=mine"], own)
