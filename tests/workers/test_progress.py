"""A call that hangs ends the run with the names of its ranks; one that is slow does not."""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from rlcore.config.schema import ClusterConfig
from rlcore.errors import WorkerError
from rlcore.workers import ClassWithInitArgs, Dispatch, Worker, make_executor, register
from rlcore.workers.progress import frames_of, position

LIMIT = 3.0
"""Seconds without progress in these tests."""


class Pair(Worker):
    """Two ranks that meet in a collective; rank 1 does something else first."""

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def start(self, how: str) -> None:
        if how == "hangs" and self.rank == 1:
            time.sleep(100)
        if how == "dies" and self.rank == 1:
            os._exit(3)
        self.init_process_group()

    @register(Dispatch.ONE_TO_ALL)
    def meet(self, how: str) -> int:
        self.init_process_group()
        if self.rank == 1:
            getattr(self, how)()
            if how == "leaves":
                return 0
        total = torch.ones(())
        dist.all_reduce(total)
        return int(total)

    def sleeps(self) -> None:
        time.sleep(100)

    def leaves(self) -> None:
        pass

    def computes(self) -> None:
        end = time.monotonic() + 2.5 * LIMIT
        while time.monotonic() < end:
            torch.ones(4_000_000).exp_()

    def decodes(self) -> None:
        end, row = time.monotonic() + 2.5 * LIMIT, torch.zeros(8)
        while time.monotonic() < end:
            row = torch.nn.functional.softmax(row, 0)

    def spins(self) -> None:
        end = time.monotonic() + 100
        while time.monotonic() < end:
            pass

    def waits_for_a_process(self) -> None:
        code = f"import time\nend = time.monotonic() + {2.5 * LIMIT}\nwhile time.monotonic() < end: pass"
        subprocess.run([sys.executable, "-c", code], check=True)

    def moves_on(self) -> None:
        for _ in range(2):
            time.sleep(0.8 * LIMIT)
            time.sleep(0.8 * LIMIT)

    @register(Dispatch.ONE_TO_ALL)
    def spin_alone(self) -> int:
        end = time.monotonic() + 2.5 * LIMIT
        while time.monotonic() < end:
            pass
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def rest(self) -> int:
        time.sleep(2.5 * LIMIT)
        return self.rank


class AsyncPair(Pair):
    @register(Dispatch.ONE_TO_ALL)
    async def meet_async(self, how: str) -> int:
        await asyncio.sleep(0)
        return self.meet(how)


pytestmark = [pytest.mark.ray, pytest.mark.alone]


@pytest.fixture
def pair(ray_cluster):
    cluster = ClusterConfig(executor="ray", workers=2, stall_timeout=LIMIT)
    with make_executor(cluster, by_value_modules=[sys.modules[__name__]]) as executor:
        yield lambda cls=Pair: executor.worker_group(executor.resource_pool(), ClassWithInitArgs(cls), name="pair")


def test_a_rank_that_hangs_is_named_with_those_that_wait_for_it(pair):
    group, began = pair(), time.monotonic()
    with pytest.raises(WorkerError) as raised:
        group.meet("sleeps")
    told = str(raised.value)
    found = re.match(r"pair\.meet\(\) has made no progress for (\d+) s: pair rank 1 of 2 on ", told)
    assert found, told
    assert LIMIT <= int(found[1]) < 60  # more than LIMIT where a busy machine looks late
    assert " is in sleeps() at " in told
    assert told.index("rank 1 of 2") < told.index("rank 0 of 2")
    assert " is in all_reduce(), called in meet() at " in told
    assert "raise cluster.stall_timeout" in told
    assert time.monotonic() - began < 60  # torch itself would wait for 1,800 s
    with pytest.raises(WorkerError, match="has made no progress"):
        group.rest()


def test_a_rank_that_hangs_in_an_async_method_is_named(pair):
    with pytest.raises(WorkerError) as raised:
        pair(AsyncPair).meet_async("sleeps")
    told = str(raised.value)
    assert told.startswith("pair.meet_async() has made no progress for "), told
    assert " is in sleeps() at " in told
    assert " is in all_reduce(), called in meet() at " in told


def test_a_rank_that_spins_while_others_wait_for_it_is_named(pair):
    group, began = pair(), time.monotonic()
    with pytest.raises(WorkerError) as raised:
        group.meet("spins")
    told = str(raised.value)
    assert re.search(r"pair rank 1 of 2 on \S+ is in spins\(\) at \S+, where it computes; pair rank 0 of 2", told), told
    assert " is in all_reduce(), called in meet() at " in told
    assert time.monotonic() - began < 120


def test_a_rank_that_left_the_others_waiting_is_named(pair):
    with pytest.raises(WorkerError, match=r"pair rank 0 of 2 on .* is in all_reduce\(\).*; ranks \[1\] have ended the"):
        pair().meet("leaves")


def test_a_slow_rank_may_be_waited_for_and_a_call_without_a_collective_may_wait(pair):
    group = pair()
    for how in ("computes", "decodes", "waits_for_a_process", "moves_on"):
        assert group.meet(how) == [2, 2]
    assert group.rest() == [0, 1]
    assert group.spin_alone() == [0, 1]


def test_a_start_may_not_hang(pair):
    with pytest.raises(
        WorkerError, match=r"pair.start\(\) has made no progress .*: pair rank 1 of 2 .* is in start\(\)"
    ):
        pair().start("hangs").get()


def test_a_rank_that_dies_at_start_is_named_at_once(pair):
    group, began = pair(), time.monotonic()
    with pytest.raises(WorkerError, match=r"pair rank 1 of 2 on .* died during start\(\)"):
        group.start("dies").get()
    assert time.monotonic() - began < 30


def test_a_position_is_told_by_its_innermost_frames():
    seen = {}

    def waits(event):
        seen["thread"] = threading.get_ident()
        event.wait()

    event = threading.Event()
    thread = threading.Thread(target=waits, args=[event])
    thread.start()
    while "thread" not in seen:
        time.sleep(0.01)
    time.sleep(0.05)
    frames = frames_of(seen["thread"])
    place, told = position(frames)
    event.set()
    thread.join()
    assert place == "elsewhere"
    assert told.startswith("in wait() at ")
    assert [frame.f_code.co_name for frame in frames[:3]] == ["wait", "wait", "waits"]
    assert position([]) == ("elsewhere", "in a C function")


def test_use_counts_processes_that_were_started():
    program = """
import subprocess, sys, time
from rlcore.workers.progress import usage
code = "import time; end = time.process_time() + 0.5\\nwhile time.process_time() < end: pass\\ninput()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
before, own, end = usage()[0], time.process_time(), time.monotonic() + 60
while usage()[0] - before - (time.process_time() - own) < 0.4 and time.monotonic() < end:
    time.sleep(0.1)
print(usage()[0] - before - (time.process_time() - own))
child.communicate(b"\\n")
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert float(done.stdout) >= 0.4
