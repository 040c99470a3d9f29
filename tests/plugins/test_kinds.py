"""The table of kinds: what a new kind needs, and what follows from the table."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import rlcore
from rlcore.config import compose
from rlcore.errors import ConfigError, PluginError
from rlcore.plugins import PLUGIN_KINDS, PluginManager, hookspecs, loading, manager, specs
from rlcore.plugins.checks import HOOKS

ROOT = Path(rlcore.__file__).parent


@pytest.mark.parametrize("kind", PLUGIN_KINDS, ids=lambda kind: kind.noun)
def test_a_kind_is_a_row_a_dataclass_and_a_hook(kind):
    """Its hook is named in two core files and in those of its own plugins: the table, and the hook specifications."""
    assert kind.hook in HOOKS
    assert kind.spec.__name__ in rlcore.__all__
    named = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if re.search(rf"(?<!def ){kind.hook}\b", path.read_text()) and "template" not in path.parts
    }
    assert named == {"plugins/specs.py"}
    assert f"def {kind.hook}(" in (ROOT / "plugins" / "hookspecs.py").read_text()


@dataclass(frozen=True)
class WorldSpec:
    name: str


@pytest.fixture
def worlds(monkeypatch):
    """Add a kind as a later rlcore would: a dataclass with a row, and a hook."""

    @hookspecs._spec
    def rlcore_worlds():
        """Give worlds."""

    kind = specs.PluginKind(
        WorldSpec,
        "rlcore_worlds",
        "world",
        group="data",
        values=lambda name: {"name": "arithmetic", "prompt_key": name},
        chosen=lambda config, _: [("data.prompt_key", config.data.prompt_key)],
    )
    monkeypatch.setattr(hookspecs, "rlcore_worlds", rlcore_worlds, raising=False)
    monkeypatch.setitem(HOOKS, "rlcore_worlds", rlcore_worlds)
    for module in (specs, manager, loading):
        monkeypatch.setattr(module, "PLUGIN_KINDS", (*PLUGIN_KINDS, kind))


def plugin(folder: Path, stem: str, name: str) -> str:
    path = folder / f"{stem}.py"
    path.write_text(
        "import sys\nfrom rlcore import hookimpl\nRLCORE_API = 1\n@hookimpl\ndef rlcore_worlds():\n"
        f"    return [sys.modules[{__name__!r}].WorldSpec({name!r})]\n"
    )
    return str(path)


def test_loading_groups_and_checks_follow_from_the_row(worlds, monkeypatch, without_own, plugin_file, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or type(sys)(__name__))
    monkeypatch.setattr(sys.modules[__name__], "WorldSpec", WorldSpec, raising=False)
    files = [*without_own, plugin_file("stand_in"), plugin(tmp_path, "first_world", "maze")]
    plugins = PluginManager.load(files)
    assert list(plugins.specs(WorldSpec)) == ["maze"]
    assert plugins.list()[-1].gives == ("world maze",)
    config = compose(["data=maze"], plugins)
    assert config.data.prompt_key == "maze"
    plugins.check_names(config)
    assert "first_world" in [info.name for info in plugins.used_by(config)]
    with pytest.raises(ConfigError, match=r"data.prompt_key = 'maz' is not installed. Did you mean 'maze'\?"):
        plugins.check_names(compose(["data.prompt_key=maz"], plugins))
    with pytest.raises(PluginError, match=r"gives the name 'maze', which plugin 'first_world'"):
        PluginManager.load([*files, plugin(tmp_path, "second_world", "maze")])
