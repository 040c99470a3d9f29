"""VESPO: its numbers by hand, and against a second implementation."""

import math

import pytest
import torch
from rlcore_plugin_testing.policy_losses import compare_policy_loss
from rlcore_plugin_vespo import VESPOConfig, vespo_loss

from rlcore.config import compose
from rlcore.errors import ConfigError
from rlcore.ops import Outputs
from rlcore.plugins import PluginManager
from rlcore.training.preflight import preflight


def written_out(config):
    """Return the loss as the paper writes it (eq. 20), with the ratio to the policy that sampled."""

    def by_hand(responses):
        terms = []
        for r in responses:
            w = 1.0
            for new, sampled in zip(r.log_probs, r.rollout_log_probs, strict=True):
                w *= math.exp(new.item() - sampled)
            for new, advantage in zip(r.log_probs, r.advantages, strict=True):
                c1, c2 = (config.c1_pos, config.c2_pos) if advantage >= 0 else (config.c1_neg, config.c2_neg)
                terms.append(-(w**c1) * math.exp(c2 * (1 - w)) * advantage * new)
        return sum(terms) / len(terms)

    return by_hand


@pytest.mark.parametrize("settings", [{}, {"c1_pos": 1.0, "c2_pos": 0.5, "c1_neg": 0.0, "c2_neg": 4.0}])
@pytest.mark.parametrize("spread", [0.1, 0.5])
def test_the_loss_is_the_formula_written_out(settings, spread):
    config = VESPOConfig(**settings)
    compare_policy_loss(vespo_loss, config, written_out(config), spread=spread)


def loss(ratio, advantages, mask, **settings):
    """Return terms and gradient for ratios to the sampling policy; pi_old is far from both, and has no part."""
    ratio = torch.tensor(ratio)
    sampled = torch.full_like(ratio, -1.0)
    log_probs = (sampled + ratio.log()).requires_grad_()
    batch = {"response_mask": torch.tensor(mask), "advantages": torch.tensor(advantages)}
    batch |= {"rollout_log_probs": sampled, "old_log_probs": torch.full_like(ratio, -7.0)}
    out = Outputs({"log_probs": log_probs, "entropy": torch.ones_like(ratio)})
    terms = vespo_loss(out, batch, VESPOConfig(**settings))
    return terms, torch.autograd.grad(terms["policy"].total, log_probs)[0]


def test_at_the_sampling_policy_it_is_reinforce():
    """W = 2 * 0.5 = 1 and 1, so phi = 1: the gradient of each token is minus its advantage."""
    terms, gradient = loss([[2.0, 0.5], [1.0, 9.0]], [2.0, -1.0], [[1, 1], [1, 0]])
    torch.testing.assert_close(gradient, torch.tensor([[-2.0, -2.0], [1.0, 0.0]]))
    assert terms["policy"].count == 3
    assert terms["phi"].total.item() == pytest.approx(3)


def test_a_response_is_weighted_as_a_whole():
    """W = 4: 4^2 e^-9 for A > 0, 4^3 e^-6 for A < 0. W = 1/4: 4^-2 e^(9/4), 4^-3 e^(3/2)."""
    _, gradient = loss([[2.0, 2.0]] * 2, [1.0, -1.0], [[1, 1]] * 2)
    expected = torch.tensor([[-16 * math.exp(-9)] * 2, [64 * math.exp(-6)] * 2])
    torch.testing.assert_close(gradient, expected)
    _, gradient = loss([[0.5, 0.5]] * 2, [1.0, -1.0], [[1, 1]] * 2)
    expected = torch.tensor([[-math.exp(9 / 4) / 16] * 2, [math.exp(3 / 2) / 64] * 2])
    torch.testing.assert_close(gradient, expected)


def test_a_ratio_beyond_all_numbers_has_the_weight_0():
    terms, gradient = loss([[1e30, 1e30], [1e-30, 1e-30]], [1.0, -1.0], [[1, 1]] * 2)
    assert terms["policy"].total == 0
    assert not gradient.any()


def test_without_damping_a_ratio_beyond_all_numbers_stays_finite():
    """c2 = 0: 0 * inf is NaN. With log W at most 20, phi = e^(min(2 * 20, 20)) = 4.85165e8."""
    terms, gradient = loss([[1e30, 1e30]], [1.0], [[1, 1]], c2_pos=0.0)
    assert terms["phi"].total.item() / 2 == pytest.approx(4.85165e8, rel=1e-4)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("words", "refused"), [("", True), ("trainer.importance=off", False)])
def test_a_second_correction_for_older_policies_is_refused(words, refused):
    plugins = PluginManager.load()
    config = compose(["algo=vespo", "cluster=in_process", "trainer.rollouts_ahead=1", *words.split()], plugins)
    algorithm = plugins.algorithm("vespo").algorithm(config.algo)
    if not refused:
        algorithm.check(config)
        return
    with pytest.raises(ConfigError, match=r"set trainer\.importance=off"):
        algorithm.check(config)


def test_a_run_without_older_policies_needs_no_setting():
    plugins = PluginManager.load()
    preflight(compose(["algo=vespo", "cluster=in_process"], plugins), plugins)


def test_grpos_own_check_remains():
    plugins = PluginManager.load()
    config = compose(["algo=vespo", "cluster=in_process", "data.batch_size=2", "algo.mini_batches=3"], plugins)
    with pytest.raises(ConfigError, match=r"algo\.mini_batches is 3"):
        preflight(config, plugins)
