"""Compares the stored results with the bars that the benchmarks declare and with the code's history; runs nothing."""

from __future__ import annotations

import ast
import datetime
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.report import Benchmark, DeclaredBar

ROOT = Path(__file__).parents[1]
RECORDS = {
    "gpu_before_kernels": "one GPU before the fused kernels",
    "gpu_before_slots": "one GPU before decoding in slots",
}
"""Stored results that are history: no benchmark writes them, and neither bars nor age are checked."""


class NoHistoryError(Exception):
    """Git cannot tell when the code changed."""


def differing_bars(benchmark: Benchmark, stored: Mapping) -> list[str]:
    """Return a line for each bar that only one of program and stored result has, or that they have differently."""
    declared = {bar.name: bar for bar in benchmark.bars}
    found = {bar["name"]: bar for bar in stored["bars"]}
    lines = []
    for name, bar in found.items():
        if name not in declared:
            lines.append(f"{name!r} is stored; the program has no such bar")
            continue
        kept = declared[name].at(bar["value"]).holds
        before = DeclaredBar(name, bar["bound"], bar["at_least"])
        state = f"{bar['value']:.4g} {'holds' if kept else 'does not hold'}"
        if before != declared[name]:
            lines.append(f"{name!r} is {before} in the stored result and {declared[name]} in the program: {state}")
        elif bar["holds"] != kept:
            lines.append(f"{name!r}: holds is {bar['holds']} in the stored result, but by {before}, {state}")
    missing = [bar for name, bar in declared.items() if name not in found]
    return [*lines, *(f"{bar.name!r} {bar} is not in the stored result" for bar in missing)]


@dataclass(frozen=True)
class Change:
    """A commit that changed a file."""

    commit: str
    date: datetime.datetime
    path: str

    def __str__(self) -> str:
        return f"{self.path} changed {self.date.isoformat()} ({self.commit[:9]})"


class History:
    """The commits of the repository of `root`. Raises NoHistoryError where there is no git or not the whole history."""

    def __init__(self, root: Path) -> None:
        self._root = root
        shallow = self._git("rev-parse", "--is-shallow-repository")
        if shallow is None:
            raise NoHistoryError(f"{root} is in no git repository, or git is not installed")
        if shallow.strip() == "true":
            raise NoHistoryError(f"{root} is a shallow clone, without the history of the code")
        if self._git("rev-parse", "HEAD") is None:
            raise NoHistoryError(f"{root} has no commit")
        self._is_code = cache(self._changes_code)

    def _git(self, *words: str) -> str | None:
        """Return git's output, or None when it fails."""
        command = ["git", "-c", "core.quotepath=off", "-C", str(self._root), *words]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return None

    def last_change(self, paths: Sequence[str], measured: datetime.datetime, result: Path) -> Change | None:
        """Return the newest commit that changed code in `paths` after a result was measured, or None.

        That is a commit with a later date, or one merged after the commit that stored the result. The commit that
        stored it does not count: code and its results may be committed together. Nor do changes of docstrings,
        comments and Markdown.
        """
        storing, merged_later = "", set()
        if not self._git("status", "--porcelain", "--", str(result)):
            storing = (self._git("log", "-1", "--format=%H", "--", str(result)) or "").strip()
        if storing:
            merged_later = set((self._git("rev-list", f"{storing}..HEAD") or "").split())
        log = self._git("log", "--no-merges", "--relative", "--name-only", "--format=%x00%H %cI", "--", *paths) or ""
        for entry in log.split("\0")[1:]:
            first, *files = filter(None, entry.splitlines())
            commit, _, date = first.partition(" ")
            changed = datetime.datetime.fromisoformat(date)
            if commit == storing or not (commit in merged_later or changed > measured):
                continue
            for path in files:
                if self._is_code(commit, path):
                    return Change(commit, changed, path)
        return None

    def _changes_code(self, commit: str, path: str) -> bool:
        if path.endswith(".md"):
            return False
        if not path.endswith(".py"):
            return True
        before, after = (self._git("show", f"{at}:./{path}") for at in (f"{commit}^", commit))
        return before is None or after is None or code_of(before) != code_of(after)


def code_of(source: str) -> str:
    """Return Python code without comments, docstrings and layout; the source itself where it is not valid Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def age(benchmark: Benchmark, stored: Mapping, result: Path, history: History) -> str | None:
    """Return what is newer than a result: the code, the benchmark's own program, or both; None if neither is."""
    measured = datetime.datetime.fromisoformat(stored["date"])
    program = [path for path in benchmark.measures if path.startswith("benchmarks/")]
    code = [path for path in benchmark.measures if path not in program]
    changes = [history.last_change(paths, measured, result) for paths in (code, program) if paths]
    if not any(changes):
        return None
    return f"result of {measured.isoformat()}; {', '.join(str(change) for change in changes if change)}"


def check(benchmarks: Iterable[Benchmark], results: Path, root: Path = ROOT, *, every_file: bool = True) -> list[str]:
    """Return a line for each difference between the stored results and the benchmarks: first bars, then age.

    `every_file`: also name files in `results` that belong to no benchmark.
    """
    benchmarks = list(benchmarks)
    bars, ages = [], []
    try:
        history: History | None = History(root)
    except NoHistoryError as error:
        history = None
        ages.append(f"age unknown: {error}")
    for benchmark in benchmarks:
        file = results / f"{benchmark.name}.json"
        if not file.exists():
            bars.append(f"bars differ: {benchmark.name}: there is no stored result")
            continue
        absent = [path for path in benchmark.measures if not (root / path).exists()]
        ages += [f"age unknown: {benchmark.name} measures {path}, which does not exist" for path in absent]
        stored = json.loads(file.read_text())
        bars += [f"bars differ: {benchmark.name}: {line}" for line in differing_bars(benchmark, stored)]
        if history and (line := age(benchmark, stored, file, history)):
            ages.append(f"older than the code: {benchmark.name}: {line}")
    if every_file:
        bars += [f"bars differ: {name} belongs to no benchmark" for name in unknown_files(benchmarks, results)]
    return bars + ages


def unknown_files(benchmarks: Iterable[Benchmark], results: Path) -> list[str]:
    """Return the files in `results` that no benchmark writes and that are not declared as `RECORDS`."""
    known = {f"{name}.{ending}" for name in RECORDS for ending in ("json", "md")}
    for benchmark in benchmarks:
        known |= {f"{benchmark.name}.json", f"{benchmark.name}.md", *(f"{plot}.svg" for plot in benchmark.plots)}
    return sorted(path.name for path in results.iterdir() if path.name not in known)
