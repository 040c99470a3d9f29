"""No module of the core outside rlcore/engines asks for an engine by its name or class."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.plugins import own_engines

ROOT = Path(__file__).parents[2] / "rlcore"
FILES = [path for path in sorted(ROOT.rglob("*.py")) if "engines" not in path.relative_to(ROOT).parts]
ENGINES = [*own_engines().rollout_engines(), *own_engines().train_engines()]
CLASSES = {
    node.name
    for path in (ROOT / "engines").rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef)
}
LIBRARIES = {"torch", "vllm"}
"""Engines that are called as the library that they use: the word alone may mean the library."""
BY_KEY = re.compile(rf"\b(rollout|engine)(\.name)?(=|\.| = | == )[\"']?({'|'.join(ENGINES)})\b")


def docstrings(tree: ast.AST) -> set[int]:
    """Return the ids of the constants that are docstrings."""
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return {id(value) for value in statements if isinstance(value, ast.Constant)}


def faults(source: str) -> Iterator[str]:
    """Give each place where a source asks for an engine by name or class."""
    tree = ast.parse(source)
    skipped = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = [alias.name for alias in node.names]
            modules = [getattr(node, "module", None) or "", *names]
            if any(f"{module}.".startswith("rlcore.engines.") for module in modules) or CLASSES & set(names):
                yield f"line {node.lineno} imports {', '.join(names)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            named = node.value in set(ENGINES) - LIBRARIES or node.value in CLASSES
            if named or BY_KEY.search(node.value):
                yield f"line {node.lineno} holds {node.value!r}"
        elif isinstance(node, ast.Compare):
            sides = [side.value for side in [node.left, *node.comparators] if isinstance(side, ast.Constant)]
            if set(ENGINES) & {side for side in sides if isinstance(side, str)}:
                yield f"line {node.lineno} compares with {sides[0]!r}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_engine_is_asked_for_by_name(path):
    assert list(faults(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "from rlcore.engines.hf.rollout import HFRollout",
        "import rlcore.engines.torch.engine",
        "continuous = config.rollout.name != 'hf'",
        "if name == 'torch': pass",
        "engines['hf']",
        "message = 'set rollout.vllm.kv_cache_mb higher'",
        "message = 'choose engine=torch'",
        "if type(engine).__name__ == 'TorchEngine': pass",
    ],
)
def test_the_test_sees_it(source):
    assert list(faults(source)) != []


def test_the_libraries_may_be_named():
    assert list(faults("import torch\nversions = ['torch', 'vllm']\nstate['torch']\n")) == []
