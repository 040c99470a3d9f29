"""Importance weights, and the difference between two policies, by hand."""

import math

import pytest
import torch

from rlcore.ops import importance_weights, sequence_ratio, train_rollout_logprob_diff

# Ratios pi / b of two rows; the last token of the second row does not count.
RATIOS = torch.tensor([[2.0, 0.5, 3.0], [1.0, 0.25, 9.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
ROLLOUT = torch.full((2, 3), -1.5)
POLICY = ROLLOUT + RATIOS.log()


def test_the_ratio_of_a_sequence_is_the_geometric_mean():
    """(2 * 0.5 * 3)^(1/3) = 1.44225 and (1 * 0.25)^(1/2) = 0.5; without a token 1."""
    ratios = sequence_ratio(POLICY - ROLLOUT, MASK)
    assert ratios.tolist() == pytest.approx([3 ** (1 / 3), 0.5])
    assert sequence_ratio(POLICY - ROLLOUT, torch.zeros(2, 3)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token", [[2.0, 0.5, 2.5], [1.0, 0.25, 1.0]]),
        ("sequence", [[2.5, 2.5, 2.5], [0.25, 0.25, 1.0]]),  # 2 * 0.5 * 3 = 3, capped; 1 * 0.25
        # As TRL's token_mask and IcePop: the ratio where it is inside [0.4, 2.5], 0 outside, on either side.
        ("mask", [[2.0, 0.5, 0.0], [1.0, 0.0, 1.0]]),
        ("sequence_mask", [[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]),  # 3 is above the band, 0.25 below
    ],
)
def test_weights(kind, expected):
    policy = POLICY.clone().requires_grad_()
    weights = importance_weights(policy, ROLLOUT, MASK, kind, cap=2.5, band=(0.4, 2.5))
    assert torch.allclose(weights, torch.tensor(expected))
    assert not weights.requires_grad


def test_a_mask_keeps_ratios_up_to_the_ends_of_its_band():
    """2 * 0.5 * 3 = 3 and 1 * 0.25 are the ends; every counted token of a kept row weighs the row's ratio."""
    weights = importance_weights(POLICY.double(), ROLLOUT.double(), MASK, "sequence_mask", band=(0.24, 3.01))
    assert torch.allclose(weights, torch.tensor([[3.0, 3.0, 3.0], [0.25, 0.25, 1.0]], dtype=torch.float64))
    ends = torch.tensor([[0.5, 5.0]]).log()
    kept = importance_weights(
        ends, torch.zeros(1, 2), torch.ones(1, 2), "mask", band=(ends.exp()[0, 0], ends.exp()[0, 1])
    )
    assert torch.equal(kept, ends.exp())


def test_ratios_are_bounded_before_exp():
    """A log-ratio of 200 is e^20 = 4.85165e8, with 0 as its gradient; without a bound it is infinite."""
    far = torch.tensor([[200.0, -200.0]], requires_grad=True)
    none = torch.zeros(1, 2)
    assert importance_weights(far, none, torch.ones(1, 2), "token")[0].tolist() == pytest.approx(
        [4.85165e8, 2.06115e-9]
    )
    assert importance_weights(far, none, torch.ones(1, 2), "token", bound=0)[0, 0] == math.inf
    assert importance_weights(far, none, torch.ones(1, 2), "mask", band=(0.5, 5.0))[0].tolist() == [0, 0]
    mean = sequence_ratio(far[:, :1], torch.ones(1, 1))
    assert mean.item() == pytest.approx(4.85165e8)
    (0 * mean).sum().backward()
    assert far.grad.tolist() == [[0, 0]]


def test_unknown_kind():
    with pytest.raises(ValueError, match="allowed: token, sequence, mask, sequence_mask"):
        importance_weights(POLICY, ROLLOUT, MASK, "row", cap=1.0)


def test_a_masked_token_may_hold_anything():
    rollout = ROLLOUT.clone()
    rollout[1, 2] = -math.inf
    for kind in ("token", "sequence", "mask", "sequence_mask"):
        assert importance_weights(POLICY, rollout, MASK, kind, cap=2.5).isfinite().all()
    assert all(value.isfinite() for value in train_rollout_logprob_diff(POLICY, rollout, MASK, 1.0).values())


def test_the_difference_of_two_policies():
    found = train_rollout_logprob_diff(POLICY, ROLLOUT, MASK, bound=1.0)
    difference = {name: float(value) for name, value in found.items()}
    logs = [math.log(ratio) for ratio in (2.0, 0.5, 3.0, 1.0, 0.25)]
    assert difference["difference"] == pytest.approx(sum(map(abs, logs)))
    assert difference["kl"] == pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in (2.0, 0.5, 3.0, 1.0, 0.25)))
    assert difference["beyond"] == 2  # log 3 and log 0.25
    assert difference["tokens"] == 5
    assert difference["max"] == pytest.approx(math.log(4.0))
    assert float(train_rollout_logprob_diff(POLICY[:0], ROLLOUT[:0], MASK[:0], 1.0)["max"]) == 0
