"""Who may import whom: the layers by import-linter, what plugins may use by their syntax trees."""

import ast
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlcore
import rlcore.engine
import rlcore.episodes
import rlcore.planning
import rlcore.workers

ROOT = Path(__file__).parents[2]
LIGHT = {"rlcore": rlcore, "rlcore.engine": rlcore.engine, "rlcore.episodes": rlcore.episodes}
PUBLIC = {**LIGHT, "rlcore.planning": rlcore.planning, "rlcore.workers": rlcore.workers}
"""The modules whose `__all__` plugins may import; of `rlcore.ops` they may import everything."""
PUBLIC_ALGORITHMS = {"rlcore_grpo": {"GRPO", "GRPOConfig", "GroupConfig", "grpo_loss"}}
"""The names of built-in algorithms that plugins may build on (docs/decisions/0038)."""
PLUGIN_FILES = sorted(
    [
        *(ROOT / "algorithms").glob("*.py"),
        *(ROOT / "plugins").glob("*/*.py"),
        *(ROOT / "plugins").glob("*/rlcore_plugin_*/**/*.py"),
    ]
)
ENGINE_FILES = sorted((ROOT / "tests" / "fixtures" / "engines").glob("*/*.py"))
"""Engines written from docs/write_an_engine.md."""


KIT = ROOT / "plugins" / "rlcore-plugin-testing"
KIT_USES = {
    *("assets", "training.checkpoint", "training.preflight", "training.trainer", "config"),
    *("data.arithmetic", "data.chat", "data.loader"),
    *("engine.update.loss_accumulator", "engine.update.microbatch", "plugins", "plugins.local", "plugins.specs"),
    *("episodes.environment", "episodes.from_config", "episodes.processes", "episodes.prompts"),
    *("episodes.rendering", "episodes.setup", "episodes.tool_calls"),
    *("protocol.dataproto", "protocol.row_groups", "roles.handles", "roles.metrics"),
}
"""The modules of the core that the conformance suites use beside the public names (docs/decisions/0025)."""


def top_package(path: Path) -> str:
    """Return the package or module that a plugin's file is imported by."""
    packages = [parent.name for parent in path.parents if parent.name.startswith("rlcore_plugin_")]
    return packages[0] if packages else path.stem


def imported(path: Path) -> list[tuple[str, str | None]]:
    """Return (module, name) of every import in a file; name is None for `import module`."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


def test_arrows_point_down_only():
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def is_public(module: str, name: str | None) -> bool:
    return module == "rlcore.ops" or (module in PUBLIC and name in PUBLIC[module].__all__)


@pytest.mark.parametrize("path", [*PLUGIN_FILES, *ENGINE_FILES], ids=lambda path: str(path.relative_to(ROOT)))
def test_plugins_use_only_the_public_names_and_never_each_other(path):
    siblings = {top_package(file) for file in PLUGIN_FILES} - {top_package(path)}
    for module, name in imported(path):
        built_on = path.parent.name.startswith("rlcore-plugin-") and name in PUBLIC_ALGORITHMS.get(module, ())
        assert built_on or module.split(".")[0] not in siblings, f"{path.name} imports {module}.{name}"
        if module.split(".")[0] == "rlcore" and not path.is_relative_to(KIT):
            assert is_public(module, name), f"{path.name} uses {module}.{name}, which is not public"


def test_the_conformance_suites_use_exactly_the_internals_that_are_listed():
    imports = [each for path in PLUGIN_FILES if path.is_relative_to(KIT) for each in imported(path)]
    used = {module for module, name in imports if module.split(".")[0] == "rlcore" and not is_public(module, name)}
    assert used == {f"rlcore.{module}" for module in KIT_USES}


def test_algorithms_are_short():
    for path in (ROOT / "algorithms").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 250, path.name
    assert len((ROOT / "algorithms" / "rlcore_grpo.py").read_text().splitlines()) <= 140


def test_no_algorithm_is_named_in_the_core():
    names = [path.stem.removeprefix("rlcore_") for path in (ROOT / "algorithms").glob("*.py")]
    plugins = [path.stem.removeprefix("rlcore_plugin_") for path in (ROOT / "plugins").glob("*/rlcore_plugin_*.py")]
    assert "rloo" in plugins
    by_name = re.compile(rf"(algo=|conformance\(\W*)({'|'.join([*names, *plugins])})\b")
    for path in [*(ROOT / "rlcore").rglob("*.py"), *(ROOT / "rlcore").rglob("*.tmpl")]:
        text = path.read_text()
        assert not by_name.search(text), f"{path.relative_to(ROOT)} names an algorithm in a text"
        if path.suffix == ".py":
            used = {n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)}
            assert not used & set(names), f"{path.relative_to(ROOT)} names an algorithm"


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_there(module):
    for name in PUBLIC[module].__all__:
        assert getattr(PUBLIC[module], name) is not None


@pytest.mark.parametrize("module", LIGHT)
def test_no_public_name_is_that_of_a_module(module):
    """Python binds a submodule to its name in the package as soon as anyone imports it."""
    assert not set(LIGHT[module].__all__) & {info.name for info in pkgutil.iter_modules(LIGHT[module].__path__)}


@pytest.mark.parametrize("module", LIGHT)
def test_a_package_of_public_names_loads_nothing_heavy(module):
    code = (
        f"import sys, {module}; print(sorted({{'torch', 'ray', 'transformers', 'numpy', 'hydra'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
