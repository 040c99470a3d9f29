"""tests/ray_forks.py: Ray's workers are forks, and have what Ray gives a worker (3 s)."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from rlcore.config import ClusterConfig
from rlcore.workers import ClassWithInitArgs, Dispatch, Worker, make_executor, register

pytestmark = pytest.mark.ray


class Process(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def describe(self) -> dict[str, object]:
        parent = Path("/proc", str(os.getppid()), "comm").read_text().strip()
        return {
            "parent": parent,
            "leads its group": os.getpgrp() == os.getpid(),
            "waits for children": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
            "threads": torch.get_num_threads(),
            "has the engine": "rlcore.engine.worker" in sys.modules,
        }


def test_a_worker_is_a_fork_with_the_environment_of_its_pool(ray_cluster: None) -> None:
    with make_executor(
        ClusterConfig(executor="ray", workers=2, cpus_per_worker=3), by_value_modules=[sys.modules[__name__]]
    ) as executor:
        group = executor.worker_group(executor.resource_pool(), ClassWithInitArgs(Process), name="process")
        expected = {
            "parent": "ray_forks",
            "leads its group": True,
            "waits for children": True,
            "threads": 3,
            "has the engine": True,
        }
        assert group.describe() == [expected] * 2
