"""GMPO: its numbers by hand, and against a second implementation."""

import math

import pytest
import torch
from rlcore_plugin_gmpo import GMPOConfig, gmpo_loss
from rlcore_plugin_testing.policy_losses import compare_policy_loss

from rlcore.ops import Outputs


def written_out(config):
    """Return the loss as the paper writes it (eq. 4): a product of clipped ratios, and its root."""

    def by_hand(responses):
        rows = []
        for r in responses:
            if not r.log_probs:
                continue
            product = torch.tensor(1.0, dtype=torch.float64)
            for new, old, advantage in zip(r.log_probs, r.old_log_probs, r.advantages, strict=True):
                ratio, sign = (new - old).exp(), 1 if advantage > 0 else -1
                clipped = min(
                    max(ratio, torch.tensor(math.exp(-config.clip_low))), torch.tensor(math.exp(config.clip_high))
                )
                product = product * abs(min(sign * ratio, sign * clipped))
            rows.append(-r.advantages[0] * product ** (1 / len(r.log_probs)))
        return sum(rows) / len(rows)

    return by_hand


@pytest.mark.parametrize("bounds", [(0.4, 0.4), (0.1, 0.3), (0.0, 0.0), (5.0, 5.0)])
def test_the_loss_is_the_formula_written_out(bounds):
    config = GMPOConfig(clip_low=bounds[0], clip_high=bounds[1])
    compare_policy_loss(gmpo_loss, config, written_out(config))


def loss(ratio, advantages, mask):
    ratio = torch.tensor(ratio)
    old = torch.full_like(ratio, -1.0)
    log_probs = (old + ratio.log()).requires_grad_()
    batch = {"response_mask": torch.tensor(mask), "advantages": torch.tensor(advantages), "old_log_probs": old}
    out = Outputs({"log_probs": log_probs, "entropy": torch.ones_like(ratio)})
    terms = gmpo_loss(out, batch, GMPOConfig(clip_low=math.log(2), clip_high=math.log(2)))
    return terms, torch.autograd.grad(terms["policy"].total, log_probs)[0]


def test_tokens_are_clipped_before_the_geometric_mean():
    """A = 2: ratios 8 and 0.5 count as 2 and 0.5, so s = 1. The clipped token has no gradient, the other s A / 2."""
    terms, gradient = loss([[8.0, 0.5], [8.0, 1.0]], [2.0, -1.0], [[1, 1], [1, 0]])
    # A = -1: 8 is on the side that the advantage pulls back from, and is not clipped.
    assert terms["policy"].total.item() == pytest.approx(-2.0 + 8.0)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -1.0], [8.0, 0.0]]))
    assert (terms["policy"].count, terms["clipped"].total, terms["clipped"].count) == (2, 1, 3)


def test_bad_responses_are_clipped_from_below():
    """A = -1: 0.125 counts as 0.5 and has no gradient; with 2, sqrt(0.5 * 2) = 1. A = 1: sqrt(0.125 * 2) = 0.5."""
    terms, gradient = loss([[0.125, 2.0], [0.125, 2.0]], [-1.0, 1.0], [[1, 1], [1, 1]])
    assert terms["policy"].total.item() == pytest.approx(1.0 - 0.5)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.5], [-0.25, -0.25]]))
