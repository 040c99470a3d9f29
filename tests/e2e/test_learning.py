"""The quickstart learns: what `make train` runs, with one seed, through Ray on two workers."""

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.ray]


@pytest.mark.parametrize(
    ("overrides", "least"),
    [
        # About 40 s on a quiet machine.
        pytest.param(["trainer.total_steps=50"], 0.65, marks=pytest.mark.timeout(600), id="50 steps"),
        pytest.param([], 0.90, marks=[pytest.mark.slow, pytest.mark.timeout(1200)], id="all steps"),
    ],
)
def test_the_quickstart_raises_held_out_accuracy(ray_cluster, train_here, tmp_path, overrides, least):
    run = train_here(tmp_path / "run", *overrides)
    before, after = run.summary["accuracy_before"], run.summary["accuracy_after"]
    assert before <= 0.40
    assert after >= least
    evaluated = [row for row in run.numbers if "eval/accuracy" in row]
    assert all(row["eval/samples"] >= 256 for row in evaluated)
    assert run.numbers[1]["data/held_out_in_train"] == 0
    # The reward rises because answers get better, not because the model falls silent or is cut off.
    assert run.numbers[-1]["response/mean_length"] > 2
    assert run.numbers[-1]["health/truncated"] < 0.05
