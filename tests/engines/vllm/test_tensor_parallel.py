"""vLLM whose tensor-parallel ranks are the processes that train, against transformers with whole weights."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def found(tmp_path_factory, make_model):
    """What each of 2 and of 4 ranks found in each of its cases."""
    folder = tmp_path_factory.mktemp("models")
    tied = str(make_model(folder / "tied", "qwen2", tied=True))
    untied = str(make_model(folder / "untied", "llama", tied=False))
    large = str(make_model(folder / "large", "qwen2", tied=False, kv_heads=4))
    two = [{"folder": path, "tp": 2, "shards": 2, "lr": 1e-2} for path in (tied, untied)]
    four = [{"folder": large, "tp": 4, "shards": 2, "lr": 0.0}]
    cases = json.dumps({2: [*two, {**two[1], "copy": True}], 4: four})
    ranks = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("generating.py")), str(folder), cases],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        errors = ranks.communicate(timeout=240)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
    assert ranks.returncode == 0, errors[-6000:]
    return {world: json.loads((folder / f"{world}.json").read_text()) for world in (2, 4)}


@pytest.fixture
def two(found):
    """Training and generation 1-2-1: a tied model, an untied one, and that as a copy that is sent whole weights."""
    return found[2]


@pytest.fixture
def four(found):
    """Training 1-4-1 at learning rate 0, generation 1-2-2-1 in groups of ranks [0, 2] and [1, 3]."""
    return found[4]


@pytest.fixture(params=["two", "four"])
def ranks(request):
    return request.getfixturevalue(request.param)


def check_answers(ranks):
    """Each rank answers as transformers does with the same weights, and all ranks sample the same."""
    for found in ranks:
        for case, first in zip(found, ranks[0], strict=True):
            for version, (figures, firsts) in enumerate(zip(case["rounds"], first["rounds"], strict=True)):
                assert figures["greedy"] == figures["expected"]
                assert figures["gap"] < 1e-4
                assert figures["sampled"] == firsts["sampled"]
                assert figures["versions"] == [version]
                assert figures["differ"] == ""
                assert len({tuple(row) for row in figures["sampled"]}) == 6


def test_two_ranks_answer_as_transformers_does_before_and_after_an_update(two):
    check_answers(two)
    assert all(case["rounds"][0]["greedy"] != case["rounds"][1]["greedy"] for found in two for case in found)


def test_groups_of_ranks_that_are_not_neighbours_answer_as_one_process_does(four):
    check_answers(four)
    for (case,) in four:
        before, after = case["rounds"]
        assert before["greedy"] == after["greedy"]
        assert before["sampled"] == after["sampled"]


def test_weights_come_as_shards_and_nothing_is_kept_beside_vllms(two, four):
    """Received in an update as a share of what tensor ranks divide: hybridflow's (t - t_g) / (t_g t)."""
    assert {case["share"] for found in two for case in found if "share" in case} == {0.0}
    assert {case["share"] for found in four for case in found} == {0.25}
    assert {case["held"] for found in (*two, *four) for case in found if "held" in case} == {0}


def test_a_poisoned_update_is_refused_and_a_broken_one_leaves_an_engine_that_does_not_answer(ranks):
    for case in [case for found in ranks for case in found if "kept" in case]:
        assert "model.layers.1.self_attn.k_proj.weight is missing" in case["missing"]
        assert "q_proj.weight has shape [128, 128], not [" in case["whole"]
        assert case["kept"]
        assert "weights are missing" in case["broken"]
        assert "call sync before the first request" in case["after"]
        assert case["mended"]


def test_a_closed_engine_leaves_the_default_group_to_training(ranks):
    assert all(case["default_group"] for found in ranks for case in found)


def test_processes_that_are_killed_leave_no_shared_memory(ranks):
    assert all(case["shared_memory"] == [] for found in ranks for case in found)
