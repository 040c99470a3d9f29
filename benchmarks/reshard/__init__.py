"""Resharding against HybridFlow's Table 2: bytes received, peak of buffers, redundancy, and seconds, on 8 processes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks.report import Bar, Figure, write

SCRIPT = Path(__file__).with_name("ranks.py")
WORLD, WIDTH, ROUNDS = 8, 512, 6
"""The first round connects the processes and is not timed."""
STRATEGIES = {"hybridflow": "HybridFlow", "model_parallel": "HybridFlow-V", "all_ranks": "DS-Chat"}
MEGA = 2**20
NOTES = """\
8 gloo processes with one thread each, on one machine; four Llama-shaped decoder layers in fp32, M = {m:.1f} MiB. A
layout is p-t-d in training and p_g-t_g-d_g-d in generation (arXiv 2409.19256). Bytes are counted by the engine where it
sends and allocates, on the rank with the most, as shares of M; after the sign, what Table 2 says. `received`: from
other ranks; `peak`: of the transition's buffers; `redundant`: training shards beside what generation uses. HybridFlow
and HybridFlow-V with dp replicated, DS-Chat with flat shards over all ranks. Seconds: until the slowest rank has all
its shards, medians of {rounds}, the strategies in turn. Every shard of every round is compared bit for bit with the
whole. Times on one machine's loopback and {cores} cores say how the strategies compare, not how a network does.

| training | generation | strategy | received | peak | redundant | seconds |
| --- | --- | --- | --- | --- | --- | --- |
{table}

What tensor ranks do not divide ({norms}) travels only between stages that become one, {others:.1f} KiB a rank at most
in these layouts. Training shards that are cut along dp as well (FSDP) take one more gather first:

| training | generation | received along dp | after it | peak |
| --- | --- | --- | --- | --- |
{sharded}

Row-wise weights (`o_proj`, `down_proj`) lie transposed in the buffer, so that no strategy copies them; an engine that
wants their rows together takes a copy of {copied:.4f} M at 1-4-2 to 1-2-2-2, one weight at a time ({largest:.4f} M more
at the peak). Weights that an engine fuses (qkv, gate and up) are neighbours there, one matrix as they lie: no copy."""

Case = Mapping[str, Any]


def formulas(strategy: str, layout: Sequence[int]) -> dict[str, Fraction]:
    """Return Table 2's received, peak and redundant bytes of a strategy, as shares of M."""
    p, t, d, p_g, t_g = layout
    if strategy == "hybridflow":
        received, peak, redundant = Fraction(t * p - t_g * p_g, t_g * p_g * t * p), Fraction(1, t_g * p_g), Fraction(0)
    elif strategy == "model_parallel":
        received, peak, redundant = Fraction(t * p - 1, t * p), Fraction(1), Fraction(1, t * p)
    else:
        received, peak, redundant = Fraction(t * p * d - 1, t * p * d), Fraction(1), Fraction(1, t * p * d)
    return {"received": received, "peak": peak, "redundant": redundant}


def ranks(width: int, rounds: int) -> list[dict[str, Any]]:
    """Run all cases on WORLD processes and return what each rank found."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        arguments = [str(WORLD), str(Path(folder) / "store"), str(result), str(width), str(rounds)]
        env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        command = [sys.executable, str(SCRIPT)]
        processes = [subprocess.Popen([*command, str(rank), *arguments], env=env) for rank in range(WORLD)]
        statuses = [process.wait() for process in processes]
        if any(statuses):
            raise RuntimeError("a rank failed; what it said is above")
        return json.loads(result.read_text())


def main() -> bool:
    """Measure every layout and write the results."""
    found = ranks(WIDTH, ROUNDS)
    whole = found[0]["layouts"][0]["all_ranks"]["peak"]
    figures: list[Figure] = []
    bars: list[Bar] = []
    table: list[str] = []
    for case in zip(*(each["layouts"] for each in found), strict=True):
        for strategy in STRATEGIES:
            row, measured, bar = compare(strategy, case, whole)
            table.append(row)
            figures += measured
            bars.append(bar)
    sharded = []
    for case in zip(*(each["sharded"] for each in found), strict=True):
        row, bar = along_dp(case, whole)
        sharded.append(row)
        bars.append(bar)
    wrong = sum(len(each[kind]["wrong"]) for rank in found for each in cases(rank) for kind in STRATEGIES)
    wrong += sum(len(each["wrong"]) for rank in found for each in [*rank["sharded"], rank["row_major"]])
    bars.append(Bar("shards that are not those of the whole, bit for bit", wrong, 0, at_least=False))
    copies = found[0]["row_major"]
    notes = NOTES.format(
        m=whole / MEGA,
        rounds=ROUNDS - 1,
        cores=os.cpu_count(),
        table="\n".join(table),
        norms="norms, tied embeddings",
        others=max(case["hybridflow"]["received"] for rank in found for case in rank["others"]) / 1024,
        sharded="\n".join(sharded),
        copied=copies["copied"] / whole,
        largest=(copies["peak"] - copies["held"]) / whole,
    )
    return write("reshard", "make bench B=reshard", figures, bars, notes)


def cases(rank: Case) -> list[Case]:
    """Return what a rank found under all layouts."""
    return [*rank["layouts"], *rank["others"]]


def compare(strategy: str, case: Sequence[Case], whole: int) -> tuple[str, list[Figure], Bar]:
    """Return the table's row, the figures and the bar of one strategy under one layout, from what every rank found."""
    layout = case[0]["layout"]
    counts = {key: [figures[strategy][key] for figures in case] for key in ("received", "peak", "redundant")}
    says = formulas(strategy, layout)
    off = max(abs(count - share * whole) for key, share in says.items() for count in counts[key])
    slowest = [max(times) for times in zip(*(figures[strategy]["seconds"] for figures in case), strict=True)][1:]
    cells = [f"{max(counts[key]) / whole:.4g} = {share}" for key, share in says.items()]
    seconds = f"{statistics.median(slowest):.3f}"
    row = f"| {' | '.join([*names(layout), STRATEGIES[strategy], *cells, seconds])} |"
    name = " to ".join(names(layout))
    figures = [Figure(STRATEGIES[strategy], f"{name}: {key}", "MiB", [max(counts[key]) / MEGA]) for key in says]
    figures.append(Figure(STRATEGIES[strategy], f"{name}: until all shards are there", "s", slowest))
    bar = Bar(f"{name}, {STRATEGIES[strategy]}: bytes off Table 2, worst rank", float(off), 0, at_least=False)
    return row, figures, bar


def along_dp(case: Sequence[Case], whole: int) -> tuple[str, Bar]:
    """Return the row and the bar of a layout whose training shards are cut along dp, from what every rank found."""
    layout = case[0]["layout"]
    p, t, d, *_ = layout
    rest = formulas("hybridflow", layout)
    says = {"extra": Fraction(d - 1, d * p * t), "received": rest["received"], "peak": rest["peak"]}
    off = max(abs(figures[key] - share * whole) for figures in case for key, share in says.items())
    cells = [f"{max(figures[key] for figures in case) / whole:.4g} = {share}" for key, share in says.items()]
    name = " to ".join(names(layout))
    bar = Bar(f"{name}, shards along dp: bytes off (d - 1) / (p t d) and Table 2", float(off), 0, at_least=False)
    return f"| {' | '.join([*names(layout), *cells])} |", bar


def names(layout: Sequence[int]) -> tuple[str, str]:
    """Return training's p-t-d and generation's p_g-t_g-d_g-d."""
    p, t, d, p_g, t_g = layout
    return f"{p}-{t}-{d}", f"{p_g}-{t_g}-{p * t // (p_g * t_g)}-{d}"
