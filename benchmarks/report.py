"""How a benchmark's figures are written down: results/NAME.json, and the same as a Markdown table."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(os.environ.get("BENCH_RESULTS", Path(__file__).parent / "results"))
"""Where results are written; `make bench-check` sets another folder."""
DISTRIBUTIONS = ("rlcore", "torch", "transformers", "ray", "tensordict")


@dataclass(frozen=True)
class Figure:
    """One measured quantity of one side, by run; `unit` is for people."""

    side: str
    name: str
    unit: str
    runs: Sequence[float]

    @property
    def summary(self) -> dict[str, object]:
        """Median, minimum, maximum and the runs themselves."""
        median = statistics.median(self.runs)
        return {**asdict(self), "median": median, "min": min(self.runs), "max": max(self.runs)}


@dataclass(frozen=True)
class Bar:
    """A bound that a figure has to keep: `at_least` or at most `bound`. `DeclaredBar.at` makes it."""

    name: str
    value: float
    bound: float
    at_least: bool

    @property
    def holds(self) -> bool:
        """Whether the value keeps the bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


@dataclass(frozen=True)
class DeclaredBar:
    """A bar before there is a value: a benchmark lists these in its `Benchmark`, and fills in values with `at`."""

    name: str
    bound: float
    at_least: bool

    def at(self, value: float) -> Bar:
        """Return the bar with a measured value."""
        return Bar(self.name, value, self.bound, self.at_least)

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:.4g}"


def at_least(name: str, bound: float) -> DeclaredBar:
    """Declare a bar whose value must be `bound` or more."""
    return DeclaredBar(name, bound, at_least=True)


def at_most(name: str, bound: float) -> DeclaredBar:
    """Declare a bar whose value must be `bound` or less."""
    return DeclaredBar(name, bound, at_least=False)


TRAINING = (
    *("rlcore/engine", "rlcore/engines/hf", "rlcore/engines/torch", "rlcore/ops", "rlcore/protocol", "rlcore/roles"),
    *("rlcore/workers", "rlcore/rewards", "rlcore/training/trainer.py", "rlcore/training/run.py"),
)
"""The code that every training run with engine=torch and rollout=hf spends its time in, but for the algorithm."""
GRPO = (*TRAINING, "algorithms/rlcore_grpo.py")


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark's stored results contain. Raises ValueError when two bars have the same name."""

    name: str
    measures: Sequence[str]
    """Files and folders of the code that is measured, and of the benchmark's own program, from the root of the
    repository. Stored results are older than the code when any of these has changed since."""
    bars: Sequence[DeclaredBar] = ()
    plots: Sequence[str] = ()
    """The plots stored with the table, without `.svg`."""
    command: str = ""
    """The command that measures; `make bench B=NAME` where it is left out."""

    def __post_init__(self) -> None:
        names = [bar.name for bar in self.bars]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"benchmark {self.name!r} declares two bars named {', '.join(map(repr, twice))}")

    def write(self, figures: Sequence[Figure], bars: Sequence[Bar], notes: str) -> bool:
        """Write both files, print the table, and return whether all bars hold.

        Raises ValueError, and writes nothing, when a bar is not declared.
        """
        for bar in bars:
            if DeclaredBar(bar.name, bar.bound, bar.at_least) not in self.bars:
                raise ValueError(f"benchmark {self.name!r} does not declare the bar {bar}")
        report = {
            "name": self.name,
            "command": self.command or f"make bench B={self.name}",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            "notes": notes,
            "figures": [figure.summary for figure in figures],
            "bars": [{**asdict(bar), "holds": bar.holds} for bar in bars],
        }
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{self.name}.json").write_text(json.dumps(report, indent=2) + "\n")
        table = markdown(report)
        (RESULTS / f"{self.name}.md").write_text(table)
        print(table)
        return all(bar.holds for bar in bars)


def plot_file(name: str) -> Path:
    """Return where a plot belongs: beside the results."""
    RESULTS.mkdir(exist_ok=True)
    return RESULTS / f"{name}.svg"


def versions() -> dict[str, str]:
    """Return the versions of the distributions that matter, of those that are installed."""
    installed = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def machine() -> dict[str, object]:
    """Return what the figures were measured on."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def markdown(report: Mapping) -> str:
    """Return the report as Markdown."""
    where = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        f"# {report['name']}",
        "",
        report["notes"],
        "",
        f"`{report['command']}`, {report['date']}, {where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, "
        f"Python {where['python']}; {versions}",
        "",
        "| side | figure | median | min | max | runs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["figures"]:
        runs = ", ".join(f"{value:.4g}" for value in row["runs"])
        cells = [row["side"], f"{row['name']} ({row['unit']})", *(f"{row[k]:.4g}" for k in ("median", "min", "max"))]
        lines.append(f"| {' | '.join(cells)} | {runs} |")
    lines += ["", "| bar | value | bound | holds |", "| --- | --- | --- | --- |"]
    for bar in report["bars"]:
        sign = "≥" if bar["at_least"] else "≤"
        lines.append(f"| {bar['name']} | {bar['value']:.4g} | {sign} {bar['bound']:.4g} | {bar['holds']} |")
    return "\n".join(lines) + "\n"
