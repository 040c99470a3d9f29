"""CISPO: its numbers by hand, and against a second implementation."""

import pytest
import torch
from rlcore_plugin_cispo import CISPOConfig, cispo_loss
from rlcore_plugin_testing.policy_losses import compare_policy_loss

from rlcore.config import compose
from rlcore.errors import ConfigError
from rlcore.ops import Outputs
from rlcore.plugins import PluginManager
from rlcore.training.preflight import preflight


def written_out(low, high):
    """Return the loss as the paper writes it, token by token, with weights from `low` to `high`."""

    def by_hand(responses):
        terms = []
        for r in responses:
            for new, old, advantage in zip(r.log_probs, r.old_log_probs, r.advantages, strict=True):
                weight = min(max((new - old).exp().item(), low), high)
                terms.append(-weight * advantage * new)
        return sum(terms) / len(terms)

    return by_hand


@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [
        ({}, 0.0, 5.0),
        ({"clip_high": 1.3}, 0.0, 1.3),
        ({"clip_low": 0.8, "clip_high": 1.3}, 0.8, 1.3),
        ({"bounds": "relative", "clip_low": 0.2, "clip_high": 0.3}, 0.8, 1.3),
        ({"bounds": "relative", "clip_low": 1.0, "clip_high": 0.3}, 0.0, 1.3),
    ],
)
def test_the_loss_is_the_formula_written_out(settings, low, high):
    compare_policy_loss(cispo_loss, CISPOConfig(**settings), written_out(low, high))


def test_a_clipped_token_keeps_its_gradient():
    """Ratios 3, 0.5 and 1 of A = 2 and -1: weights 2, 0.5 and 1. Each token's gradient is -weight * A."""
    ratio = torch.tensor([[3.0, 0.5], [1.0, 3.0]])
    old = torch.full_like(ratio, -1.0)
    log_probs = (old + ratio.log()).requires_grad_()
    batch = {"response_mask": torch.tensor([[1, 1], [1, 0]]), "advantages": torch.tensor([2.0, -1.0])}
    out = Outputs({"log_probs": log_probs, "entropy": torch.ones_like(ratio)})
    terms = cispo_loss(out, {**batch, "old_log_probs": old}, CISPOConfig(clip_high=2.0))
    (gradient,) = torch.autograd.grad(terms["policy"].total, log_probs)
    torch.testing.assert_close(gradient, torch.tensor([[-4.0, -1.0], [1.0, 0.0]]))
    new = log_probs.detach()
    assert terms["policy"].total.item() == pytest.approx(float(-4 * new[0, 0] - new[0, 1] + new[1, 0]))
    assert (terms["clipped"].total, terms["clipped"].count) == (1, 3)


@pytest.mark.parametrize(
    ("words", "weights"),
    [
        ("algo.clip_high=0.28", "0.0 to 0.28"),  # meant as a distance, by the paper's convention
        ("algo.bounds=relative algo.clip_low=1.5", None),  # a weight is never below 0: no lower bound
        ("algo.clip_low=1.2", "1.2 to 5.0"),
        ("algo.clip_low=1.0", None),
    ],
)
def test_bounds_without_1_between_them_are_refused(words, weights):
    plugins = PluginManager.load()
    config = compose(["algo=cispo", "cluster=in_process", *words.split()], plugins)
    if weights is None:
        preflight(config, plugins)
        return
    with pytest.raises(ConfigError, match=rf"clips weights to {weights}, which must hold 1"):
        preflight(config, plugins)


def test_grpos_own_check_remains():
    plugins = PluginManager.load()
    config = compose(["algo=cispo", "cluster=in_process", "data.batch_size=2", "algo.mini_batches=3"], plugins)
    with pytest.raises(ConfigError, match=r"algo\.mini_batches is 3"):
        preflight(config, plugins)
