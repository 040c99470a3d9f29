"""MaxRL: its advantages by hand, and what they maximise."""

from itertools import product

import pytest
import torch
from rlcore_plugin_maxrl import MaxRL, MaxRLConfig

from rlcore import DataError, DataProto


def advantages(scores, uid):
    batch = DataProto.from_dict({"scores": torch.tensor(scores)}, {"uid": uid})
    return MaxRL(MaxRLConfig()).with_advantages(None, batch)["advantages"]


def test_advantages_by_hand():
    """Group a: mean 1/4, so 3 and -1 three times. Group b: mean 1/2, so 1 and -1. Equal scores, 0 or not: exactly 0."""
    scores = [1.0, 1.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.1, 0.0, 0.1]
    got = advantages(scores, ["a", "b", "a", "b", "d", "a", "c", "a", "d", "c", "d"])
    assert got.dtype == torch.float32
    assert got.tolist() == [3.0, 1.0, -1.0, -1.0, 0.0, -1.0, 0.0, -1.0, 0.0, 0.0, 0.0]


def test_the_expected_gradient_is_that_of_the_truncated_log_likelihood():
    """Over all outcomes of n samples that succeed with probability p, less the score of the baseline where it acts.

    d/dlogit log p(success) is 1 - p of a success and -p of a failure. sum_{k <= n} pass@k / k has the slope
    sum_k (1 - p)^(k - 1) in p (theorem 2); the baseline, which is absent where nothing succeeds, takes one term of it
    away: the slope in p is that sum up to n - 1.
    """
    n, p = 4, 0.3
    expected = 0.0
    for outcome in product([1.0, 0.0], repeat=n):
        weight = torch.tensor([p if each else 1 - p for each in outcome]).prod()
        slopes = torch.tensor([1 - p if each else -p for each in outcome])
        expected += float(weight * (advantages(list(outcome), ["a"] * n) * slopes).mean())
    in_p = sum((1 - p) ** (k - 1) for k in range(1, n))
    assert expected == pytest.approx(in_p * p * (1 - p), rel=1e-5)


def test_negative_scores_are_refused():
    with pytest.raises(DataError, match=r"a score is -0\.5"):
        advantages([1.0, -0.5], ["a", "a"])
