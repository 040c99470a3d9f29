"""The check of a train engine on two ranks, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlcore import POLICY
from rlcore.engine import Ranks
from rlcore_plugin_testing.report import CheckFailed, NotApplicable
from rlcore_plugin_testing.train_engine.suite import LINEAR, TrainEngineSuite, expect_equal, expect_near, weights_of

LAYOUTS: dict[str, dict[str, Any]] = {"dp": {}, "tp": {"tp": 2}, "pp": {"pp": 2}}
"""The layouts of two ranks, as keys of `engine`; what they leave is data-parallel."""
SHARES = {"uneven rows": 8, "no rows on one rank": 12}
"""How many of 12 rows the first data-parallel rank gets, where there are two."""
SECONDS = 300


def ranks(suite: TrainEngineSuite) -> str:
    """On two ranks, under each layout, an update is that of one; a data-parallel rank may have no rows at all."""
    if not suite.spec.capabilities.layouts:
        raise NotApplicable("its capabilities have no layouts, so it runs in one process")
    suite.model(POLICY)
    reference = suite.reference(**LINEAR)
    start = reference.weights
    reference.step([suite.item()], LINEAR["lr"])
    results = _in_two_processes(_Job(suite.name, suite.folder, tuple(suite.settings), tuple(suite.plugins)))
    worst = 0.0
    for title, weights in results.items():
        worst = max(worst, expect_near(weights, reference.weights, start, title, 2e-5))
    whole = suite.engine(**LINEAR)
    whole.restore(suite.folder / "two-ranks")
    expect_equal(weights_of(whole), results["dp, uneven rows"], "a state saved by two ranks and restored by one")
    return f"{'; '.join(results)}; off by at most {worst:.1g}"


@dataclass(frozen=True)
class _Job:
    """The arguments with which a process builds the suite again."""

    name: str
    folder: Path
    settings: Sequence[str]
    plugins: Sequence[str]


def _in_two_processes(job: _Job) -> dict[str, Any]:
    """Return the weights after one update under each layout, as rank 0 exported them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")  # one import serves all processes
    context.set_forkserver_preload([__name__, "torch.distributed.fsdp", "transformers.models.auto.modeling_auto"])
    started = [context.Process(target=_rank_main, args=(rank, port, job, os.getcwd())) for rank in range(2)]
    for process in started:
        process.start()
    try:
        for process in started:
            process.join(SECONDS)
        failed = [path.read_text() for path in sorted(job.folder.glob("rank-*.error"))]
        if failed:
            raise CheckFailed(f"on two ranks it failed: {failed[0]}")
        if any(process.exitcode != 0 for process in started):
            raise CheckFailed(f"on two ranks it did not end in {SECONDS} s; do both ranks join the same collectives?")
    finally:
        for process in started:
            process.kill()
            process.join()
    return dict(torch.load(job.folder / "two-ranks.pt", weights_only=True))


def _rank_main(rank: int, port: int, job: _Job, where: str) -> None:
    os.chdir(where)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    suite = TrainEngineSuite(job.name, job.folder, {}, settings=job.settings, plugins=job.plugins)
    try:
        weights = _updates(suite, Ranks(rank, 2))
        if rank == 0:
            torch.save(weights, job.folder / "two-ranks.pt")
    except Exception as error:
        text = f"{type(error).__name__}: {error} {traceback.format_exc()[-300:]}"
        (job.folder / f"rank-{rank}.error").write_text(text)
    finally:
        dist.destroy_process_group()


def _updates(suite: TrainEngineSuite, ranks: Ranks) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for layout, keys in LAYOUTS.items():
        shares = SHARES if layout == "dp" else {"all rows": 12}
        for share, rows in shares.items():
            engine = suite.engine(ranks=ranks, micro_batch_rows=5, **keys, **LINEAR)
            item = suite.item()
            mine = item.batch[:rows] if engine.layout.coordinates(ranks.rank).dp == 0 else item.batch[rows:]
            engine.update([replace(item, batch=mine, sizes=[len(mine)])], epochs=1, step=0)
            results[f"{layout}, {share}"] = weights_of(engine)
            if share == "uneven rows":
                engine.save(suite.folder / "two-ranks")
    return results
