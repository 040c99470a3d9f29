"""Two evaluations on the same prompts, compared prompt by prompt."""

import math

import pytest

from rlcore.cli import main
from rlcore.errors import ConfigError
from rlcore.protocol import DataProto
from rlcore.training.compare import differences, step_differences
from rlcore.training.evaluate import Evaluation


def evaluation(accuracy, **more):
    """An evaluation whose prompts are numbered."""
    values = {"accuracy": accuracy, **more}
    by_prompt = {
        name: {(f"eval:{number}", 0, f"p{number}"): value for number, value in numbered.items()}
        for name, numbered in values.items()
    }
    return Evaluation({}, DataProto(), by_prompt)


def test_the_difference_is_paired_by_prompt():
    """Prompt 4 and 5 are in one of the two only. Of the differences 0, 1/2, 0, 1/2 the mean is 1/4."""
    first = evaluation({0: 1.0, 1: 0.0, 2: 0.5, 3: 0.0, 4: 0.0})
    second = evaluation({0: 1.0, 1: 0.5, 2: 0.5, 3: 0.5, 5: 1.0})
    found = differences(first, second)["accuracy"]
    assert (found.first, found.second, found.pairs) == (0.375, 0.625, 4)
    # The variance of the differences is 4 * (1/4)^2 / 3, the error its root over sqrt(4).
    error = math.sqrt(1 / 12) / 2
    assert found.difference.error == pytest.approx(error)
    assert found.difference.value == 0.25
    assert found.difference.low == pytest.approx(0.25 - 1.96 * error, abs=1e-4)
    assert found.difference.high == pytest.approx(0.25 + 1.96 * error, abs=1e-4)


def test_equal_evaluations_differ_by_nothing():
    one = evaluation({0: 1.0, 1: 0.0}, **{"pass@2": {0: 1.0, 1: 0.5}})
    found = differences(one, one)
    assert set(found) == {"accuracy", "pass@2"}
    for row in found.values():
        assert (row.difference.value, row.difference.low, row.difference.high, row.difference.error) == (0, 0, 0, 0)


def test_a_metric_of_one_of_the_two_is_left_out():
    first, second = evaluation({0: 1.0, 1: 0.0}, **{"maj@2": {0: 1.0, 1: 1.0}}), evaluation({0: 1.0, 1: 0.0})
    assert set(differences(first, second)) == {"accuracy"}


def test_seats_of_one_game_are_one_cluster():
    values = [{("eval:0", 0, "p"): a, ("eval:0", 1, "p"): a, ("eval:1", 0, "q"): 0.0} for a in (0.0, 1.0)]
    first, second = (Evaluation({}, DataProto(), {"accuracy": each}) for each in values)
    found = differences(first, second)["accuracy"]
    # Deviations from 2/3: 2/3 in the first game and -2/3 in the second. sqrt(2 * (4/9 + 4/9)) / 3.
    assert (found.pairs, found.difference.error) == (2, pytest.approx(4 / 9))


def test_other_prompts_cannot_be_compared():
    with pytest.raises(ConfigError, match=r"share 1 of their prompts \(2 and 2\), and a difference needs two"):
        differences(evaluation({0: 1.0, 1: 0.0}), evaluation({0: 1.0, 2: 0.0}))


def test_training_is_paired_by_step():
    """Of the steps 2 to 5 that both have, 5 has no reward in one, so the differences are 1/4, 1/2 and 0."""
    first = {1: {"reward/mean": 0.0}, **{step: {"reward/mean": 0.25, "reward/accuracy": 0.0} for step in (2, 3, 4, 5)}}
    second = {step: {"reward/mean": reward} for step, reward in ((2, 0.5), (3, 0.75), (4, 0.25), (5, "nan"), (6, 1.0))}
    found = step_differences(first, second)
    assert set(found) == {"reward/mean"}
    row = found["reward/mean"]
    assert (row.first, row.second, row.pairs) == (0.25, 0.5, 3)
    # Deviations from 1/4: 0, 1/4 and -1/4; their variance is 1/16, the error 1/4 over sqrt(3).
    assert row.difference.value == 0.25
    assert row.difference.error == pytest.approx(0.25 / math.sqrt(3))
    assert row.difference.low == pytest.approx(0.25 - 1.96 * 0.25 / math.sqrt(3), abs=1e-4)
    assert step_differences(first, {2: {"reward/mean": None}, 3: {"reward/mean": "?"}, 4: {"reward/mean": 1.0}}) == {}


def write_run(folder, *lines):
    folder.mkdir()
    (folder / "config.yaml").write_text(f"algorithm: grpo\nrun: {{dir: {folder}}}\ntrainer: {{seed: {len(lines)}}}\n")
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


def test_rlcore_compare_reads_two_trainings(tmp_path, capsys):
    """A line that is no JSON, and one whose step is no number, are left out; the last of a step counts."""
    good = ['{"step": 1, "reward/mean": 0.5}', '{"step": 2, "reward/mean": 0.25}']
    first = write_run(tmp_path / "a", *good, "{", '{"step": "2", "reward/mean": 9}')
    second = write_run(tmp_path / "b", '{"step": 1, "reward/mean": 9}', '{"step": 1, "reward/mean": 1}', good[1])
    assert main(["compare", "--training", first, second]) == 0
    printed = capsys.readouterr().out
    assert "A and B differ in trainer.seed\n" in printed
    assert "reward/mean A 0.375    B 0.625    B - A +0.25     95 % interval -0.24 to +0.74" in printed
    assert printed.endswith("(standard error 0.25, 2 steps)\n")
    assert main(["compare", "--training", first, write_run(tmp_path / "c", good[0])]) == 2
    assert "share fewer than two steps with reward/mean or reward/accuracy; they have steps 1 to 2 and 1 to 1" in (
        capsys.readouterr().err
    )
