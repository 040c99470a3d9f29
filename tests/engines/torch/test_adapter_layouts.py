"""An adapter trained under several layouts: what adapter_ranks.py measures on 2 ranks, against one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LAYOUTS = ["shards", "copies", "stages", "tensor"]

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]  # like those it starts several processes


@pytest.fixture(scope="module")
def measured(tmp_path_factory, model_folder):
    """What the first rank of each layout found, by layout; \"one\" is one process."""
    run = subprocess.run(
        [
            sys.executable,
            Path(__file__).with_name("adapter_ranks.py"),
            model_folder(),
            tmp_path_factory.mktemp("ranks"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-8000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_update_is_that_of_one_process(measured, layout):
    one, found = measured["one"], measured[layout]
    for got, want in zip(found["metrics"], one["metrics"], strict=True):
        assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
        assert want["train/grad_norm"] > 0.1
    assert found["weights"] < 1e-5
    assert found["local"]
    assert found["trained"] == found["file"] == one["file"] == one["trained"]
    assert found["targets"] == one["targets"] == sorted(LAYERS)
    assert found["reference"] == pytest.approx(one["reference"], abs=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_of_one_process_goes_on(measured, layout):
    found = measured[layout]
    assert found["restored"] == 0
    assert found["restored sums"]
    assert found["next"] == pytest.approx(measured["one"]["next"], rel=1e-4, abs=1e-6)
