"""What was made on a Ray session that has ended says so; in a process of its own, with Rays of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ray
import torch

from rlcore import DataProto
from rlcore.compat import RayResourcePool, RayWorkerGroup
from rlcore.config.schema import ClusterConfig
from rlcore.errors import WorkerError
from rlcore.workers import ClassWithInitArgs, Dispatch, Worker, make_executor, register
from rlcore.workers.ray.executor import start_ray


class Keeper(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def place(self):
        return self.rank

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def later(self):
        return self.rank

    @register(Dispatch.DP_COMPUTE_PROTO)
    def rows(self, batch):
        return DataProto.from_dict(tensors={"x": torch.zeros(len(batch), 100_000)})


def refused(made, call):
    try:
        call()
    except WorkerError as error:
        assert "Ray session" in str(error) and "has ended" in str(error), error
        assert made in str(error), error
    else:
        raise AssertionError(f"{made}: no error")


if __name__ == "__main__":
    executor = make_executor(ClusterConfig(executor="ray", workers=1))
    executor.start()
    pool, unused = executor.resource_pool(), executor.resource_pool()
    group = executor.worker_group(pool, ClassWithInitArgs(Keeper), name="keeper")
    own_pool = RayResourcePool([1])
    own = RayWorkerGroup(own_pool, ClassWithInitArgs(Keeper), name="own")
    future, rows = group.later(), group.rows(DataProto.from_dict(tensors={"x": torch.arange(2)}))
    read = group.later()
    assert read.get() == [0]

    def all_are_refused():
        refused("keeper: the group", group.place)
        refused("keeper: the group", group.later)
        refused("keeper: the group", future.get)
        refused("keeper: the group", group.processes.spans)
        refused("own: the group", own.place)
        refused("own: the group", own._workers[0].place.remote)
        refused("the executor", executor.resource_pool)
        refused("the executor", lambda: executor.worker_group(pool, ClassWithInitArgs(Keeper)))
        refused("a pool: the pool", lambda: RayWorkerGroup(own_pool, ClassWithInitArgs(Keeper)))
        refused("column 'x'", lambda: rows["x"])
        assert future.done()
        assert read.get() == [0], "what was read is here"

    ray.shutdown()
    all_are_refused()
    assert not ray.is_initialized(), "no call starts another Ray"
    start_ray(None)
    all_are_refused()
    fresh = RayWorkerGroup(RayResourcePool([1]), ClassWithInitArgs(Keeper))
    own.processes.shutdown()
    own_pool.release()
    executor.shutdown()
    executor.shutdown()
    assert fresh.place() == [0], "the executor ended neither the later Ray nor what is on it"
    with executor:
        assert executor.worker_group(executor.resource_pool(), ClassWithInitArgs(Keeper)).place() == [0]
    ray.shutdown()
    fresh.processes.shutdown()
    print("done")
"""


@pytest.mark.ray
def test_what_was_made_on_an_ended_ray_session_says_so_and_shuts_down(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=150)
    assert ran.stdout == "done\n", ran.stderr[-4000:]
