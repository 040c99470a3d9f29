"""SAPO: its numbers by hand, and against a second implementation."""

import math

import pytest
import torch
from rlcore_plugin_sapo import SAPOConfig, sapo_loss
from rlcore_plugin_testing.policy_losses import compare_policy_loss

from rlcore.ops import Outputs


def written_out(tau_pos, tau_neg):
    """Return the loss as the paper writes it, token by token."""

    def by_hand(responses):
        rows = []
        for r in responses:
            terms = []
            for new, old, advantage in zip(r.log_probs, r.old_log_probs, r.advantages, strict=True):
                tau = tau_pos if advantage > 0 else tau_neg
                gate = 4 / tau / (1 + (-tau * ((new - old).exp() - 1)).exp())
                terms.append(-gate * advantage)
            if terms:
                rows.append(sum(terms) / len(terms))
        return sum(rows) / len(rows)

    return by_hand


@pytest.mark.parametrize("taus", [(1.0, 1.05), (1.0, 1.0), (0.5, 8.0), (10.0, 2.0)])
def test_the_loss_is_the_formula_written_out(taus):
    compare_policy_loss(sapo_loss, SAPOConfig(tau_pos=taus[0], tau_neg=taus[1]), written_out(*taus))


def loss(ratio, advantages, mask, **settings):
    ratio = torch.tensor(ratio)
    old = torch.full_like(ratio, -1.0)
    log_probs = (old + ratio.log()).requires_grad_()
    batch = {"response_mask": torch.tensor(mask), "advantages": torch.tensor(advantages), "old_log_probs": old}
    out = Outputs({"log_probs": log_probs, "entropy": torch.ones_like(ratio)})
    terms = sapo_loss(out, batch, SAPOConfig(**settings))
    return terms, torch.autograd.grad(terms["policy"].total, log_probs)[0]


def test_at_the_old_policy_the_gradient_is_the_advantage_for_any_temperature():
    """At r = 1 the gate is 4 / tau * 1/2, and its slope 1. Row 2 has one action, so its mean is over one."""
    terms, gradient = loss([[1.0, 1.0], [1.0, 1.0]], [2.0, -1.0], [[1, 1], [0, 1]], tau_pos=0.5, tau_neg=4.0)
    assert terms["policy"].total.item() == pytest.approx(-2 * 4.0 + 0.5)
    assert terms["policy"].count == 2
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, -1.0], [0.0, 1.0]]))
    assert (terms["gate"].total, terms["gate"].weight) == (3, None)


def test_the_gate_damps_far_ratios_and_bad_responses_sooner():
    """At r = 3 with tau 2: p = 1 / (1 + e^-4); the gradient is r A 4 p (1 - p). With tau 4 it is smaller."""
    _, gradient = loss([[3.0], [3.0]], [1.0, -1.0], [[1], [1]], tau_pos=2.0, tau_neg=4.0)
    p, q = 1 / (1 + math.exp(-4)), 1 / (1 + math.exp(-8))
    assert gradient.flatten().tolist() == pytest.approx([-12 * p * (1 - p), 12 * q * (1 - q)], rel=1e-3)
