"""Runs on a Ray cluster of two nodes, which are two raylets on this machine; many_nodes.py is the program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]  # about 40 s on a quiet machine
PROGRAM = Path(__file__).with_name("many_nodes.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program saw; it cannot share the session's Ray."""
    folder = tmp_path_factory.mktemp("nodes")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    # tests/conftest.py hides GPUs, and Ray starts no node with a GPU that is hidden.
    env.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run([sys.executable, PROGRAM, folder], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_roles_on_two_nodes_take_the_steps_that_they_take_in_one_process(seen: dict[str, Any]) -> None:
    """The reward is the reward model's, and that of a function in a file that the other node cannot import."""
    split, here = seen["split"], seen["here"]
    east, west = ([seen["nodes"][mark]] for mark in ("east", "west"))
    assert split["nodes"] == {"actor": east, "ref": east, "critic": west, "reward_model": west, "reward": west}
    for metrics, expected in zip(split["metrics"], here["metrics"], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert metrics["critic/return"] != 0
    assert metrics["train/grad_norm"] > 0
    assert metrics["loss/kl"] > 0, "the reference stayed behind the actor"


def test_workers_of_a_cluster_get_the_driver_s_variables_but_no_secrets(seen: dict[str, Any]) -> None:
    for name, told in seen["told"].items():
        assert told["node"] == seen["nodes"][name.split()[0]]
        assert (told["variable"], told["secret"], told["threads"]) == ("hello", None, 2)


def test_processes_on_one_place_see_its_gpu_and_others_none(seen: dict[str, Any]) -> None:
    """Ray believes that `west` has one."""
    assert {name: told["gpus"] for name, told in seen["told"].items()} == {"east": "", "west": "0", "west again": "0"}


def test_a_pool_that_is_too_large_for_its_node_says_what_each_node_lacks(seen: dict[str, Any]) -> None:
    asked, *nodes, advice = seen["too large"].splitlines()
    assert asked == (
        "pool side asks for 5 places of 1 CPU on nodes that have 'west', and the nodes have room for 4. The nodes:"
    )
    found = {node.partition("): ")[2] for node in nodes}
    assert found == {
        "4 CPU (4 free), 1 GPU (1 free), west; room for 4",
        "4 CPU (4 free), 0 GPU (0 free), east; lacks 'west'",
    }
    assert advice.startswith("Use fewer workers")


def test_a_lost_node_is_told_by_the_rank_that_was_there(seen: dict[str, Any]) -> None:
    assert "west rank 0 of 1 on " in seen["lost"]["error"]
    assert "died during sleep()" in seen["lost"]["error"]
    assert seen["lost"]["seconds"] < 30


def test_a_column_that_was_on_a_lost_node_is_said_to_be_lost(seen: dict[str, Any]) -> None:
    assert re.match(
        r"column 'wide' from make\(\) of west rank 0 is lost \(2000000 bytes in \d objects\): \w+Error",
        seen["lost"]["column"],
    )


def test_another_node_pulls_the_blocks_that_its_rows_are_in(seen: dict[str, Any]) -> None:
    total, pulled, used = seen["pulled"]
    assert total == 1000 * sum(range(1250, 2500))
    assert used == 1250 * 4000
    assert used <= pulled <= 1.1 * used


def test_no_worker_outlives_a_killed_driver(seen: dict[str, Any]) -> None:
    assert seen["killed"]["workers"] == 3
    assert seen["killed"]["left"] == []
