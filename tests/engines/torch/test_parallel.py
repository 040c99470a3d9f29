"""The same update under every layout: what parallel_ranks.py measures, in up to 8 processes, against one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

LAYOUTS = [(1, 1, 1), (1, 1, 4), (1, 2, 1), (2, 1, 1), (1, 2, 2), (2, 2, 1), (2, 1, 2), (2, 2, 2)]
MODELS = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": False}),
    "qwen2-tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": False, "head_dim": 16}),
    "qwen3-tied": (transformers.Qwen3Config, {"tie_word_embeddings": True, "head_dim": 16}),
}
"""All with grouped-query attention: 4 heads, 2 of keys and values. Three layers are two stages of 2 and 1."""
REPLICATED = [("qwen3-tied", 1, 1, 4, 2), ("qwen3-tied", 2, 1, 2, 1), ("qwen3-tied", 1, 1, 3, 1), ("llama", 1, 1, 2, 1)]
"""Copies of the weights along dp: 2 of 2 shards, 2 of one, and 3 and 2 that are whole."""

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]  # like those it starts many processes


@pytest.fixture(scope="module")
def measured(request, tmp_path_factory, write_random):
    """What every layout that is asked for is off by, by "model pp-tp-dp": a report of each rank."""
    folder = tmp_path_factory.mktemp("parallel")
    for name, (config, options) in MODELS.items():
        write_random(config, {"num_hidden_layers": 3, **options}, folder / name)
    asked = {item.callspec.params["case"] for item in request.session.items if item.path == request.path}
    asked |= {f"{case.split()[0]} 1-1-1" for case in asked}  # what the others are held against
    cases = [[name, str(folder / name), *layout] for name, *layout in ALL if f"{name} {name_of(*layout)}" in asked]
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("parallel_ranks.py"), json.dumps(cases), folder],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-8000:]
    return json.loads(run.stdout.splitlines()[-1])


def name_of(pp, tp, dp, shard=0):
    return f"{pp}-{tp}-{dp}" + (f"-shard{shard}" if shard else "")


ALL = [(model, *layout, 0) for model in MODELS for layout in LAYOUTS] + REPLICATED
ALWAYS, IN_3D = "qwen3-tied", "qwen2"
"""The model whose every layout is measured always, and one, untied and with biases, of which 2-2-2 is."""
CASES = [
    pytest.param(
        f"{model} {name_of(*layout)}",
        marks=[] if model == ALWAYS or (model, layout) == (IN_3D, [2, 2, 2, 0]) else pytest.mark.slow,
    )
    for model, *layout in ALL
]
ACROSS = [case for case in CASES if case.values[0].startswith(f"{ALWAYS} ")]


@pytest.mark.parametrize("case", CASES)
def test_the_update_is_that_of_one_process(measured, case):
    for rank, off in enumerate(measured[case]):
        assert off["metrics"] < 1e-5, (rank, off)  # losses and the global gradient norm, rows uneven and missing
        assert off["gradients"] < 1e-5, (rank, off)
        assert off["sgd"] < 1e-5, (rank, off)  # weights after three clipped steps
        assert off["adamw"] < 1e-5 + 0.01 * 1e-4, (rank, off)  # at a learning rate of 1e-4, absolute
        assert off["computed"] < 1e-4, (rank, off)
        assert off["full"] == off["rollout"] == off["local"] == 1, (rank, off)
        assert off["skipped"] == 1, (rank, off)  # a step with a NaN in one row, on every rank alike


@pytest.mark.parametrize("case", ACROSS)
def test_a_state_goes_on_under_another_layout(measured, case):
    for rank, off in enumerate(measured[case]):
        assert off["loaded"] == 1, (rank, off)
        assert off["next"] < 1e-5, (rank, off)
    first = measured[case][0]
    assert first["there and back"] == 1, "saved by one, loaded and saved under the layout, gone on in one: bit for bit"
    assert first["elsewhere"] < 1e-4, first
    assert first["exported"] == 1
