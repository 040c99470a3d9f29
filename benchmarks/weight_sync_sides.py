"""The two sides of B=weight_sync: rlcore's way from pool to pool, and gloo's broadcast."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.weight_sync import ROUNDS
from rlcore.config import ClusterConfig, EngineConfig, ModelConfig, RolloutConfig
from rlcore.engine.worker import ModelWorker, RoleSetup, SamplingWorker
from rlcore.engines.hf.config import HFConfig
from rlcore.engines.hf.plugin import rlcore_rollout_engines
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.plugin import rlcore_train_engines
from rlcore.plugins import Role
from rlcore.roles.weight_exporter import WeightExporter
from rlcore.workers import ClassWithInitArgs, Dispatch, Executor, Worker, WorkerGroup, make_executor, register


class Broadcaster(Worker):
    """A rank of a gloo group that has parameters of the given shapes."""

    def __init__(self, shapes: list[torch.Size]) -> None:
        self.parameters = [torch.zeros(shape) for shape in shapes]

    @register(Dispatch.ONE_TO_ALL)
    def join(self) -> None:
        """Meet the other ranks."""
        self.init_process_group()

    @register(Dispatch.ONE_TO_ALL)
    def broadcast(self) -> None:
        """Send rank 0's parameters to all."""
        for parameter in self.parameters:
            dist.broadcast(parameter, src=0)


def seconds(call: Callable[[], object]) -> list[float]:
    """Return how long each round but the first took."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times[1:]


def model_workers(executor: Executor, folder: Path, workers: int, *, samples_only: bool) -> WorkerGroup:
    """Start an actor's workers, or those of its copy that samples."""
    role, model = Role(trains=True, generates=samples_only), ModelConfig(path=str(folder))
    setup = RoleSetup(
        role,
        model,
        EngineConfig(),
        RolloutConfig(),
        rlcore_train_engines(),
        rlcore_rollout_engines(),
        TorchConfig(),
        HFConfig(),
        0,
        1,
    )
    kind, name = (SamplingWorker, "sampling") if samples_only else (ModelWorker, "trained")
    group = executor.worker_group(executor.resource_pool(workers), ClassWithInitArgs(kind, setup), name)
    group.start().get()
    return group


def by_rlcore(folder: Path, trained: int, sampling: int) -> list[float]:
    """Return the seconds from the call until the pool that samples has the weights."""
    with make_executor(ClusterConfig(executor="ray", workers=trained + sampling)) as executor:
        actor = model_workers(executor, folder, trained, samples_only=False)
        copy = model_workers(executor, folder, sampling, samples_only=True)
        sender = WeightExporter(actor, torch.float32)
        return seconds(lambda: copy.take_weights(sender.send()).get())


def by_broadcast(shapes: list[torch.Size], sampling: int) -> list[float]:
    """Return the seconds of a broadcast from one process to those that sample."""
    with make_executor(ClusterConfig(executor="ray", workers=1 + sampling)) as executor:
        made = ClassWithInitArgs(Broadcaster, shapes)
        group = executor.worker_group(executor.resource_pool(1 + sampling), made, "broadcast")
        group.join()
        return seconds(group.broadcast)
