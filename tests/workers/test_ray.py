"""What only Ray does: real processes that communicate, fail, hang and die."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from rlcore.compat import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, create_colocated_worker_cls
from rlcore.config.schema import ClusterConfig
from rlcore.errors import ConfigError, WorkerError
from rlcore.protocol import DataProto
from rlcore.workers import (
    ClassWithInitArgs,
    Dispatch,
    Executor,
    Worker,
    WorkerGroup,
    make_executor,
    register,
)
from rlcore.workers.ray.executor import start_ray

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


class Member(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def total(self, batch: DataProto) -> float:
        """Sum a column over all ranks with gloo."""
        self.init_process_group(timeout=60)
        value = batch["x"].sum()
        dist.all_reduce(value)
        return value.item()

    @register(Dispatch.ONE_TO_ALL)
    def own_total(self, value: int) -> int:
        """Make the process group as programs do that read the environment."""
        dist.init_process_group("gloo")
        tensor = torch.tensor(value * (self.rank + 1))
        dist.all_reduce(tensor)
        return int(tensor)

    @register(Dispatch.ONE_TO_ALL)
    def wait_for_each_other(self) -> None:
        print(f"rank {self.rank} waits", flush=True)
        if self.rank == 1:
            time.sleep(60)
        dist.barrier()

    @register(Dispatch.ONE_TO_ALL)
    def fail_alone(self) -> None:
        if self.rank == 1:
            raise ValueError("rank 1 gives up")
        dist.barrier()

    @register(Dispatch.RANK_ZERO)
    def sleep_on_rank_zero(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def vanish(self) -> None:
        print("about to leave", flush=True)
        os._exit(7)


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[Executor]:
    cluster = ClusterConfig(executor="ray", workers=2)
    module = sys.modules[__name__]
    with make_executor(cluster, log_dir=tmp_path / "logs", by_value_modules=[module]) as made:
        yield made


def members(executor: Executor, workers: int | None = None) -> WorkerGroup:
    return executor.worker_group(executor.resource_pool(workers), ClassWithInitArgs(Member), name="member")


def after(seconds: float, act: Callable[[], Any]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def test_ranks_reduce_and_a_killed_one_is_named_while_its_peer_waits_in_a_collective(
    executor: Executor, tmp_path: Path
) -> None:
    group = members(executor)
    assert group.total(DataProto.from_dict(tensors={"x": torch.arange(4)})) == [12, 12]
    pid = group.pid()[1]
    after(1.0, lambda: os.kill(pid, signal.SIGKILL))
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.wait_for_each_other()
    assert time.monotonic() - start < 30
    message = str(caught.value)
    assert message.startswith("member rank 1 of 2 on ")
    assert "died during wait_for_each_other(): " in message
    assert "It was killed, ran out of memory" in message
    assert message.endswith(f"Last lines of {tmp_path}/logs/member-1.log:\n    rank 1 waits")
    start = time.monotonic()
    with pytest.raises(WorkerError) as again:
        group.pid()
    assert time.monotonic() - start < 1
    assert again.value is caught.value


def test_a_failure_is_told_while_a_peer_hangs_and_then_the_group_is_of_no_use(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlcore.workers.ray import processes

    monkeypatch.setattr(processes, "STRAGGLER_SECONDS", 2.0)
    group = members(executor)
    assert group.own_total(5) == [15, 15]
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"member rank 1 of 2 .*in fail_alone\(\): ValueError: rank 1 gives up"):
        group.fail_alone()
    with pytest.raises(WorkerError, match=r"(?s)ranks \[0\] did not come back.*The failure was: .*rank 1 gives up"):
        group.pid()
    assert time.monotonic() - start < 15


def test_the_death_of_a_rank_that_a_call_does_not_wait_for_ends_the_call(executor: Executor) -> None:
    group = members(executor)
    pid = group.pid()[1]
    after(0.5, lambda: os.kill(pid, signal.SIGKILL))
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"member rank 1 of 2 .* died during sleep_on_rank_zero\(\)"):
        group.sleep_on_rank_zero(60.0)
    assert time.monotonic() - start < 30


def test_a_worker_that_leaves_is_named_with_its_last_lines(executor: Executor) -> None:
    earlier = set(ray.util.placement_group_table())
    group = members(executor, 1)
    (made,) = set(ray.util.placement_group_table()) - earlier
    assert [bundle["CPU"] for bundle in ray.util.placement_group_table()[made]["bundles"].values()] == [1]
    with pytest.raises(WorkerError, match=r"(?s)member rank 0 of 1 .*died during vanish\(\).*\n    about to leave$"):
        group.vanish()
    executor.shutdown()
    executor.shutdown()
    assert ray.is_initialized(), "the connection to Ray was not this executor's"
    assert ray.util.placement_group_table()[made]["state"] == "REMOVED"


def test_what_ray_lacks_is_told(executor: Executor) -> None:
    """The session's Ray believes in 1024 cores, of which two pools of 600 cannot be had at one time."""
    hasty = make_executor(ClusterConfig(executor="ray", cpus_per_worker=600, start_timeout=1.0))
    with hasty:
        first = hasty.resource_pool(1, name="pool main")
        hasty.resource_pool(1, name="pool side")
        text = "pool main asks for 1 place of 600 CPU; pool side asks for 1 place of 600 CPU; together 176 CPU more"
        with pytest.raises(ConfigError, match=text):
            first.actor_options()
    executor.resource_pool(1, cpus_per_worker=600).actor_options()
    with hasty, pytest.raises(WorkerError) as caught:
        hasty.worker_group(hasty.resource_pool(1), ClassWithInitArgs(Member), name="member")
    message = str(caught.value)
    assert "Ray found no room within 1 s: a pool asks for 1 place of 600 CPU; the free resources have room" in message
    assert re.search(r"\n    \S+ \(\S+\): 1024 CPU \(\d+ free\), 0 GPU .*; lacks \d+ CPU\nUse fewer workers", message)


def test_processes_that_do_not_start_in_time_are_told(executor: Executor) -> None:
    pool = executor.resource_pool(1)
    with (
        make_executor(ClusterConfig(executor="ray", start_timeout=0.01)) as hasty,
        pytest.raises(
            WorkerError, match=r"member: 1 of 1 worker processes \(ranks \[0\]\) did not start within 0.01 s"
        ),
    ):
        hasty.worker_group(pool, ClassWithInitArgs(Member), name="member")


def test_a_node_without_the_right_distribution_is_named() -> None:
    version = importlib.metadata.version("torch")
    executor = make_executor(ClusterConfig(executor="ray"), distributions={"torch": version, "rlcore": "0.0.0"})
    text = (
        r"member rank 0 on .*: rlcore is .* there, and 0.0.0 where the run was started. Install rlcore==0.0.0 on that"
    )
    with executor, pytest.raises(WorkerError, match=text):
        executor.worker_group(executor.resource_pool(1), ClassWithInitArgs(Member), name="member")


@pytest.mark.parametrize(
    ("address", "kind", "text"),
    [
        ("ray://somewhere:10001", ConfigError, "is a Ray Client address"),
        ("127.0.0.1:1", WorkerError, "no Ray answers at cluster.address=127.0.0.1:1"),
    ],
)
def test_addresses_of_no_use(address: str, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        start_ray(address)


# -- the program of verl's tutorial, with its parts filled in


@ray.remote
class SampleGenerator(Worker):
    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"sequences": data["prompts"] + self.config["shift"]})


@ray.remote
class ReferencePolicy(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Identity()

    def split(self: Any, data: DataProto) -> Any:
        return data.chunk(self.world_size)

    def join(self: Any, outputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(outputs)

    @register(dispatch_mode={"dispatch_fn": split, "collect_fn": join})
    def infer(self, data: DataProto) -> torch.Tensor:
        return self.model(data["sequences"]) * 1.0


@ray.remote
class DPOActor(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update(self, data: DataProto) -> None:
        self.steps += len(data["ref_log_prob"])

    @register(Dispatch.ONE_TO_ALL)
    def count(self) -> int:
        return self.steps


@ray.remote(num_cpus=1)
def main_task(config: dict[str, int]) -> tuple[list[float], list[int], list[int]]:
    sample_gen = RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(SampleGenerator, config=config))
    resource_pool = RayResourcePool(process_on_nodes=[1] * 2)
    fused = create_colocated_worker_cls(
        {"ref": RayClassWithInitArgs(ReferencePolicy), "dpo": RayClassWithInitArgs(cls=DPOActor)}
    )
    groups = RayWorkerGroup(resource_pool, fused).spawn(prefix_set={"ref", "dpo"})
    ref_policy, dpo_policy = groups["ref"], groups["dpo"]
    data = DataProto.from_dict(tensors={"prompts": torch.arange(4)})
    output = [sample_gen._workers[i].generate_sequences.remote(part) for i, part in enumerate(data.chunk(1))]
    by_hand = torch.cat([part["sequences"] for part in ray.get(output)])
    data = sample_gen.generate_sequences(data)
    assert by_hand.tolist() == data["sequences"].tolist()
    data.batch["ref_log_prob"] = ref_policy.infer(data)
    dpo_policy.update(data)
    return data["ref_log_prob"].tolist(), data["sequences"].tolist(), dpo_policy.count()


def test_the_program_of_the_verl_tutorial_runs(executor: Executor) -> None:
    log_probs, sequences, counts = ray.get(main_task.remote({"shift": 10}))
    assert log_probs == [10.0, 11.0, 12.0, 13.0]
    assert sequences == [10, 11, 12, 13]
    assert counts == [2, 2]


def test_spawn_of_a_role_that_was_not_fused(executor: Executor) -> None:
    group = RayWorkerGroup.__new__(RayWorkerGroup)
    group._classes = {"actor": ClassWithInitArgs(Member)}
    with pytest.raises(ConfigError, match=r"no role 'actr', only \['actor'\]. Did you mean 'actor'"):
        group.spawn({"actr"})


# -- a driver of its own, with a Ray of its own

RAY_AGENTS = ("ray::DashboardA", "ray::RuntimeEnv")

DRIVER = """
import os, signal, time
from rlcore.config.schema import ClusterConfig
from rlcore.workers import ClassWithInitArgs, Dispatch, Worker, make_executor, register

class Sleeper(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds):
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def save(self):
        return "saved"

if __name__ == "__main__":
    executor = make_executor(ClusterConfig(executor="ray", workers=1))
    signal.signal(signal.SIGTERM, print)
    executor.start()
    assert signal.getsignal(signal.SIGTERM) is print, "the program's own handler stays"
    pools = [executor.resource_pool(), executor.resource_pool()]
    group, *_ = [executor.worker_group(pool, ClassWithInitArgs(Sleeper)) for pool in [*pools, pools[0]]]
    try:
        print("ready", flush=True)
        group.sleep(5)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        print(*group.save(), flush=True)
    time.sleep(60)
"""


def processes_with(mark: str) -> dict[int, str]:
    """Return the processes that have `mark` in their environment, with their names."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "comm").read_text().strip()
            except OSError:  # it ended while we looked
                continue
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
def test_workers_outlive_an_interrupt_and_end_with_a_killed_driver(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    mark = f"rlcore-test-{os.getpid()}-{time.monotonic_ns()}"
    driver = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"RLCORE_TEST_MARK": mark},
        start_new_session=True,
    )
    with driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        time.sleep(0.5)
        start = time.monotonic()
        os.killpg(driver.pid, signal.SIGINT)
        assert driver.stdout.readline() == "interrupted\n"
        assert time.monotonic() - start < 2
        assert driver.stdout.readline() == "saved\n", "behind the call under way, on a worker that was not interrupted"
        assert {"raylet", "gcs_server", "ray::WorkerHost"} <= {name[:15] for name in processes_with(mark).values()}
        assert [name[:15] for name in processes_with(mark).values()].count("ray::WorkerHost") == 3, "on two pools"
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in processes_with(mark)]
        assert not [each for each in commands if "monitor.py" in each], "no run uses Ray's autoscaler and log monitor"
        driver.kill()
        driver.wait()
    # Ray's two idle agents may try for 60 s (fixed in Ray) to report the raylet's death before they end, too
    deadline = time.monotonic() + 20
    while left := {pid: name for pid, name in processes_with(mark).items() if name not in RAY_AGENTS}:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)
    for pid in processes_with(mark):
        os.kill(pid, signal.SIGKILL)
