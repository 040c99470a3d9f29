"""vLLM whose tensor-parallel ranks are the processes that train, against transformers with whole weights."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


def start(world, result, cases):
    """Run the cases on some ranks, and return what each rank found of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(Path(__file__).with_name("generating.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(world), str(port), str(result), json.dumps(cases)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)[-6000:]
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory, make_model):
    """Training and generation 1-2-1: a tied model, an untied one, and that as a copy that is sent whole weights."""
    folder = tmp_path_factory.mktemp("two")
    tied = str(make_model(folder / "tied", "qwen2", tied=True))
    untied = str(make_model(folder / "untied", "llama", tied=False))
    cases = [{"folder": path, "tp": 2, "shards": 2, "lr": 1e-2} for path in (tied, untied)]
    return start(2, folder / "result.json", [*cases, {**cases[1], "copy": True}])


@pytest.fixture(scope="module")
def four(tmp_path_factory, make_model):
    """Training 1-4-1 at learning rate 0, generation 1-2-2-1 in groups of ranks [0, 2] and [1, 3]."""
    folder = tmp_path_factory.mktemp("four")
    model = str(make_model(folder / "model", "qwen2", tied=False, kv_heads=4))
    return start(4, folder / "result.json", [{"folder": model, "tp": 4, "shards": 2, "lr": 0.0}])


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
        assert "has shape [128, 256], not [128, 128]" in case["whole"]
        assert case["kept"]
        assert "were announced and did not come" in case["broken"]
        assert "sync comes before generate" in case["after"]
        assert case["mended"]


def test_a_closed_engine_leaves_the_default_group_to_training(ranks):
    assert all(case["default_group"] for found in ranks for case in found)
