"""What only the in-process executor does."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

from rlcore.config.schema import ClusterConfig
from rlcore.errors import ConfigError
from rlcore.workers import ClassWithInitArgs, Dispatch, Worker, make_executor, register
from rlcore.workers.in_process import InProcessExecutor

CLUSTER = ClusterConfig(executor="in_process", workers=1)


class Summer(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def total(self, value: float) -> float:
        self.init_process_group()
        self.init_process_group()
        tensor = torch.tensor([value])
        dist.all_reduce(tensor)
        return tensor.item()


def test_one_rank_has_a_process_group_that_goes_with_the_executor() -> None:
    environment = dict(os.environ)
    with make_executor(CLUSTER) as executor:
        group = executor.worker_group(executor.resource_pool(), ClassWithInitArgs(Summer))
        assert group.total(2.5) == [2.5]
        assert dist.is_initialized()
    assert not dist.is_initialized()
    assert dict(os.environ) == environment


GROWTH = """
import ctypes

import torch
from torch.nn.functional import scaled_dot_product_attention

from rlcore.config.schema import ClusterConfig
from rlcore.workers import make_executor

NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


def in_use():
    call = ctypes.CDLL(None).mallinfo2
    call.restype = Mallinfo2
    return call().uordblks / 2**20


def attend(length):
    q, k, v = (torch.randn(1, 2, length, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


with make_executor(ClusterConfig(executor="in_process", cpus_per_worker=1)):
    for length in range(65, 105):
        attend(length)
    before = in_use()
    for length in range(105, 265):
        attend(length)
    print(in_use() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="reads the account of memory of glibc 2.33")
def test_new_lengths_in_bf16_do_not_take_ever_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    ran = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    # MiB for 160 lengths, where a CPU with bf16 units takes 440 without the two bounds and 210 with one of them.
    assert float(ran.stdout) < 50


def test_workers_have_the_threads_that_they_are_given_and_the_process_gets_its_own_back() -> None:
    before = torch.get_num_threads()
    with InProcessExecutor(ClusterConfig(executor="in_process", cpus_per_worker=before + 2)) as executor:
        assert torch.get_num_threads() == before + 2
    assert torch.get_num_threads() == before
    executor.shutdown()
    assert torch.get_num_threads() == before


def test_several_ranks_cannot_communicate() -> None:
    with make_executor(CLUSTER) as executor:
        group = executor.worker_group(executor.resource_pool(2), ClassWithInitArgs(Summer), name="actor")
        with pytest.raises(ConfigError, match=r"runs 2 ranks in turn.*cluster.executor=ray.*\[actor rank 0 of 2"):
            group.total(1.0)
    assert not dist.is_initialized()


def test_it_works_where_ray_is_not_installed() -> None:
    program = """
        import sys
        sys.modules["ray"] = None  # importing it fails, as where it is not installed
        from rlcore.config.schema import ClusterConfig
        from rlcore.workers import ClassWithInitArgs, Dispatch, Worker, make_executor, register

        class Adder(Worker):
            @register(Dispatch.ONE_TO_ALL)
            def add(self, value):
                return value + self.rank

        with make_executor(ClusterConfig(executor="in_process", workers=2)) as executor:
            print(executor.worker_group(executor.resource_pool(), ClassWithInitArgs(Adder)).add(3))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.stdout == "[3, 4]\n", done.stderr


class Placed(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def where(self) -> str:
        return str(self.device)


def test_a_pool_without_gpus_has_workers_on_the_cpu_also_where_others_have_gpus() -> None:
    with make_executor(ClusterConfig(executor="in_process", workers=1, gpus_per_worker=1.0)) as executor:
        on_cpu = executor.worker_group(executor.resource_pool(gpus_per_worker=0.0), ClassWithInitArgs(Placed))
        on_gpu = executor.worker_group(executor.resource_pool(), ClassWithInitArgs(Placed))
        assert on_cpu.where() == ["cpu"]
        assert on_gpu.where() == ["cuda:0"]


@pytest.mark.parametrize("workers", [0, -1])
def test_a_pool_has_workers(workers: int) -> None:
    with make_executor(CLUSTER) as executor, pytest.raises(ConfigError, match="must list the number of processes"):
        executor.resource_pool(workers)
