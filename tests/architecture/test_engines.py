"""No module of the core outside rlcore/engines asks for an engine by its name or class."""

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from rlcore.plugins import own_engines

ROOT = Path(__file__).parents[2] / "rlcore"
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] != "engines"]
ENGINES = [*own_engines().rollout_engines(), *own_engines().train_engines()]
CLASSES = {
    node.name
    for path in (ROOT / "engines").rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef)
}
LIBRARIES = {
    "commands/model_card.py": {"torch"},
    "engine/generators.py": {"torch"},
    "training/folder.py": {"torch", "vllm"},
    "workers/progress.py": {"torch"},
}
"""Where the name of an engine means the library: a generator's state, versions of distributions, a folder of files."""
NAMES = "|".join(ENGINES)
BY_KEY = re.compile(rf"\b(rollout|engine)(\.name)?(=|\.| = | == )[\"']?({NAMES})\b|\brlcore\.engines\b")
PART = re.compile(rf"(.*[.=/:])?({NAMES})([.=/:].*)?")
"""A text without spaces, or a piece of an f-string, that is the name of an engine or has it as one of its parts."""
OF_LIBRARIES = re.compile(r"torch\.[\w.]*|torch/.*\.py")
"""A name in the library, or one of its files."""
COMPOUND = {name for name in CLASSES if re.search(r"[a-z][A-Z]|[A-Z]{2}", name)}
"""Classes whose names are not words that other libraries have too, as Distribution."""


def docstrings(tree: ast.AST) -> set[int]:
    """Return the ids of the constants that are docstrings."""
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return {id(value) for value in statements if isinstance(value, ast.Constant)}


def text_fault(text: str, library: Collection[str]) -> bool:
    """Whether a text has the name or class of an engine."""
    if text in library or OF_LIBRARIES.fullmatch(text):
        return False
    return text in CLASSES or PART.fullmatch(text) is not None or BY_KEY.search(text) is not None


def imports_engines(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.Import):
        return any(f"{alias.name}.".startswith("rlcore.engines.") for alias in node.names)
    module, names = node.module or "", {alias.name for alias in node.names}
    if f"{module}.".startswith(("rlcore.engines.", "engines.")):
        return True
    return (node.level > 0 or module == "rlcore") and "engines" in names


def faults(source: str, library: Collection[str] = ()) -> Iterator[str]:
    """Give each place where a source asks for an engine by name or class. `library`: names that mean libraries."""
    tree = ast.parse(source)
    skipped = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import) and imports_engines(node):
            yield f"line {node.lineno} imports an engine"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            if text_fault(node.value, library):
                yield f"line {node.lineno} holds {node.value!r}"
        elif isinstance(node, ast.keyword) and node.arg in ENGINES:
            yield f"line {node.lineno} has the keyword {node.arg}"
        elif isinstance(node, ast.Attribute) and node.attr in COMPOUND:
            yield f"line {node.lineno} has the class {node.attr}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_engine_is_asked_for_by_name(path):
    assert list(faults(path.read_text(), LIBRARIES.get(str(path.relative_to(ROOT)), ()))) == []


@pytest.mark.parametrize(
    "source",
    [
        "from rlcore.engines.hf.rollout import HFRollout",
        "import rlcore.engines.torch.engine",
        "continuous = config.rollout.name != 'hf'",
        "if name == 'torch': pass",
        "engines['hf']",
        "message = 'set rollout.vllm.memory higher'",
        "message = 'choose engine=torch'",
        "if type(engine).__name__ == 'TorchEngine': pass",
        "from rlcore import engines",
        "from ..engines import hf",
        "importlib.import_module('rlcore.engines.hf.plugin')",
        "def start(name='torch'): pass",
        "name: str = option('vllm')",
        "key = f'rollout.{name}.hf'",
        "key = f'{group}=torch'",
        "key = f'rollout.vllm.{key}'",
        "match name:\n    case 'torch': pass",
        "if name in ('torch', 'other'): pass",
        "name.startswith('vllm.')",
        "engines = dict(hf=1)",
        "path = 'rollout/hf.yaml'",
        "isinstance(engine, module.HFRollout)",
    ],
)
def test_the_test_sees_it(source):
    assert list(faults(source)) != []


def test_the_libraries_may_be_named():
    assert list(faults("import torch\nkind = 'torch.float32'\nuse = torch.compile\n")) == []
    assert list(faults("versions = ['torch', 'vllm']\n", {"torch", "vllm"})) == []


@pytest.mark.parametrize("file", LIBRARIES)
def test_no_exception_is_left_over(file):
    """Each file with an exception still needs it."""
    assert list(faults((ROOT / file).read_text()))
