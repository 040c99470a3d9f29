"""docs/architecture.md and README's table of rooms describe the tree: its folders, layers, paths and names."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TRANSFORMERS = {"AutoModelForCausalLM"}
"""Classes that the page names and that are not rlcore's."""


def section(page: Path, title: str) -> str:
    """Return the text under a heading of the second level."""
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    return text


def rooms() -> str:
    return section(ROOT / "README.md", "Rooms")


def quoted(text: str) -> list[str]:
    """Return the words between backticks, code blocks left out."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


@pytest.mark.parametrize("text", [ARCHITECTURE.read_text(), rooms()], ids=["architecture.md", "README.md"])
def test_every_path_exists(text):
    tops = {path.name for path in ROOT.iterdir()}
    paths = [word for word in quoted(text) if re.fullmatch(r"[\w.*/-]+", word) and word.split("/")[0] in tops]
    assert len(paths) > 10
    assert [path for path in paths if "/" in path and not list(ROOT.glob(path.rstrip("/")))] == []


def test_every_folder_is_in_the_table_of_rooms():
    table = rooms()
    folders = {path.parent for path in ROOT.glob("rlcore/*/__init__.py")}
    assert len(folders) > 10
    assert [folder.name for folder in folders if f"`rlcore/{folder.name}/`" not in table] == []
    for top in ("algorithms", "plugins", "configs", "benchmarks", "docs", "tests"):
        assert f"`{top}/`" in table, top
    assert [file.name for file in ROOT.glob("rlcore/*.py") if f"`rlcore/{file.name}`" not in table] == []


def test_the_layers_are_those_that_are_held():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    (shown,) = [text for language, text in FENCE.findall(section(ARCHITECTURE, "Layers")) if language == "text"]
    assert shown.splitlines() == layers


# Names


@cache
def definitions() -> tuple[dict[str, set[str]], set[str]]:
    """Return the members of each class by its name, inherited ones included, and all defined names."""
    members: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    names: set[str] = set()
    for path in [*(ROOT / "rlcore").rglob("*.py"), *(ROOT / "algorithms").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                members.setdefault(node.name, set()).update(own_members(node))
                bases.setdefault(node.name, []).extend(ast.unparse(base) for base in node.bases)
            names |= defined_by(node)
    for _ in range(4):  # the depth of inheritance
        for name, own in members.items():
            own.update(*(members.get(base.partition("[")[0], set()) for base in bases[name]))
    return members, names


def own_members(node: ast.ClassDef) -> set[str]:
    """Return methods, fields, and attributes that any method sets."""
    found = {target.id for each in node.body for target in ast.walk(each) if isinstance(target, ast.Name)}
    found |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    attributes = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return found | {each.attr for each in attributes if isinstance(each.ctx, ast.Store)}


def defined_by(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.arg):
        return {node.arg}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return {node.attr}
    return set()


def test_every_class_and_member_exists():
    members, _ = definitions()
    named = [re.match(r"@?([A-Z]\w*[a-z]\w*)(?:\.(\w+))?", word) for word in quoted(ARCHITECTURE.read_text())]
    found = [match for match in named if match and match[1] not in TRANSFORMERS]
    assert len(found) > 20
    for match in found:
        assert match[1] in members, match[0]
        assert match[2] is None or match[2] in members[match[1]], match[0]


def test_every_function_and_column_exists():
    from rlcore.protocol.glossary import fields

    _, names = definitions()
    words = [word for word in quoted(ARCHITECTURE.read_text()) if re.fullmatch(r"[a-z]+(_[a-z]+)+", word)]
    assert len(words) > 20
    assert [word for word in words if word not in names | set(fields())] == []


def test_every_module_exists():
    for word in quoted(ARCHITECTURE.read_text()):
        if re.fullmatch(r"rlcore(\.\w+)+", word):
            path = ROOT / word.replace(".", "/")
            parent, name = path.parent, path.name
            is_module = path.is_dir() or path.with_suffix(".py").exists()
            assert is_module or name in module_names(parent), word


def module_names(path: Path) -> set[str]:
    """Return the names in a module or in a package's own file."""
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return set(re.findall(r"\w+", file.read_text())) if file.exists() else set()
