"""`rlcore plugins` with broken plugins: it works, shows every fault, and its exit status tells."""

import json

import pytest

from rlcore.cli import main
from rlcore.errors import PluginError
from rlcore.plugins import PluginManager

GOOD = """
from rlcore import RewardSpec, hookimpl
RLCORE_API = 1
@hookimpl
def rlcore_rewards():
    return RewardSpec("fine", lambda **columns: 1.0)
"""
IMPORT = "import no_such_module_anywhere"
HOOKS = """
from rlcore import hookimpl
RLCORE_API = 7
@hookimpl
def rlcore_step_ends(run):
    pass
@hookimpl
def rlcore_run_start(run, stpe):
    pass
"""
TAKEN = """
from rlcore import RewardSpec, TrackerSpec, hookimpl
RLCORE_API = 1
@hookimpl
def rlcore_trackers():
    return TrackerSpec("unseen", dict)
@hookimpl
def rlcore_rewards():
    return RewardSpec("fine", lambda **columns: 0.0)
"""


@pytest.fixture
def broken(distribution, without_own):
    """Install one good plugin and three broken ones; return options that leave rlcore's own out, but the commands."""
    sources = {"a_good": GOOD, "b_import": IMPORT, "c_hooks": HOOKS, "d_taken": TAKEN}
    distribution("sick", {f"hooks.{name}": name for name in sources}, sources)
    blocked = [name for name in without_own if not name.startswith("no:command.")]
    return [word for name in blocked for word in ("-p", name)]


def test_every_fault_of_every_plugin_is_shown(broken, capsys):
    assert main([*broken, "plugins"]) == 2
    shown = capsys.readouterr().out
    assert "hooks.a_good  [hooks, loaded]  sick 1.2" in shown
    assert "gives  reward fine" in shown
    assert "hooks.b_import  [hooks, broken]" in shown
    for fault in (
        "importing it failed: ModuleNotFoundError: No module named 'no_such_module_anywhere'",
        "RLCORE_API = 7 is not known",
        "rlcore_step_ends() is not a hook. Did you mean 'rlcore_step_end'?",
        "rlcore_run_start() takes 'stpe'.",
        "rlcore_rewards() gives the name 'fine', which plugin 'hooks.a_good'",
        "3 of ",
    ):
        assert fault in shown
    assert shown.count("    FAULT  ") == 5


def test_as_json(broken, capsys):
    assert main([*broken, "plugins", "--json"]) == 2
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(rows["hooks.c_hooks"]["faults"]) == 3
    assert (rows["hooks.a_good"]["state"], rows["hooks.a_good"]["gives"]) == ("loaded", ["reward fine"])
    assert rows["hooks.d_taken"]["gives"] == []


def test_a_broken_plugin_takes_nothing_with_it_and_leaves_nothing(broken):
    plugins = PluginManager.inspect([name for name in broken if name != "-p"])
    assert list(plugins.rewards()) == ["fine"]
    assert plugins.rewards()["fine"].score() == 1.0
    assert list(plugins.trackers()) == []  # the broken plugin gave it before its fault


def test_blocked_ones_are_no_fault(broken, capsys):
    names = ("hooks.b_import", "hooks.c_hooks", "hooks.d_taken")
    assert main([*broken, *(word for name in names for word in ("-p", f"no:{name}")), "plugins"]) == 0
    assert "FAULT" not in capsys.readouterr().out


def test_a_run_stops_at_the_first_and_says_that_there_are_more(broken, capsys):
    with pytest.raises(PluginError) as caught:
        PluginManager.load([name for name in broken if name != "-p"])
    message = str(caught.value)
    assert "plugin 'hooks.b_import' (sick 1.2): importing it failed" in message
    assert "To go on without it: -p no:hooks.b_import" in message
    assert message.endswith("More plugins are broken (2): rlcore plugins lists all")


def test_a_command_of_a_sound_plugin_runs_beside_broken_ones(broken, capsys, tmp_path):
    assert main([*broken, "new-plugin", "fresh", "--dir", str(tmp_path)]) == 0
    assert (tmp_path / "rlcore-plugin-fresh" / "pyproject.toml").is_file()
