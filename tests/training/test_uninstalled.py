"""A run whose plugin is gone says what to install, whichever way it is taken up again."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from rlcore.cli import main
from rlcore.config import compose
from rlcore.plugins import PluginManager
from rlcore.training.folder import open_folder

PARROT = Path(__file__).parents[1] / "fixtures" / "plugins" / "rlcore-plugin-parrot" / "rlcore_plugin_parrot.py"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run of an installed plugin that has been uninstalled since."""
    site = tmp_path / "site"
    info = site / "rlcore_plugin_parrot-0.3.1.dist-info"
    info.mkdir(parents=True)
    shutil.copy(PARROT, site)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlcore-plugin-parrot\nVersion: 0.3.1\n")
    (info / "entry_points.txt").write_text("[rlcore]\nparrot = rlcore_plugin_parrot\n")
    with monkeypatch.context() as installed:
        installed.syspath_prepend(str(site))
        _open(tmp_path / "run", PluginManager.load())
    sys.modules.pop("rlcore_plugin_parrot", None)
    return tmp_path / "run"


def _open(folder, plugins):
    config = compose(["algo=parrot", "cluster=in_process", "reward=repeats", f"run.dir={folder}"], plugins)
    open_folder(folder, config, plugins).close()


def test_versions_names_the_plugins_that_are_not_rlcores_own(run):
    (plugin,) = json.loads((run / "versions.json").read_text())["plugins"]
    assert (plugin["name"], plugin["distribution"], plugin["version"]) == ("parrot", "rlcore-plugin-parrot", "0.3.1")


@pytest.mark.parametrize(("reward", "needed"), [([], True), (["reward.path=my.py:score"], False)])
def test_the_reward_that_a_data_set_names_is_needed_too(reward, needed):
    plugins = PluginManager.load()
    used = plugins.used_by(compose(["algo=grpo", "data=arithmetic", *reward], plugins))
    assert ("reward.builtin" in [plugin.name for plugin in used]) is needed


@pytest.mark.parametrize(
    "command",
    [
        ["train", "algo=parrot", "run.dir={run}"],
        ["train", "--config", "{run}/config.yaml", "run.dir={run}"],
        ["train", "--config", "{run}/config.yaml", "run.dir=another"],
        ["eval", "{run}"],
    ],
)
def test_an_uninstalled_plugin_is_asked_for_by_its_distribution(run, capsys, command):
    assert main([word.format(run=run) for word in command]) == 2
    said = f"rlcore: the run {run} was made with the plugin 'parrot', which is no longer installed: "
    assert capsys.readouterr().err == said + "pip install rlcore-plugin-parrot==0.3.1\n"


def test_a_local_file_is_asked_for_by_its_path(tmp_path, capsys):
    file = tmp_path / "parrot.py"
    shutil.copy(PARROT, file)
    _open(tmp_path / "run", PluginManager.load([str(file)]))
    assert main(["train", "algo=parrot", f"run.dir={tmp_path / 'run'}"]) == 2
    assert f"made with the plugin 'parrot', a local file; give it again with -p {file}\n" in capsys.readouterr().err
    assert main(["train", "-p", str(file), "-p", "no:parrot", "algo=parrot", f"run.dir={tmp_path / 'run'}"]) == 2
    assert "'parrot', which -p no:parrot blocks; remove that option" in capsys.readouterr().err


def test_other_folders_need_nothing(tmp_path, capsys):
    (tmp_path / "versions.json").write_text('{"torch": "2"}')
    assert main(["train", "algo=parrot", f"run.dir={tmp_path}"]) == 2
    assert "algo=parrot is unknown" in capsys.readouterr().err
