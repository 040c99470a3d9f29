"""Two evaluations on the same prompts, compared prompt by prompt."""

import math

import pytest

from rlcore.errors import ConfigError
from rlcore.protocol import DataProto
from rlcore.training.compare import differences
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
