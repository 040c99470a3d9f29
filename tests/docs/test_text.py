"""What the pages say in words: links, keys, paths, metrics, names and messages are all there."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest
import rlcore_grpo

from rlcore.config.compose import GROUPS
from rlcore.config.reference import CORE_SECTIONS, group_options, keys
from rlcore.plugins import PluginManager
from rlcore.protocol.glossary import check_fields, fields, render_markdown
from rlcore.training.run import Run

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOREIGN = {"InvalidAuthToken", "clip_grad_norm_", "init_device_mesh"}
"""Names that belong to others and that our code does not hold."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return FENCE.sub("", page.read_text())


def quoted(page: Path) -> list[str]:
    """Return what stands between backticks in a page's prose, links' texts left aside."""
    return re.findall(r"`([^`\n]+)`", prose(page))


# Links


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, made as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        assert not target.startswith("http"), f"{target}: can no test follow; name it in words"
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_every_page_can_be_reached():
    linked = {ROOT / "README.md"}
    for page in PAGES:
        linked |= {(page.parent / file).resolve() for file in re.findall(r"\]\(([^)#]+)", prose(page))}
    assert set(PAGES) <= linked


# Config


@cache
def plugins() -> PluginManager:
    return PluginManager.load()


@cache
def known_keys() -> set[str]:
    """Return all config keys, also the plugins', and GRPO's under `algo`."""
    sections = {**CORE_SECTIONS, "algo": rlcore_grpo.GRPOConfig, **plugins().sections()}
    return {key.name for section, cls in sections.items() for key in keys(section, cls)}


def known_options(group: str) -> set[str]:
    """Return the options of a config group: those of configs/, and the installed plugins'."""
    names = {
        "algo": plugins().algorithms(),
        "data": plugins().datasets(),
        "reward": plugins().rewards(),
        "rollout": plugins().rollout_engines(),
        "engine": plugins().train_engines(),
        "tracker": plugins().trackers(),
    }
    return {*group_options().get(group, ()), *names.get(group, ())}


@each_page
def test_config_keys_exist(page):
    for text in quoted(page):
        match = re.match(rf"({'|'.join(GROUPS)})\.(?!py|json|NAME)(\w+(?:\.\w+)*)(?![\w(])", text)
        first = match[2].partition(".")[0] if match else ""
        if match and match[1] == "run" and (hasattr(Run, first) or first in {*Run.__annotations__, "config", "dir"}):
            continue  # the run that an algorithm's step gets
        assert not match or match[0] in known_keys() or match[2].endswith((".NAME", ".md")), text


@each_page
def test_config_options_exist(page):
    own = {name for page in PAGES for name in re.findall(r"Spec\(\"(\w+)\"", page.read_text())}
    for text in quoted(page):
        for group, name in re.findall(rf"(?<![\w.])({'|'.join(GROUPS)})=([a-z]\w*)", text):
            assert name in known_options(group) | own, text


# Files and metrics


@pytest.mark.e2e
@each_page
def test_paths_exist(page, seen):
    rooms = {path.name for path in ROOT.iterdir()} - {"runs"}  # there where commands were run, as those of the pages
    for text in quoted(page):
        if text.startswith(("RUN/logs", "RUN/micro_batches.json")):
            continue  # only on Ray, and only with a GPU
        if text.startswith("RUN/"):
            assert (seen.folder / text.removeprefix("RUN/")).exists(), text
        elif re.fullmatch(r"[\w.*/-]+", text) and "/" in text and text.split("/")[0] in rooms:
            assert list(ROOT.glob(text.rstrip("/"))), text


@pytest.mark.e2e
@each_page
def test_metrics_exist(page, seen):
    kinds = {name.partition("/")[0] for name in seen.metrics if "/" in name}
    for text in quoted(page):
        kind, _, name = text.partition("/")
        if kind in kinds and re.fullmatch(r"[a-z_@]+", name):
            assert text in seen.metrics, text


# Names


@cache
def tokens() -> set[str]:
    """Return all words of the sources, of the pages' own code, and the names of the benchmarks."""
    sources = [path for room in ("rlcore", "algorithms", "configs", "plugins") for path in (ROOT / room).rglob("*.py")]
    texts = [
        path.read_text()
        for path in [*sources, ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / "benchmarks/__main__.py"]
    ]
    texts += [text for page in PAGES for _, text in FENCE.findall(page.read_text())]
    return {word for text in texts for word in re.findall(r"\w+", text)}


@each_page
def test_names_exist(page):
    """Each word in backticks that looks like a name of code (snake_case or CamelCase) stands in the sources."""
    for text in quoted(page):
        if "/" in text:
            continue  # a path or a metric
        for word in re.findall(r"[A-Za-z_]\w+", text):
            if re.search(r"[a-z]_[a-z]|[a-z][A-Z]", word) and word not in FOREIGN:
                assert word in tokens(), f"{word!r} in {text!r}"


@pytest.mark.parametrize("module", ["", ".ops", ".workers", ".engine", ".planning", ".compat"])
def test_every_public_name_is_on_a_page(module):
    on_pages = set(re.findall(r"\w+", "".join(page.read_text() for page in PAGES)))
    public = importlib.import_module(f"rlcore{module}").__all__
    assert [name for name in public if name not in on_pages] == []


# Messages


@cache
def raised() -> list[str]:
    """Return all texts of the sources, with NUL where a value goes."""
    found = []
    for path in (ROOT / "rlcore").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_are_those_that_the_code_raises():
    page = (ROOT / "docs" / "debugging.md").read_text()
    messages = re.findall(r"^```text message\n(.*?)\n```$", page, re.MULTILINE)
    assert len(messages) > 20
    everything = "\1".join(raised())
    for message in messages:
        parts = [part.strip(" '\":") for part in re.split(r"\b(?:[A-Z]{2,}|N)\b|'", message)]
        parts = [part for part in parts if len(part) > 3]
        assert max(map(len, parts)) >= 10, f"{message!r} holds no words to find it by"
        missing = [part for part in parts if part not in everything]
        assert not missing, f"{message!r}: nothing in rlcore says {missing}"


# The glossary


def test_glossary_page_is_current():
    assert (ROOT / "docs" / "glossary.md").read_text() == render_markdown(), "python -m rlcore.protocol.glossary"


@pytest.mark.e2e
def test_glossary_declares_every_column_of_a_step(seen):
    """`score/NAME` stands for a column of each reward. The data set's own columns are no fields of the core."""
    declared = {*fields(), *("chosen", "rejected", "completion", "label")}
    assert {name for name in seen.batch.keys() if not name.startswith("score/")} <= declared  # noqa: SIM118
    assert {"score/arithmetic", "score/gsm8k_flexible"} <= set(seen.batch.keys())
    assert "score/NAME" in declared
    check_fields(seen.batch)
