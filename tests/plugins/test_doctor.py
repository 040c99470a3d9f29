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
        "RLCORE_API = 7 is unknown",
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


MARKED = """
from dataclasses import dataclass
from rlcore import AlgorithmSpec, CommandSpec, ConfigSpec, RewardSpec, RolloutEngineSpec, TrackerSpec, hookimpl, option
RLCORE_API = 1
"""
RAISES = f"{MARKED}@hookimpl\ndef rlcore_trackers():\n    raise KeyError('lost')\n"
EXITS = f"{MARKED}@hookimpl\ndef rlcore_datasets():\n    raise SystemExit('out of the hook')\n"
NO_SPEC = f"{MARKED}@hookimpl\ndef rlcore_trackers():\n    return {{'name': 'x'}}\n"
NO_NAME = f"{MARKED}@hookimpl\ndef rlcore_trackers():\n    return [TrackerSpec(['x'], dict)]\n"
NO_DATACLASS = f"""{MARKED}
class Section:
    size: int = 3
@hookimpl
def rlcore_configs():
    return ConfigSpec("loose", Section)
"""
NO_ALGORITHM = f"{MARKED}@hookimpl\ndef rlcore_algorithm():\n    return AlgorithmSpec('lost', int)\n"
ODD_TYPE = f"""{MARKED}
@dataclass(frozen=True)
class Section:
    where: set = option(None, "a set")
@hookimpl
def rlcore_rollout_engines():
    return RolloutEngineSpec("odd", dict, Section)
"""
FIELDS = f"{MARKED}@hookimpl\ndef rlcore_rewards():\n    return RewardSpec('half')\n"
SICK = {
    "import_error": (IMPORT, ["importing it failed: ModuleNotFoundError: No module named 'no_such_module_anywhere'"]),
    "syntax": ("def half(:", ["importing it failed: SyntaxError: invalid syntax"]),
    "exits": ("raise SystemExit('enough')", ["importing it failed: SystemExit: enough"]),
    "hooks": (HOOKS, ["RLCORE_API = 7 is unknown", "rlcore_step_ends() is not a hook", "takes 'stpe'"]),
    "taken": (TAKEN, ["gives the name 'fine', which plugin 'hooks.a_good' (fit 1.2"]),
    "raises": (RAISES, ["rlcore_trackers() failed: KeyError: 'lost'"]),
    "hook_exits": (EXITS, ["rlcore_datasets() failed: SystemExit: out of the hook"]),
    "no_spec": (NO_SPEC, ["rlcore_trackers() returned dict {'name': 'x'}; it must return TrackerSpec"]),
    "no_name": (NO_NAME, ["rlcore_trackers() gave the name ['x']"]),
    "no_dataclass": (NO_DATACLASS, ["the config_class of 'loose' is"]),
    "odd_type": (ODD_TYPE, ["Section.where has the type set; allowed are"]),
    "fields": (FIELDS, ["rlcore_rewards() failed: TypeError: RewardSpec.__init__() missing 1 required"]),
    "empty": ("RLCORE_API = 1", ["it implements no hook"]),
}
ODD = {
    "no_module": (
        "hooks.no_module = not_there",
        "importing it failed: ModuleNotFoundError: No module named 'not_there'",
    ),
    "attribute": ("hooks.attribute = json:dumps", "its entry point is 'json:dumps'; it must name a module"),
    "taken_command": ("command.plugins = json", "plugin 'command.plugins' (rlcore "),
    "same": ("hooks.a_good = json", "has the same name; rename or uninstall one of them"),
    "twice": ("hooks.twice = a_good", "its module 'a_good' is already loaded under another plugin name"),
    "spaces": ("hooks.spaces = not a module", "its entry point is 'not a module'; it must name a module"),
    "no_value": ("hooks.no_value =", "its entry point is ''; it must name a module"),
    "bare": ("hooks.bare", "its entry_points.txt cannot be read: TypeError: "),
    "unnamed": (
        "lost = no_algorithm",
        "the algorithm 'lost' is <class 'int'>; it must be a subclass of rlcore.Algorithm",
    ),
}


def test_all_kinds_of_faults_at_once(distribution, without_own, capsys):
    """As many broken distributions beside a good one; two of them have no metadata."""
    for name, (source, _) in SICK.items():
        distribution(name, {f"hooks.{name}": f"sick_{name}"}, {f"sick_{name}": source})
    for name, (line, _) in ODD.items():
        folder = distribution(f"odd-{name}", {}, {"no_algorithm": NO_ALGORITHM} if name == "unnamed" else {})
        (folder / f"odd_{name}-1.2.dist-info" / "entry_points.txt").write_text(f"[rlcore]\n{line}\n")
        if name in ("twice", "no_module"):
            (folder / f"odd_{name}-1.2.dist-info" / "METADATA").unlink()
    distribution("fit", {"hooks.a_good": "a_good"}, {"a_good": GOOD})  # the last one comes first on sys.path
    blocked = [name for name in without_own if not name.startswith("no:command.")]
    assert main([*(word for name in blocked for word in ("-p", name)), "plugins"]) == 2
    shown = capsys.readouterr().out
    assert "hooks.a_good  [hooks, loaded]  fit 1.2" in shown
    for fault in [*(fault for _, faults in SICK.values() for fault in faults), *(fault for _, fault in ODD.values())]:
        assert fault in shown, fault
    assert f"{len(SICK) + len(ODD)} of " in shown
