"""Hook calls: their exact order, their arguments, their errors, their trace."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcore.errors import ConfigError, PluginError
from rlcore.plugins import PluginManager
from rlcore.plugins.reference import markdown

SOURCE = (Path(__file__).parents[1] / "fixtures" / "plugins" / "life_cycle.py").read_text()
RAISES = """
from rlcore import ConfigError, hookimpl
RLCORE_API = 1

@hookimpl
def rlcore_check_config(config):
    raise ConfigError("no")
"""


@pytest.fixture
def run():
    return SimpleNamespace(calls=[])


def test_exact_order_of_calls(distribution, plugin_file, tmp_path, run, capsys):
    # A distribution that is called rlcore takes the place of the real one: what it holds is built in.
    distribution(
        "rlcore", {"hooks.zulu": "own_zulu", "hooks.mike": "own_mike"}, dict.fromkeys(["own_zulu", "own_mike"], SOURCE)
    )
    distribution("zz-last", {"hooks.alpha": "z_alpha"}, {"z_alpha": SOURCE})
    distribution(
        "aa-first",
        {"hooks.bravo": "a_bravo", "data.yankee": "a_yankee"},
        dict.fromkeys(["a_bravo", "a_yankee"], SOURCE),
    )
    local = tmp_path / "a_local.py"
    local.write_text(SOURCE)
    plugins = PluginManager.load([plugin_file("life_cycle"), str(local), "no:hooks.bravo"], trace=True)
    expected = ["own_mike", "own_zulu", "a_yankee", "z_alpha", "life_cycle", "a_local"]

    plugins.run_start(run)
    plugins.step_end(run, 3, {"loss": 0.5})
    plugins.checkpoint(run, Path("step-3"))
    plugins.run_end(run, "finished")

    assert run.calls == [
        *[("run_start", name) for name in expected],
        *[("step_end", name, 3, {"loss": 0.5}) for name in expected],
        *[("checkpoint", name, Path("step-3")) for name in expected],
        *[("run_end", name, "finished") for name in expected],
    ]
    names = ["hooks.mike", "hooks.zulu", "data.yankee", "hooks.alpha", "life_cycle", "a_local"]
    hooks = ["rlcore_run_start", "rlcore_step_end", "rlcore_checkpoint", "rlcore_run_end"]
    traced = re.findall(r"^hook (\S+) (\S+) \d+\.\d ms$", capsys.readouterr().err, flags=re.MULTILINE)
    # Installed algorithms are traced too, when they register.
    assert [call for call in traced if call[0] in hooks] == [(hook, name) for hook in hooks for name in names]


def test_no_trace_unless_asked(plugin_file, without_own, run, capsys):
    PluginManager.load([*without_own, plugin_file("life_cycle")]).run_start(run)
    assert capsys.readouterr() == ("", "")


def test_failing_hook_names_plugin_file_and_remedy(plugin_file, without_own, run):
    plugins = PluginManager.load([*without_own, plugin_file("failing_life_cycle"), plugin_file("life_cycle")])
    with pytest.raises(PluginError) as caught:
        plugins.step_end(run, 7, {})
    for part in ("'failing_life_cycle'", plugin_file("failing_life_cycle"), "step 7 displeases me", "line 8", "-p no:"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    assert run.calls == []  # later plugins are not called


def test_run_end_reaches_all_plugins_then_raises(plugin_file, without_own, run):
    plugins = PluginManager.load([*without_own, plugin_file("failing_life_cycle"), plugin_file("life_cycle")])
    with pytest.raises(PluginError, match="no end"):
        plugins.run_end(run, "failed")
    assert run.calls == [("run_end", "life_cycle", "failed")]


def test_errors_of_rlcore_pass_unchanged(distribution, without_own):
    distribution("strict", {"hooks.strict": "strict_hooks"}, {"strict_hooks": RAISES})
    with pytest.raises(ConfigError, match=r"^no$"):
        PluginManager.load(without_own).check_config(None)


def test_hooks_page_is_current():
    page = Path(__file__).parents[2] / "docs" / "hooks.md"
    assert page.read_text() == markdown(), "run: python -m rlcore.plugins.reference hooks > docs/hooks.md"


def test_workers_of_plugins(plugin_file, without_own, tmp_path):
    def config(name):
        return SimpleNamespace(run=SimpleNamespace(name=name))

    plugins = PluginManager.load([*without_own, plugin_file("own_workers")])
    assert plugins.workers(config(None)) == {}
    spec = plugins.workers(config("hello"))["echo"]
    assert (spec.worker.__name__, spec.args, spec.workers, spec.gpus_per_worker) == ("Echo", ("hello",), 2, 0.0)
    handle = spec.handle("a group", config("hello"))
    assert (handle.group, handle.config.run.name) == ("a group", "hello")
    second = tmp_path / "other_workers.py"
    second.write_text(Path(plugin_file("own_workers")).read_text())
    both = PluginManager.load([*without_own, plugin_file("own_workers"), str(second)])
    with pytest.raises(PluginError, match=r"'other_workers'.*\n?.*gives the name 'echo', which plugin 'own_workers'"):
        both.workers(config("hello"))


BREAKS = """
from dataclasses import dataclass
from rlcore import Algorithm, AlgorithmSpec, ConfigSpec, hookimpl, option

RLCORE_API = 1

@dataclass(frozen=True)
class Settings:
    fails: str = option("", "the part that fails")

def fail(part, config):
    if config == part:
        return {}["no such key"]

class Breaks(Algorithm):
    config_class = Settings

    def __init__(self, config):
        super().__init__(config)
        fail("__init__", config.fails)

    def roles(self):
        fail("roles", self.config.fails)
        return super().roles()

    def check(self, config):
        fail("check", self.config.fails)

@hookimpl
def rlcore_algorithm():
    return AlgorithmSpec("breaks", Breaks)

@dataclass(frozen=True)
class Section:
    fails: bool = option(False, "whether the check fails")

@hookimpl
def rlcore_configs():
    return ConfigSpec("breaking", Section, check=lambda config: fail(True, config.section(Section).fails))
"""


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("algo.fails=check", "check() of 'breaks'"),
        ("algo.fails=roles", "roles() of 'breaks'"),
        ("algo.fails=__init__", "__init__() of 'breaks'"),
        ("breaking.fails=true", "check() of 'breaking'"),
    ],
)
def test_an_error_in_a_plugins_check_names_the_plugin_and_the_place(tmp_path, override, what):
    from rlcore.config import compose
    from rlcore.training.preflight import preflight

    file = tmp_path / "breaks.py"
    file.write_text(BREAKS)
    plugins = PluginManager.load([str(file)])
    with pytest.raises(PluginError) as caught:
        preflight(compose(["algo=breaks", "cluster=in_process", override], plugins), plugins)
    for part in (f"{what} failed: KeyError: 'no such key'", str(file), "line 13", "-p no:breaks"):
        assert part in str(caught.value)
    preflight(compose(["algo=breaks", "cluster=in_process"], plugins), plugins)
