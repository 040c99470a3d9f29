"""No circle of imports between the files of rlcore, counting imports within functions, leaving out annotations'."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

Graph = dict[str, set[str]]


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_for_annotations(node: ast.AST) -> bool:
    """Whether a statement is `if TYPE_CHECKING:`, whose body never runs."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def import_statements(node: ast.AST, *, in_functions: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not in_functions:
            continue
        elif not is_for_annotations(child):
            yield from import_statements(child, in_functions=in_functions)


def imported_modules(path: Path, modules: set[str], *, in_functions: bool) -> Iterator[str]:
    """Yield those of `modules` that a file imports; `from a import b` is a.b where that is a module, else a."""
    for statement in import_statements(ast.parse(path.read_text()), in_functions=in_functions):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names if alias.name in modules)
        else:
            assert statement.level == 0, f"{path}: a relative import, which this test does not follow"
            for alias in statement.names:
                inner = f"{statement.module}.{alias.name}"
                if inner in modules or statement.module in modules:
                    yield inner if inner in modules else str(statement.module)


@cache
def import_graph(root: Path, *, in_functions: bool) -> Graph:
    """Return the imports of each module under `root`/rlcore.

    A package's own file is a node like any other. That Python runs it before any module of the package is left out:
    it would make a circle of each package that exports a name of its modules.
    """
    files = {module_name(path, root): path for path in (root / "rlcore").rglob("*.py")}
    return {
        name: {other for other in imported_modules(path, set(files), in_functions=in_functions) if other != name}
        for name, path in files.items()
    }


def circles(graph: Graph) -> list[list[str]]:
    """Return each circle's modules, sorted: the strongly connected components of more than one (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            place = stack.index(name)
            component = stack[place:]
            del stack[place:]
            if len(component) > 1:
                found.append(sorted(component))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


@pytest.mark.parametrize("in_functions", [False, True], ids=["when-imported", "at-any-time"])
def test_no_circle_of_imports(in_functions):
    found = circles(import_graph(ROOT, in_functions=in_functions))
    assert found == []


def test_a_circle_is_found(tmp_path):
    """Over three files, by an import in a function, and past one that is for annotations."""
    (tmp_path / "rlcore").mkdir()
    files = {
        "__init__": "",
        "a": "from rlcore import b\n",
        "b": "def f():\n    import rlcore.c\n",
        "c": "from rlcore.a import x\n",
        "d": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rlcore.e import y\n",
        "e": "import rlcore.d\n",
    }
    for name, text in files.items():
        (tmp_path / "rlcore" / f"{name}.py").write_text(text)
    assert circles(import_graph(tmp_path, in_functions=False)) == []
    assert circles(import_graph(tmp_path, in_functions=True)) == [["rlcore.a", "rlcore.b", "rlcore.c"]]


def test_the_graph_is_that_of_the_tree():
    """An edge that must be there, so that an empty graph cannot pass for one without circles."""
    graph = import_graph(ROOT, in_functions=False)
    assert len(graph) > 100
    assert "rlcore.errors" in graph["rlcore.data.chat"]
