"""What engines import of rlcore: the public names, and of rlcore's own engines exactly the private ones listed here."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlcore
import rlcore.engine
import rlcore.ops

ROOT = Path(__file__).parents[2]
ENGINES = sorted(path.name for path in (ROOT / "rlcore" / "engines").iterdir() if (path / "plugin.py").is_file())
STRANGERS = sorted((ROOT / "tests" / "fixtures" / "engines").rglob("*.py"))
PUBLIC = {*rlcore.__all__, *rlcore.engine.__all__, *dir(rlcore.ops)}
ADAPTERS = {
    *("AdapterFolder", "WEIGHTS", "adapter_settings", "file_name", "write_adapter_folder"),
    *("LoraLinear", "adapted", "add_adapters", "as_started", "is_part", "merge_adapter", "merged", "merged_weight"),
    *("train_adapters_only", "with_dropout"),
}
PRIVATE = {
    "hf": {
        "FULL_ATTENTION",
        "LoraLinear",
        "adapted",
        "attention_kinds",
        "check_attention",
        "effective_weights",
        "pays_to_compile",
        "plain_attention",
        "plan_of",
        "router_options",
        "stop_window",
    },
    "torch": {
        "FULL_ATTENTION",
        "KINDS",
        *ADAPTERS,
        "attention_kinds",
        "check_attention",
        "check_model_layout",
        "pays_to_compile",
        "plain_attention",
        "router_options",
        "tensor_parallel",
    },
    "vllm": set(),
}
"""Names that an engine of rlcore imports and a plugin may not, by engine. A stranger's engine does without them."""


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Give each name that a file imports of rlcore, with its module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rlcore":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "rlcore")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_of_rlcore_uses_no_other_private_names_than_these_and_no_other_engine(engine):
    private = set()
    for path in (ROOT / "rlcore" / "engines" / engine).rglob("*.py"):
        for module, name in imported(path):
            if module.startswith("rlcore.engines"):
                assert module.startswith(f"rlcore.engines.{engine}"), f"{path.name} imports {module}"
            elif name not in PUBLIC:
                private.add(name)
            elif name in rlcore.engine.__all__:
                # The public name, and no other of the same spelling.
                assert getattr(importlib.import_module(module), name) is getattr(rlcore.engine, name)
    assert private == PRIVATE[engine]


@pytest.mark.parametrize("path", STRANGERS, ids=lambda path: path.name)
def test_an_engine_that_was_written_from_the_page_imports_public_modules_only(path):
    assert {module for module, _ in imported(path)} <= {"rlcore", "rlcore.engine", "rlcore.ops"}


def test_the_page_lists_exactly_the_public_names():
    page = (ROOT / "docs" / "write_an_engine.md").read_text().split("## Public names")[1]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(rlcore.engine.__all__)


def test_type_checkers_read_the_same_names_from_the_same_modules():
    block = next(node for node in ast.parse(Path(rlcore.engine.__file__).read_text()).body if isinstance(node, ast.If))
    # `import a as a` is how a type checker knows a name that is exported.
    read = {alias.asname: node.module for node in block.body for alias in node.names if alias.asname == alias.name}
    assert read == rlcore.engine._HOME_OF
