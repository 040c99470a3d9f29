"""The data plane against its bars: batches by reference, the plain way and verl's; calls, rows, overlap, and steps."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.data_plane import steps
from benchmarks.report import GRPO, Bar, Benchmark, Figure, at_least, at_most

HERE = Path(__file__).parent
VERL = HERE.parents[1] / ".venv-verl" / "bin" / "python"
MEGABYTES = 256
ROUNDS = {2: 5, 3: 2}
"""How often the batch is moved, to so many consumers."""
PLAIN = ("plain jagged default", "plain jagged zero_copy")
"""The plain way in its two best forms; padded TensorDicts take three times as long."""
PEERS = {
    **dict.fromkeys(PLAIN, "plain_ray.py"),
    **dict.fromkeys(("verl padded default", "verl padded numpy"), "verl_path.py"),
}
CONSUMERS = (2, 3, 5)
"""Numbers of consumers whose pulls are counted."""
FASTER = at_least("256 MiB, 4 to 2: times faster than the better plain one", 5.0)
PASSED = at_most("share that passes through the controller", 0.01)
GROWN = at_most("growth of the controller's memory", 0.05)
PULLED, TOUCHED = (
    {count: at_most(f"4 to {count}: pulled, of what is used, worst consumer ({counted})", 1.1) for count in CONSUMERS}
    for counted in ("blocks", "pages touched")
)
SMALL_CALLS = at_most("small batches: times as long as plain calls", 1.3)
METADATA = at_most("metadata alone (s)", 0.05)
OVERLAP = at_most("both, of the longer", 1.15)
STEP = at_most("a step of the quickstart, of the same before", 1.0)
BENCHMARK = Benchmark(
    "data_plane",
    measures=(*GRPO, "benchmarks/data_plane"),
    bars=(FASTER, PASSED, GROWN, *PULLED.values(), *TOUCHED.values(), SMALL_CALLS, METADATA, OVERLAP, STEP),
)
NOTES = """\
One machine, every process with one thread. Moving a batch: 4 producers hold 3,840 rows of 256 MiB (ragged int64 tokens,
eight ragged columns, three dense ones); from the call of the producers until the consumers have summed all their rows.
`plain`: actors return TensorDicts, the controller joins them with TensorDict.cat, cuts them with chunk and passes the
chunks to actors; jagged is without padding, zero_copy is RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1. `verl`: verl 0.9.1's
worker groups, DataProto and DP_COMPUTE_PROTO, padded as its trainer pads, pickled by default or as `numpy`. The bar
compares with the faster plain one. rlcore and one peer at a time run in turn, each with a
Ray of its own, and agree on the sums."""


class Side:
    """A side of the comparison: a process that answers requests."""

    def __init__(self, script: str, *arguments: str, python: Path | str = sys.executable) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(HERE)}
        self._name = " ".join([script, *arguments])
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  (closed with this object)
        self._process = subprocess.Popen(
            [str(python), str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            text=True,
            env=env,
        )
        while self._read("to start") != "ready\n":  # Ray may print something first
            continue

    def ask(self, do: str, **values: Any) -> Any:
        """Return the answer to a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._read(do))

    def _read(self, what: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._printed.seek(0)
            printed = self._printed.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"{self._name} was asked {what}, and ended with {status}:\n{printed}")
        return line

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> bool:
    """Measure everything and write the results."""
    figures: list[Figure] = []
    bars: list[Bar] = []
    for measure in (moving, small_calls, choosing_rows, overlap, quickstart):
        measured, kept = measure()
        figures += measured
        bars += kept
        for bar in kept:
            print(f"{bar.name}: {bar.value:.4g} (bound {bar.bound:g})", flush=True)
    return BENCHMARK.write(figures, bars, NOTES)


def moving(megabytes: float = MEGABYTES, rounds: Mapping[int, int] = ROUNDS) -> tuple[list[Figure], list[Bar]]:
    """Move the batch from 4 producers to each number of consumers, so often, by every side in turn."""
    size = megabytes * 2**20
    seconds: dict[tuple[str, int], list[float]] = {}
    others: dict[str, Any] = {}
    with Side("by_reference.py", str(megabytes)) as ours:
        for name, script in PEERS.items():  # one peer at a time: their processes idle, but they take memory
            python = VERL if script == "verl_path.py" else sys.executable
            with Side(script, *name.split()[1:], str(megabytes), python=python) as peer:
                alternate({"rlcore": ours, name: peer}, rounds, seconds)
                others[name] = peer.ask("move", consumers=2, watch=True)
        watched = {}
        for count in CONSUMERS:
            ours.ask("move", consumers=count)
            watched[count] = ours.ask("move", consumers=count, watch=True)
    figures, bars = [], []
    for (name, count), runs in seconds.items():
        figures.append(Figure(name, f"4 producers to {count} consumers", "s", runs))
    plain = min(statistics.median(seconds[name, 2]) for name in PLAIN)
    times = plain / statistics.median(seconds["rlcore", 2])
    bars.append(FASTER.at(times))
    for name, answer in {"rlcore": watched[2], **others}.items():
        figures.append(Figure(name, "through the controller", "share of the payload", [answer["passed"] / size]))
        figures.append(
            Figure(name, "private memory of the controller", "share of the payload", [answer["grown"] / size])
        )
    bars.append(PASSED.at(watched[2]["passed"] / size))
    bars.append(GROWN.at(watched[2]["grown"] / size))
    for count, answer in watched.items():
        bars += [PULLED[count].at(answer["pulled"]), TOUCHED[count].at(answer["touched"])]
    return figures, bars


def alternate(
    sides: Mapping[str, Side], rounds: Mapping[int, int], seconds: dict[tuple[str, int], list[float]]
) -> None:
    """Move the batch by each side in turn, and add the seconds of each to those of its name and number of consumers."""
    for count, times in rounds.items():
        for number in range(times + 1):  # the first starts the consumers
            answers = {name: side.ask("move", consumers=count) for name, side in sides.items()}
            if len({round(answer["sum"]) for answer in answers.values()}) > 1:
                raise RuntimeError(f"the sides disagree on what was moved: {answers}")
            for name, answer in answers.items() if number else ():
                seconds.setdefault((name, count), []).append(answer["seconds"])


def small_calls(rounds: int = 60) -> tuple[list[Figure], list[Bar]]:
    """Send six small columns to 8 workers and read what they return."""
    with Side("small.py") as side:
        side.ask("call", rounds=10)
        times = side.ask("call", rounds=rounds)
    names = {"rlcore": "rlcore", "plain": "plain Ray, numpy"}
    figures = [summed(side, "six small columns, 8 workers, in and out", times[key]) for key, side in names.items()]
    figures += [summed(side, "empty call to 8 workers", times[f"{key}_empty"]) for key, side in names.items()]
    ratio = statistics.median(times["rlcore"]) / statistics.median(times["plain"])
    return figures, [SMALL_CALLS.at(ratio)]


def choosing_rows(rounds: int = 9) -> tuple[list[Figure], list[Bar]]:
    """Choose rows of 4,096 shards of 20 columns by reference."""
    from benchmarks.data_plane import metadata

    batch = metadata.make()
    times = [metadata.seconds(batch, seed) for seed in range(rounds)]
    figure = summed("rlcore", "repeat, reorder, chunk of 4,096 shards and 20 columns", times)
    return [figure], [METADATA.at(statistics.median(times))]


def overlap(rounds: int = 9) -> tuple[list[Figure], list[Bar]]:
    """Run the reference and the critic at once, and each alone."""
    with tempfile.TemporaryDirectory() as folder, Side("overlap.py", folder) as side:
        side.ask("call", rounds=2)
        times = side.ask("call", rounds=rounds)
    figures = [summed("rlcore", f"{way}, on pools of their own", runs) for way, runs in times.items()]
    longer = max(statistics.median(times["ref"]), statistics.median(times["critic"]))
    return figures, [OVERLAP.at(statistics.median(times["both"]) / longer)]


def quickstart(rounds: int = 3) -> tuple[list[Figure], list[Bar]]:
    """Run steps of the quickstart now and before, in turn."""
    times: dict[str, list[float]] = {"now": [], "before": []}
    with tempfile.TemporaryDirectory() as place:
        packages = {"now": None, "before": steps.install_before(Path(place))}
        for number in range(rounds):
            for name, package in packages.items():
                times[name].append(steps.seconds_a_step(Path(place) / f"{name}-{number}", package))
    sides = {"now": "rlcore", "before": f"rlcore {steps.BEFORE}"}
    figures = [Figure(sides[name], "a step of the quickstart", "s", runs) for name, runs in times.items()]
    ratio = statistics.median(times["now"]) / statistics.median(times["before"])
    return figures, [STEP.at(ratio)]


def summed(side: str, name: str, runs: Sequence[float]) -> Figure:
    """Return a figure of many short runs, of which nine stand for all: evenly spaced by size, the median among them."""
    ordered = sorted(runs)
    return Figure(side, name, "ms", [1000 * ordered[round(i * (len(ordered) - 1) / 8)] for i in range(9)])
