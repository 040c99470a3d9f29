"""A Ray cluster of two nodes on this machine, and what runs on it: the program that test_many_nodes.py starts.

Nodes: `east`, on which this process is, and `west`. What was seen is printed as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

from rlcore.config.schema import ClusterConfig
from rlcore.errors import ConfigError, WorkerError
from rlcore.protocol import DataProto
from rlcore.protocol.columns import ColumnSpec
from rlcore.workers import ClassWithInitArgs, Dispatch, Executor, Worker, WorkerGroup, make_executor, register
from rlcore.workers.executor import ProcessRequest

PPO = [
    *("algo=ppo", "tracker=none", "data.batch_size=4", "rollout.response_len=5", "engine.lr=1e-3", "algo.kl_coef=0.05"),
    *("trainer.eval_every=0", "trainer.total_steps=2"),
]
SPLIT = (
    "cluster.pools={main: {roles: [actor, ref], node: east}, side: {roles: [critic, reward_model, reward], node: west}}"
)
FAR = "def score(prompt, response, answer, **columns):\n    return 0.25 * len(response)\n"


class Teller(Worker):
    """Tells where it is and what it was started with."""

    @register(Dispatch.ONE_TO_ALL)
    def tell(self) -> dict[str, Any]:
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "variable": os.environ.get("HF_FROM_THE_DRIVER"),
            "secret": os.environ.get("HF_TOKEN"),
            "threads": torch.get_num_threads(),
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, gives={"wide": ColumnSpec.dense(torch.float32, 1000)})
    def make(self, batch: DataProto) -> DataProto:
        return DataProto.from_single_dict({"wide": batch.view("number")[:, None].float().expand(-1, 1000)})

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False)
    def read(self, batch: DataProto) -> tuple[float, int, int]:
        """Return the sum of `wide`, the bytes of the blocks that were fetched for it, and those of its rows."""
        wide = batch.view("wide")
        return float(wide.double().sum()), batch.table.column("wide").nbytes, wide.nbytes

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def tellers(executor: Executor) -> dict[str, WorkerGroup]:
    """Start a teller of two threads on each node, and a second one on the GPU of the first on `west`."""
    east, west = (
        executor.resource_pool(1, cpus_per_worker=2, gpus_per_worker=gpus, node=node)
        for node, gpus in (("east", 0.0), ("west", 1.0))
    )
    requests = [
        ProcessRequest(pool, {name: ClassWithInitArgs(Teller)}, name)
        for name, pool in (("east", east), ("west", west), ("west again", west))
    ]
    return {node: group for groups in executor.worker_groups(requests) for node, group in groups.items()}


def reward_model(folder: Path) -> Path:
    """Write a reward model: the tiny model with a random head."""
    from transformers import AutoModelForSequenceClassification

    from rlcore.assets import TINY

    shutil.copytree(TINY, folder)
    model = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=1, dtype=torch.float32)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.score.weight, std=0.1)
    model.save_pretrained(folder)
    return folder


def two_steps(folder: Path, *overrides: str) -> dict[str, Any]:
    """Return the metrics of two steps of PPO, and the nodes of each role and of the reward functions."""
    from rlcore.config import compose
    from rlcore.data.chat import load_tokenizer
    from rlcore.data.loader import PromptLoader
    from rlcore.plugins import PluginManager
    from rlcore.rewards.compose import resolve
    from rlcore.roles.settings import resolve_roles
    from rlcore.training.run import open_run

    plugins = PluginManager.load()
    model, far = folder / "scorer", folder / "far" / "far.py"
    config = compose([*PPO, f"reward.model={model}", f"reward.functions={{{far}\\:score: 1}}", *overrides], plugins)
    algorithm = plugins.algorithm("ppo").algorithm(config.algo)
    dataset = plugins.datasets()[config.data.name]
    loader = PromptLoader(config.data, dataset, load_tokenizer(config.model), seed=0)
    rewards = resolve(config.reward, dataset.reward, plugins.rewards(), plugins.by_value_modules)
    roles = resolve_roles(algorithm.roles(), config)
    with open_run(config, folder, plugins, roles, rewards, loaders={"train": loader}) as run:
        metrics = []
        for step in (1, 2):
            run.begin_step(step)
            metrics.append(dict(algorithm.step(run, run.next_prompts())))
            run.end_step()
        groups = {name: role.group for name, role in run.roles.items()} | {"reward": run._scorer.workers}
        nodes = {
            name: [info.node for info in getattr(group._processes, "_infos", ())] for name, group in groups.items()
        }
    return {"metrics": metrics, "nodes": nodes}


def killed_driver(address: str) -> dict[str, Any]:
    """Kill a driver with workers on both nodes, and return for how long these outlived it, in seconds."""
    driver = subprocess.Popen([sys.executable, __file__, "driver", address], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = json.loads(driver.stdout.readline())
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    driver.stdout.close()
    start = time.monotonic()
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < start + 60:
        time.sleep(0.1)
    return {"workers": len(pids), "left": left, "seconds": time.monotonic() - start}


def lost_node(cluster: Cluster, node: Any, group: WorkerGroup) -> dict[str, Any]:
    """Take a node away while a call runs there; return what the call says, and after how many seconds.

    And what somebody reads who wants a column that was there.
    """
    made = group.make(DataProto.from_single_dict({"number": torch.arange(500)}))
    group.drain()
    call = group.sleep(100.0)
    time.sleep(1.0)
    start = time.monotonic()
    cluster.remove_node(node, allow_graceful=False)
    try:
        call.get()
    except WorkerError as error:
        told = {"error": str(error), "seconds": time.monotonic() - start}
    try:
        made["wide"]
    except WorkerError as error:
        told["column"] = str(error)
    return told


def main(folder: Path) -> None:
    """Run everything and print what was seen."""
    reward_model(folder / "scorer")
    (folder / "far").mkdir()
    (folder / "far" / "far.py").write_text(FAR)
    seen: dict[str, Any] = {"here": two_steps(folder, "cluster=in_process")}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "resources": {"east": 1}})
    west = cluster.add_node(num_cpus=4, num_gpus=1, resources={"west": 1})
    os.environ |= {"HF_FROM_THE_DRIVER": "hello", "HF_TOKEN": "a secret"}
    joined = ClusterConfig(executor="ray", address=cluster.address)
    hasty = ClusterConfig(executor="ray", address=cluster.address, start_timeout=1.0)
    try:
        seen["split"] = two_steps(
            folder, "cluster=local", "cluster.workers=1", f"cluster.address={cluster.address}", SPLIT
        )
        seen["killed"] = killed_driver(cluster.address)
        with make_executor(joined) as executor:
            seen["nodes"] = {
                next(mark for mark in ("east", "west") if mark in node["Resources"]): node["NodeID"]
                for node in ray.nodes()
            }
            with make_executor(hasty) as other:
                try:
                    other.resource_pool(5, node="west", name="pool side").actor_options()
                except ConfigError as error:
                    seen["too large"] = str(error)
            groups = tellers(executor)
            seen["told"] = {node: group.tell()[0] for node, group in groups.items()}
            rows = DataProto.from_single_dict({"number": torch.arange(5000)})
            (seen["pulled"],) = groups["east"].read(groups["west"].make(rows)[1250:2500]).get()
            seen["lost"] = lost_node(cluster, west, groups["west"])
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(seen))


def drive(address: str) -> None:
    """Start workers on both nodes, print their process ids, and stay."""
    with make_executor(ClusterConfig(executor="ray", address=address)) as executor:
        print(json.dumps([group.tell()[0]["pid"] for group in tellers(executor).values()]), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    if sys.argv[1] == "driver":
        drive(sys.argv[2])
    else:
        main(Path(sys.argv[1]))
