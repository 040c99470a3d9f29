"""GSPO: its numbers by hand, and against a second implementation."""

import pytest
import torch
from rlcore_plugin_gspo import GSPO, GSPOConfig, gspo_loss
from rlcore_plugin_testing.policy_losses import compare_policy_loss

from rlcore.ops import Outputs


def written_out(config):
    """Return the loss as the paper writes it, response by response."""

    def by_hand(responses):
        terms, lengths = [], []
        for response in responses:
            length = len(response.log_probs)
            if length == 0:
                continue
            total = sum(new - old for new, old in zip(response.log_probs, response.old_log_probs, strict=True))
            s, advantage = (total / length).exp(), response.advantages[0]
            clipped = min(max(s, torch.tensor(1 - config.clip_low)), torch.tensor(1 + config.clip_high))
            terms.append(-min(s * advantage, clipped * advantage))
            lengths.append(length)
        if config.luspo:
            terms = [length * term for length, term in zip(lengths, terms, strict=True)]
        loss = sum(terms) / len(terms)
        kl, tokens = 0.0, [0.0] * len(responses)
        for row, response in enumerate(responses):
            for new, ref in zip(response.log_probs, response.ref_log_probs, strict=True):
                tokens[row] += (ref - new).exp() - (ref - new) - 1
            if response.log_probs:
                kl += tokens[row] if config.luspo else tokens[row] / len(response.log_probs)
        return loss + config.kl_coef * kl / len(terms)

    return by_hand


@pytest.mark.parametrize("luspo", [False, True])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("bounds", [(3e-4, 4e-4), (0.2, 0.1)])
def test_the_loss_is_the_formula_written_out(luspo, kl_coef, bounds):
    config = GSPOConfig(clip_low=bounds[0], clip_high=bounds[1], luspo=luspo, kl_coef=kl_coef)
    compare_policy_loss(gspo_loss, config, written_out(config))


def loss(ratios, advantages, **settings):
    """Return the term and its gradient for two responses of two tokens; None is a token that was not sampled."""
    ratio = torch.tensor([[1.0 if r is None else r for r in row] for row in ratios])
    old = torch.full_like(ratio, -1.0)
    log_probs = (old + ratio.log()).requires_grad_()
    mask = torch.tensor([[int(r is not None) for r in row] for row in ratios])
    batch = {"response_mask": mask, "advantages": torch.tensor(advantages), "old_log_probs": old}
    out = Outputs({"log_probs": log_probs, "entropy": torch.ones_like(ratio)})
    terms = gspo_loss(out, batch, GSPOConfig(clip_low=0.2, clip_high=0.5, **settings))
    return terms, torch.autograd.grad(terms["policy"].total, log_probs)[0]


def test_a_response_has_one_ratio():
    """Row 1: s = sqrt(2 * 0.5) = 1, of A = 2. Row 2: s = 1.2, of one action and A = -1."""
    terms, gradient = loss([[2.0, 0.5], [1.2, None]], [2.0, -1.0])
    assert terms["policy"].total.item() == pytest.approx(-2.0 + 1.2)
    assert terms["policy"].count == 2
    # ds/dlogp = s / T on each token. Descent raises the good response and lowers the bad one.
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, -1.0], [1.2, 0.0]]))
    assert terms["clipped"].total == 0


def test_a_response_is_clipped_as_a_whole():
    """s = 2 with A > 0 counts as 1.5, s = 0.5 with A < 0 as 0.8: no token of either has a gradient."""
    terms, gradient = loss([[4.0, 1.0], [0.25, 1.0]], [1.0, -1.0])
    assert terms["policy"].total.item() == pytest.approx(-1.5 + 0.8)
    assert not gradient.any()
    assert (terms["clipped"].total, terms["clipped"].count) == (4, 4)
    # On the other side of 1, nothing is clipped.
    terms, gradient = loss([[4.0, 1.0], [0.25, 1.0]], [-1.0, 1.0])
    assert terms["policy"].total.item() == pytest.approx(2.0 - 0.5)
    torch.testing.assert_close(gradient, torch.tensor([[1.0, 1.0], [-0.25, -0.25]]))


def test_luspo_multiplies_a_response_by_its_length():
    terms, gradient = loss([[2.0, 0.5], [1.2, None]], [2.0, -1.0], luspo=True)
    assert terms["policy"].total.item() == pytest.approx(2 * -2.0 + 1.2)
    assert terms["policy"].count == 2
    torch.testing.assert_close(gradient, torch.tensor([[-2.0, -2.0], [1.2, 0.0]]))


def test_defaults_are_the_papers_and_start_no_reference():
    assert (GSPOConfig().clip_low, GSPOConfig().clip_high) == (3e-4, 4e-4)
    assert set(GSPO(GSPOConfig()).roles()) == {"actor"}
    assert set(GSPO(GSPOConfig(kl_coef=0.1)).roles()) == {"actor", "ref"}
