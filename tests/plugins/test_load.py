"""What a plugin gives when it is sound, and the message when it is not."""

import hashlib
import shutil
import sys
from pathlib import Path

import pytest

from rlcore.cli import main
from rlcore.errors import PluginError
from rlcore.plugins import PluginManager, installed

ALGORITHM = """
from dataclasses import dataclass
from rlcore import Algorithm, AlgorithmSpec, hookimpl
RLCORE_API = 1

@dataclass(frozen=True)
class Settings:
    size: int = 1

class Nice(Algorithm):
    config_class = Settings

@hookimpl
def rlcore_algorithm():
    return {given}
"""
HOOK = """
from rlcore import hookimpl
RLCORE_API = 1

@hookimpl
def rlcore_run_start(run):
    run.calls.append(__name__)
"""
COMMAND = """
from rlcore import CommandSpec, hookimpl
RLCORE_API = 1

@hookimpl
def rlcore_commands():
    return CommandSpec("greet", "say hello", lambda argv: 0)
"""


def one(name="nice"):
    return ALGORITHM.format(given=f"AlgorithmSpec({name!r}, Nice)")


def test_local_file_gives_all_kinds(plugin_file, without_own):
    path = Path(plugin_file("stand_in"))
    plugins = PluginManager.load([*without_own, str(path)])
    assert list(plugins.algorithms()) == ["echo"]
    assert plugins.algorithm("echo").algorithm.__name__ == "Echo"
    assert list(plugins.rewards()) == ["arithmetic", "exact"]
    assert list(plugins.datasets()) == ["arithmetic", "riddles"]
    assert list(plugins.rollout_engines()) == ["hf"]
    assert list(plugins.train_engines()) == ["torch"]
    assert list(plugins.trackers()) == ["console", "wandb", "smoke_signals"]
    assert plugins.commands()["hello"].summary == "greet"
    assert [module.__name__ for module in plugins.by_value_modules] == ["stand_in"]
    assert plugins.by_value_modules[0] is sys.modules["stand_in"]
    assert plugins.local_files == {"stand_in": (path, hashlib.sha256(path.read_bytes()).hexdigest())}


def test_local_file_is_logged_with_its_hash(plugin_file, without_own, caplog):
    path = plugin_file("life_cycle")
    with caplog.at_level("INFO", logger="rlcore.plugins"):
        PluginManager.load([*without_own, path])
    assert hashlib.sha256(Path(path).read_bytes()).hexdigest() in caplog.text


def test_local_file_loaded_again_after_an_edit_is_the_new_one(tmp_path, without_own):
    path = tmp_path / "edited_plugin.py"
    for name in ("first", "second"):
        path.write_text(one(name) + f"# {name}\n")
        assert list(PluginManager.load([*without_own, str(path)]).algorithms()) == [name]


@pytest.mark.parametrize(
    ("stem", "expected"),
    [
        ("failing_import", ["ModuleNotFoundError", "no_such_module_anywhere", "failing_import.py, line 1"]),
        ("no_api", ["RLCORE_API = 1"]),
        ("newer_api", ["RLCORE_API = 2", "has 1"]),
        ("no_hooks", ["implements no hook", "rlcore_step_end"]),
        ("misspelt_hook", ["rlcore_step_ends()", "Did you mean 'rlcore_step_end'?"]),
        ("misspelt_unmarked", ["rlcore_run_ends()", "Did you mean 'rlcore_run_end'?"]),
        ("foreign_name", ["on_step_end()", "is not a hook", "rlcore_step_end"]),
        ("unmarked_hook", ["rlcore_run_start()", "@hookimpl"]),
        ("defaulted_argument", ["'step'", "default", "remove it"]),
        ("unknown_argument", ["'metric'", "Did you mean 'metrics'?", "run, step, metrics"]),
        ("star_argument", ["**everything", "one by one"]),
        ("hook_option", ["tryfirst", "plain @hookimpl"]),
        ("wrong_return", ["rlcore_rewards() returned dict", "RewardSpec"]),
        ("returns_nothing", ["rlcore_rewards() returned nothing", "RewardSpec"]),
        ("strange_name", ["'a=b'", "letters, digits"]),
        ("mutable_config", ["Settings must be a frozen dataclass"]),
        ("no_config", ["Bad has no `config_class`"]),
        ("section_taken", ["'trainer' cannot name a section of the config", "choose another name"]),
        ("engine_name_taken", ["'top_k' cannot name a section", "rollout.top_k must be an identifier"]),
        ("section_required", ["Needy.size has no default"]),
        ("plain_config", ["Bad.config_class", "frozen dataclass"]),
        ("unsupported_type", ["Settings.size", "set", "list[T]"]),
        ("unresolved_type", ["Missing", "import it in the module"]),
        ("not_an_algorithm", ["subclass of rlcore.Algorithm"]),
        ("failing_registration", ["rlcore_rewards() failed", "ZeroDivisionError", "failing_registration.py, line 8"]),
    ],
)
def test_broken_plugin_is_named_with_its_cause_and_remedy(stem, expected, plugin_file, without_own):
    path = plugin_file(stem)
    with pytest.raises(PluginError) as caught:
        PluginManager.load([*without_own, path])
    message = str(caught.value)
    for part in [*expected, f"plugin {stem!r} (local file", path, f"-p no:{stem}"]:
        assert part in message
    blocked = PluginManager.load([*without_own, path, f"no:{stem}"]).list()[-1]
    assert (blocked.name, blocked.state, blocked.hooks) == (stem, "blocked", ())


def test_failed_import_leaves_no_module_behind(plugin_file, without_own):
    with pytest.raises(PluginError):
        PluginManager.load([*without_own, plugin_file("failing_import")])
    assert "failing_import" not in sys.modules


def test_two_plugins_with_one_reward_name(plugin_file, without_own):
    with pytest.raises(PluginError, match=r"'same_reward'.*'exact', which plugin 'stand_in'.*given already"):
        PluginManager.load([*without_own, plugin_file("stand_in"), plugin_file("same_reward")])


def test_local_file_that_does_not_exist(without_own, tmp_path):
    with pytest.raises(PluginError, match=r"absent.py' does not exist"):
        PluginManager.load([*without_own, str(tmp_path / "absent.py")])


@pytest.mark.parametrize(("name", "cause"), [("json", "hide the module 'json'"), ("my-algo", "letters, digits and _")])
def test_local_file_needs_a_module_name_of_its_own(name, cause, without_own, tmp_path):
    before = sys.modules.get("json")
    (tmp_path / f"{name}.py").write_text(HOOK)
    with pytest.raises(PluginError, match=cause):
        PluginManager.load([*without_own, str(tmp_path / f"{name}.py")])
    assert sys.modules.get("json") is before


def test_blocking_what_does_not_exist(plugin_file, without_own):
    with pytest.raises(PluginError, match=r"no:stand_out blocks nothing.*Did you mean 'stand_in'\?"):
        PluginManager.load([*without_own, plugin_file("stand_in"), "no:stand_out"])


def test_unknown_algorithm(plugin_file, without_own):
    plugins = PluginManager.load([*without_own, plugin_file("stand_in")])
    with pytest.raises(PluginError, match=r"'ecko' is not installed. Did you mean 'echo'\? Installed: echo"):
        plugins.algorithm("ecko")


def test_installed_plugin(distribution, without_own):
    folder = distribution("rlcore-plugin-nice", {"nice": "rl_nice"}, {"rl_nice": one()})
    plugins = PluginManager.load(without_own)
    info = next(info for info in plugins.list() if info.name == "nice")
    assert (info.name, info.kind, info.distribution, info.version) == ("nice", "algorithm", "rlcore-plugin-nice", "1.2")
    assert info.file == str(folder / "rl_nice.py")
    assert info.hooks == ("rlcore_algorithm",)
    assert plugins.algorithm("nice").name == "nice"
    assert list(plugins.by_value_modules) == []
    assert plugins.local_files == {}


def test_blocked_plugin_is_not_imported(distribution, without_own):
    distribution("rlcore-plugin-nice", {"nice": "rl_nice_blocked"}, {"rl_nice_blocked": "raise SystemExit"})
    info = next(info for info in PluginManager.load([*without_own, "no:nice"]).list() if info.name == "nice")
    assert (info.name, info.state, info.file) == ("nice", "blocked", None)


@pytest.mark.parametrize(
    ("entry", "source", "cause"),
    [
        ("nice", "raise SystemExit(3)", "importing it failed: SystemExit: 3"),
        ("nice", one("nicer"), "'nice'; it gave 'nicer'"),
        ("nice", HOOK, r"rlcore_algorithm\(\) gives 'nice'; it gave none"),
        ("nice", ALGORITHM.format(given="[AlgorithmSpec(n, Nice) for n in ('nice', 'more')]"), "gave 'nice', 'more'"),
        ("reward.nice", one(), "gives none; it gave 'nice'"),
        ("command.hail", COMMAND, "gives 'hail'; it gave 'greet'"),
        ("command.greet.all", COMMAND, "gives 'greet all'; it gave 'greet'"),
        ("command.greet", COMMAND.replace('"greet"', '"greet  all"'), "a name is made of words of letters, digits"),
        ("hooks.nice", COMMAND, r"rlcore_commands\(\) gives none; it gave 'greet'"),
        ("commands.greet", COMMAND, r"rlcore_commands\(\) gives none; it gave 'greet'"),
    ],
)
def test_entry_point_promises_what_the_module_gives(entry, source, cause, distribution, without_own):
    distribution("rlcore-plugin-nice", {entry: "rl_promise"}, {"rl_promise": source})
    with pytest.raises(PluginError, match=rf"plugin '{entry}' \(rlcore-plugin-nice 1.2.*{cause}(.|\n)*-p no:{entry}"):
        PluginManager.load(without_own)


def test_entry_point_must_be_a_module(distribution, without_own):
    distribution("rlcore-plugin-nice", {"nice": "rl_nice:Nice"}, {"rl_nice": one()})
    with pytest.raises(PluginError, match="'rl_nice:Nice'; it must name a module"):
        PluginManager.load(without_own)


def test_one_module_under_two_names(distribution, without_own):
    distribution("rlcore-plugin-nice", {"hooks.a": "rl_twice", "hooks.b": "rl_twice"}, {"rl_twice": HOOK})
    with pytest.raises(PluginError, match=r"'hooks.b'.*'rl_twice' is already loaded"):
        PluginManager.load(without_own)


def test_one_name_in_two_distributions(distribution, without_own):
    distribution("dist-a", {"nice": "rl_nice_a"}, {"rl_nice_a": one()})
    distribution("dist-b", {"nice": "rl_nice_b"}, {"rl_nice_b": one()})
    with pytest.raises(
        PluginError, match=r"plugin 'nice' \(dist-\w 1.2.*plugin 'nice' \(dist-\w 1.2.* has the same name"
    ):
        PluginManager.load(without_own)


def test_command_entry_point(distribution, without_own):
    distribution("rlcore-plugin-greet", {"command.greet": "rl_greet"}, {"rl_greet": COMMAND})
    assert list(PluginManager.load(without_own).commands()) == ["greet"]


def test_the_longest_command_that_a_line_begins_with_runs(distribution, without_own, capsys):
    short = COMMAND.replace("lambda argv: 0", "lambda argv: print('short', argv) or 0")
    long = COMMAND.replace('"greet"', '"greet all"').replace("lambda argv: 0", "lambda argv: print('long', argv) or 0")
    entries = {"command.greet": "rl_greet", "command.greet.all": "rl_greet_all"}
    distribution("rlcore-plugin-greet", entries, {"rl_greet": short, "rl_greet_all": long})
    for words, said in (
        ("greet", "short []"),
        ("greet you all", "short ['you', 'all']"),
        ("greet all -x", "long ['-x']"),
    ):
        assert main(words.split()) == 0
        assert capsys.readouterr().out == f"{said}\n"


def test_own_entry_points_all_load():
    plugins = PluginManager.load()
    assert [info.name for info in plugins.list()] == [entry.name for entry in installed()]
    assert "grpo" in plugins.algorithms()
    for given in (plugins.rewards(), plugins.datasets(), plugins.rollout_engines(), plugins.train_engines()):
        assert given
    assert {"console", "wandb"} <= set(plugins.trackers())


def test_a_copied_plugin_file_does_not_shadow_the_installed_one(tmp_path, distribution, without_own):
    folder = distribution("rlcore-plugin-nice", {"nice": "rl_nice"}, {"rl_nice": one()})
    copy = shutil.copy(folder / "rl_nice.py", tmp_path / "rl_nice.py")
    with pytest.raises(PluginError, match="would hide the module 'rl_nice'"):
        PluginManager.load([*without_own, str(copy)])
