"""Resharding against HybridFlow's Table 2: bytes received, peak of buffers, redundancy, and seconds, on 8 processes."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks.models import write_characters
from benchmarks.report import Bar, Benchmark, DeclaredBar, Figure, at_most
from benchmarks.reshard.cases import LAYOUTS, LIVE

SCRIPT = Path(__file__).with_name("ranks.py")
WORLD, WIDTH, ROUNDS = 8, 512, 6
"""The first round connects the processes and is not timed."""
STRATEGIES = {"hybridflow": "HybridFlow", "model_parallel": "HybridFlow-V", "all_ranks": "DS-Chat"}
MEGA = 2**20
NOTES = """\
8 gloo processes with one thread each, on one machine and {cores} cores. A layout is p-t-d in training and
p_g-t_g-d_g-d in generation (arXiv 2409.19256). Bytes are counted where the engine sends and allocates, on the rank with
the most, as shares of M, the bytes that the training layout divides. After the sign stands the number of Table 2; in
the column `redundant`, where Table 2 has 0 for HybridFlow, the number for an engine that keeps its training shard.

Live switches: each process is an actor (ModelWorker, engine=torch, rollout=hf) of a Qwen2 with 4 layers in fp32,
M = {live_m:.1f} MiB, that takes an optimizer step and then brings the weights to generation. `received`: of what
tensor ranks divide; `peak`: of the buffer, likewise; `redundant`: training weights that lie in memory beside their copy
in the buffer, counted by data pointers, the undivided parameters included. Table 2 has 0 there; a run of rlcore keeps
its fp32 training shard beside the buffer, so this is a cost that rlcore has and the paper's HybridFlow has not. After
the sign stands the rank's training shard, which is held twice. `kernel`: bytes that the kernel received
during the switch, with FSDP's gather along dp (undivided parameters and headers included). `FSDP` in the first column:
training shards cut along dp too. Every generating weight was compared bit for bit with its part of the trained one.

| training | generation | received | peak | redundant | kernel | seconds |
| --- | --- | --- | --- | --- | --- | --- |
{live}

No rollout engine generates on several stages (p_g above 1), so these layouts are below only.

The strategies side by side: shards of four Llama-shaped layers in fp32, M = {m:.1f} MiB, resharded by the class that a
run uses and by the two that Table 2 compares with. Here too the training shards lie in memory of their own. HybridFlow
and HybridFlow-V with dp replicated, DS-Chat with flat shards over all ranks. Seconds: until the slowest rank has all
its shards, medians of {rounds}, the strategies in turn. Every shard of every round is compared bit for bit with the
whole. Times on one machine's loopback say how the strategies compare, not how a network does.

| training | generation | strategy | received | peak | redundant | seconds |
| --- | --- | --- | --- | --- | --- | --- |
{table}

Parameters that tensor ranks do not divide ({norms}) travel only between stages that become one, {others:.1f} KiB a rank
at most in these layouts."""

Case = Mapping[str, Any]


def names(layout: Sequence[int]) -> tuple[str, str]:
    """Return training's p-t-d and generation's p_g-t_g-d_g-d."""
    p, t, d, p_g, t_g = layout
    return f"{p}-{t}-{d}", f"{p_g}-{t_g}-{p * t // (p_g * t_g)}-{d}"


def live_name(layout: Sequence[int]) -> str:
    """Return the name of a live switch: training and generation, and whether shards are cut along dp too."""
    p, t, d, shards, shard = layout
    training, generation = names([p, t, d, 1, shards])
    return f"live {training}{' (FSDP)' if d > 1 and shard == 0 else ''} to {generation}"


def formulas_bar(strategy: str, layout: Sequence[int]) -> DeclaredBar:
    """Declare the bar of one strategy under one layout."""
    return at_most(f"{' to '.join(names(layout))}, {STRATEGIES[strategy]}: bytes off the formulas, worst rank", 0)


def live_bars(layout: Sequence[int]) -> tuple[DeclaredBar, DeclaredBar, DeclaredBar]:
    """Declare the bars of one live switch: bytes off Table 2, bytes held twice, and wrong weights."""
    name = live_name(layout)
    return (
        at_most(f"{name}: bytes off Table 2's received and peak, worst rank", 0),
        at_most(f"{name}: bytes held twice, off those of the training shard", 0),
        at_most(f"{name}: weights that are not the trained ones, bit for bit", 0),
    )


WRONG_SHARDS = at_most("shards that are not those of the whole, bit for bit", 0)
BENCHMARK = Benchmark(
    "reshard",
    measures=(
        *("rlcore/engine/weights", "rlcore/engine/parallel", "rlcore/engine/worker.py"),
        *("rlcore/engines/hf", "rlcore/engines/torch", "benchmarks/reshard", "benchmarks/models.py"),
    ),
    bars=(
        *(formulas_bar(strategy, layout) for layout in LAYOUTS for strategy in STRATEGIES),
        WRONG_SHARDS,
        *(bar for layout in LIVE for bar in live_bars(layout)),
    ),
)


def formulas(strategy: str, layout: Sequence[int]) -> dict[str, Fraction]:
    """Return Table 2's received, peak and redundant bytes of a strategy, as shares of M."""
    p, t, d, p_g, t_g = layout
    if strategy == "hybridflow":
        received, peak = Fraction(t * p - t_g * p_g, t_g * p_g * t * p), Fraction(1, t_g * p_g)
        redundant = Fraction(1, t * p)  # the training shard, which Table 2's engine does not keep (0 there)
    elif strategy == "model_parallel":
        received, peak, redundant = Fraction(t * p - 1, t * p), Fraction(1), Fraction(1, t * p)
    else:
        received, peak, redundant = Fraction(t * p * d - 1, t * p * d), Fraction(1), Fraction(1, t * p * d)
    return {"received": received, "peak": peak, "redundant": redundant}


def run_ranks(script: Path, arguments: Sequence[str]) -> None:
    """Run a script as WORLD ranks. Raises RuntimeError when one fails; its error is printed above."""
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    command = [sys.executable, str(script)]
    processes = [subprocess.Popen([*command, str(rank), str(WORLD), *arguments], env=env) for rank in range(WORLD)]
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise RuntimeError("a rank failed; its error is above")


def ranks(width: int, rounds: int) -> list[dict[str, Any]]:
    """Run the strategies on WORLD processes and return what each rank found."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        run_ranks(SCRIPT, [str(Path(folder) / "store"), str(result), str(width), str(rounds)])
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
    wrong = sum(len(each[kind]["wrong"]) for rank in found for each in cases(rank) for kind in STRATEGIES)
    bars.append(WRONG_SHARDS.at(wrong))
    switches = live(ROUNDS)
    rows = []
    for case in zip(*switches, strict=True):
        row, measured, checks = compare_live(case)
        rows.append(row)
        figures += measured
        bars += checks
    notes = NOTES.format(
        m=whole / MEGA,
        rounds=ROUNDS - 1,
        cores=os.cpu_count(),
        table="\n".join(table),
        norms="norms, tied embeddings",
        others=max(case["hybridflow"]["received"] for rank in found for case in rank["others"]) / 1024,
        live="\n".join(rows),
        live_m=switches[0][0]["divided"] / MEGA,
    )
    return BENCHMARK.write(figures, bars, notes)


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
    return row, figures, formulas_bar(strategy, layout).at(float(off))


def live(rounds: int) -> list[list[dict[str, Any]]]:
    """Start an actor on each of WORLD processes, layout by layout, and return what each rank's meter counted."""
    with tempfile.TemporaryDirectory() as folder:
        write_characters(Path(folder), hidden=256, layers=4, kv_heads=8)
        result = Path(folder) / "result.json"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        run_ranks(SCRIPT.with_name("live.py"), [str(port), str(result), folder, str(rounds)])
        return json.loads(result.read_text())


def compare_live(case: Sequence[Case]) -> tuple[str, list[Figure], list[Bar]]:
    """Return the row, the figures and the bars of one layout's live switch."""
    p, t, d, shards, shard = case[0]["layout"]
    whole, undivided = case[0]["divided"], case[0]["undivided"]
    says = formulas("hybridflow", [p, t, d, 1, shards])
    received = [figures["received"] - figures["undivided_elsewhere"] for figures in case]
    peak = [figures["peak"] - undivided for figures in case]
    held = [figures["training_shard"] for figures in case]
    slowest = [max(times) for times in zip(*(figures["seconds"] for figures in case), strict=True)][1:]
    training, generation = names([p, t, d, 1, shards])
    sharded = " (FSDP)" if d > 1 and shard == 0 else ""
    name = live_name(case[0]["layout"])
    cells = [
        f"{max(received) / whole:.4g} = {says['received']}",
        f"{max(peak) / whole:.4g} = {says['peak']}",
        f"{max(figures['redundant'] for figures in case) / whole:.4g} = {max(held) / whole:.4g}",
        f"{max(figures['kernel'] for figures in case) / whole:.4g}",
        f"{statistics.median(slowest):.3f}",
    ]
    off = max(abs(each - says["received"] * whole) for each in received)
    off = max(off, *(abs(each - says["peak"] * whole) for each in peak))
    wrong = sum(len(figures["wrong"]) for figures in case)
    twice = max(abs(figures["redundant"] - each) for figures, each in zip(case, held, strict=True))
    values = (float(off), float(twice), wrong)
    bars = [bar.at(value) for bar, value in zip(live_bars(case[0]["layout"]), values, strict=True)]
    redundant = [max(figures["redundant"] for figures in case) / MEGA]
    figures = [Figure("live", f"{name}: redundant", "MiB", redundant), Figure("live", f"{name}: switch", "s", slowest)]
    return f"| {' | '.join([training + sharded, generation, *cells])} |", figures, bars
