"""DPPO: its numbers by hand, and against a second implementation."""

import math

import pytest
import torch
from rlcore_plugin_dppo import DPPOConfig, binary_divergence, dppo_loss
from rlcore_plugin_testing.policy_losses import compare_policy_loss

from rlcore.config import compose
from rlcore.errors import ConfigError
from rlcore.ops import Outputs
from rlcore.plugins import PluginManager
from rlcore.training.preflight import preflight


def written_out(config):
    """Return the loss as the paper writes it (eq. 12 to 14), with the divergence from the policy that sampled."""

    def by_hand(responses):
        terms = []
        for r in responses:
            for new, sampled, advantage in zip(r.log_probs, r.rollout_log_probs, r.advantages, strict=True):
                p, q = math.exp(new.item()), math.exp(sampled)
                if config.divergence == "tv":
                    away = abs(p - q)
                else:
                    away = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
                out = away > config.max_divergence and ((advantage > 0 and p > q) or (advantage < 0 and p < q))
                terms.append(0 * new if out else -min(p / q, config.ratio_cap) * advantage * new)
        return sum(terms) / len(terms)

    return by_hand


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_divergence": 0.02},
        {"divergence": "kl", "max_divergence": 0.05},
        {"divergence": "kl", "max_divergence": 0.005},
        {"max_divergence": 0.0, "ratio_cap": 1.1},
        {"max_divergence": 1.0},
    ],
)
def test_the_loss_is_the_formula_written_out(settings):
    config = DPPOConfig(**settings)
    compare_policy_loss(dppo_loss, config, written_out(config))


def test_binary_divergences_by_hand():
    """q = 0.5 to p = 0.25: |q - p| = 0.25; 0.5 ln 2 + 0.5 ln(0.5 / 0.75) = 0.1438. A certain token is a number too."""
    p, q = torch.tensor([0.25, 0.5, 1.0, 0.5]).log(), torch.tensor([0.5, 0.5, 1.0, 1.0]).log()
    assert binary_divergence(p, q, "tv").tolist() == pytest.approx([0.25, 0.0, 0.0, 0.5])
    kl = binary_divergence(p, q, "kl")
    assert kl.tolist() == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.0, 0.0, math.log(2)], abs=1e-4)


def loss(probabilities, sampled, advantages, mask, **settings):
    """Return terms and gradient; pi_old is far from both policies, and has no part."""
    log_probs = torch.tensor(probabilities).log().requires_grad_()
    batch = {"response_mask": torch.tensor(mask), "advantages": torch.tensor(advantages)}
    batch |= {"rollout_log_probs": torch.tensor(sampled).log(), "old_log_probs": torch.full_like(log_probs, -7.0)}
    out = Outputs({"log_probs": log_probs, "entropy": torch.ones_like(log_probs)})
    terms = dppo_loss(out, batch, DPPOConfig(**settings))
    return terms, torch.autograd.grad(terms["policy"].total, log_probs)[0]


def test_tokens_are_cut_by_probability_and_not_by_ratio():
    """A > 0: from 0.5 to 0.8 is cut (0.3), from 0.01 to 0.1 is not (0.09), though its ratio is 10."""
    terms, gradient = loss([[0.8, 0.1], [0.2, 0.9]], [[0.5, 0.01], [0.5, 0.9]], [1.0, -1.0], [[1, 1], [1, 0]])
    # A < 0: from 0.5 to 0.2 is cut. The masked token has no part.
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -10.0], [0.0, 0.0]]))
    assert (terms["clipped"].total, terms["clipped"].count, terms["policy"].count) == (2, 3, 3)


def test_tokens_that_come_back_are_never_cut():
    """A > 0 below the sampling policy and A < 0 above it: the weights are 0.2 / 0.5 and 0.8 / 0.5."""
    terms, gradient = loss([[0.2], [0.8]], [[0.5], [0.5]], [1.0, -1.0], [[1], [1]])
    torch.testing.assert_close(gradient, torch.tensor([[-0.4], [1.6]]))
    assert terms["clipped"].total == 0


def test_the_ratio_is_capped():
    _, gradient = loss([[0.1]], [[0.001]], [1.0], [[1]], max_divergence=1.0)
    assert gradient.item() == pytest.approx(-20)


def test_a_second_correction_for_older_policies_is_refused():
    plugins = PluginManager.load()
    words = ["algo=dppo", "cluster=in_process", "trainer.importance=token"]
    config = compose(words, plugins)
    with pytest.raises(ConfigError, match=r"set trainer\.importance=off"):
        plugins.algorithm("dppo").algorithm(config.algo).check(config)


def test_grpos_own_check_remains():
    plugins = PluginManager.load()
    config = compose(["algo=dppo", "cluster=in_process", "data.batch_size=2", "algo.mini_batches=3"], plugins)
    with pytest.raises(ConfigError, match=r"algo\.mini_batches is 3"):
        preflight(config, plugins)
