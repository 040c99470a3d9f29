"""Losses, gradients and advantages against TRL's own: 1.16 for GRPO's variants and DPO, 1.12 for PPO and GAE."""

from functools import partial

import pytest
import torch
from rlcore_grpo import GRPOConfig, grpo_loss
from rlcore_online_dpo import OnlineDPOConfig, online_dpo_loss
from rlcore_plugin_cispo import CISPOConfig, cispo_loss
from rlcore_plugin_gspo import GSPOConfig, gspo_loss
from rlcore_plugin_sapo import SAPOConfig, sapo_loss
from rlcore_plugin_vespo import VESPOConfig, vespo_loss
from rlcore_ppo import PPOConfig, actor_loss, critic_loss, estimate_advantages, shift_and_scale, token_rewards

from rlcore import DataProto, Ragged
from rlcore.ops import Outputs

ROWS, TOKENS = 4, 5
LENGTHS = torch.tensor([5, 3, 1, 4])
MASK = (torch.arange(TOKENS) < LENGTHS[:, None]).long()


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def value_and_grad(loss, outputs, batch, config):
    """Return what the engine would minimise over this one batch, and its gradient by each output."""
    leaves = {name: value.clone().requires_grad_() for name, value in outputs.items()}
    terms = loss(Outputs(leaves), batch, config)
    total = sum(t.weight * t.total / t.count for t in terms.values() if t.weight is not None)
    total.backward()
    return total.item(), {name: leaf.grad for name, leaf in leaves.items()}


def close(ours, theirs):
    torch.testing.assert_close(ours, torch.tensor(theirs), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize(
    ("loss_type", "loss_mean"), [("grpo", "sequence"), ("bnpo", "token"), ("dapo", "token"), ("dr_grpo", "constant")]
)
def test_grpo(ask_trl, loss_type, loss_mean, kl_coef):
    new, old, ref = noise(0, ROWS, TOKENS), noise(1, ROWS, TOKENS), noise(2, ROWS, TOKENS)
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5])
    theirs = ask_trl(
        "grpo",
        {
            "log_probs": new,
            "old_per_token_logps": old,
            "ref_per_token_logps": ref,
            "completion_mask": MASK,
            "advantages": advantages,
        },
        {"loss_type": loss_type, "beta": kl_coef, "epsilon_low": 0.2, "epsilon_high": 0.28},
    )
    config = GRPOConfig(clip_low=0.2, clip_high=0.28, kl_coef=kl_coef, loss_mean=loss_mean)
    batch = {"response_mask": MASK, "old_log_probs": old, "ref_log_probs": ref, "advantages": advantages}
    batch["response_len"] = TOKENS
    loss, grads = value_and_grad(grpo_loss, {"log_probs": new, "entropy": torch.zeros(ROWS, TOKENS)}, batch, config)
    assert loss == pytest.approx(theirs["loss"], rel=1e-5)
    close(grads["log_probs"], theirs["grad"])


CLIPS = {"epsilon_low": 0.2, "epsilon_high": 0.28}
OURS = {"clip_low": 0.2, "clip_high": 0.28}
WHOLE = {**CLIPS, "importance_sampling_level": "sequence"}
TAUS = {"args": {"sapo_temperature_pos": 0.8, "sapo_temperature_neg": 2.5}}
GAMMA = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize(
    ("settings", "loss", "config"),
    [
        ({"loss_type": "dapo", **CLIPS, "args": {"delta": 1.5}}, grpo_loss, partial(GRPOConfig, delta=1.5, **OURS)),
        (
            {"loss_type": "grpo", **CLIPS, "args": {"use_bias_correction_kl": True}},
            grpo_loss,
            partial(GRPOConfig, kl_unbiased=True, loss_mean="sequence", **OURS),
        ),
        ({"loss_type": "grpo", **WHOLE}, gspo_loss, partial(GSPOConfig, **OURS)),
        ({"loss_type": "luspo", **WHOLE}, gspo_loss, partial(GSPOConfig, luspo=True, **OURS)),
        ({"loss_type": "cispo", "epsilon_high": 1.5}, cispo_loss, partial(CISPOConfig, clip_high=1.5)),
        ({"loss_type": "sapo", **TAUS}, sapo_loss, partial(SAPOConfig, tau_pos=0.8, tau_neg=2.5)),
        ({"loss_type": "vespo", "args": GAMMA}, vespo_loss, VESPOConfig),
    ],
    ids=["delta", "unbiased-kl", "gspo", "luspo", "cispo", "sapo", "vespo"],
)
def test_losses_on_grpo(ask_trl, settings, loss, config, kl_coef):
    old, ref = noise(1, ROWS, TOKENS), noise(2, ROWS, TOKENS)
    new = old + 0.4 * noise(0, ROWS, TOKENS)
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5])
    columns = {"old_per_token_logps": old, "ref_per_token_logps": ref, "completion_mask": MASK}
    tensors = {"log_probs": new, **columns, "advantages": advantages}
    theirs = ask_trl("grpo", tensors, {"beta": kl_coef, **settings})
    batch = {"response_mask": MASK, "old_log_probs": old, "ref_log_probs": ref, "rollout_log_probs": old}
    batch["advantages"] = advantages
    outputs = {"log_probs": new, "entropy": torch.zeros(ROWS, TOKENS)}
    value, grads = value_and_grad(loss, outputs, batch, config(kl_coef=kl_coef))
    assert value == pytest.approx(theirs["loss"], rel=1e-5)
    close(grads["log_probs"], theirs["grad"])


# TRL's IPO compares means over tokens, ours sums, as the paper states it; with T tokens everywhere, ours at beta / T is
# T squared times TRL's at beta.
@pytest.mark.parametrize(("kind", "scale"), [("sigmoid", 1), ("hinge", 1), ("ipo", TOKENS)])
def test_dpo(ask_trl, kind, scale):
    new, ref = noise(3, 2 * ROWS, TOKENS), noise(4, 2 * ROWS, TOKENS)
    theirs = ask_trl("dpo", {"log_probs": new, "ref_log_probs": ref}, {"loss_types": [kind], "beta": 0.4})
    pair = torch.arange(ROWS).repeat(2)
    side = torch.cat([torch.ones(ROWS), -torch.ones(ROWS)])
    batch = {
        "response_mask": torch.ones(2 * ROWS, TOKENS, dtype=torch.int64),
        "ref_log_probs": ref,
        "dpo_pair": pair,
        "dpo_side": side,
    }
    config = OnlineDPOConfig(loss=kind, beta=0.4 / scale)
    outputs = {"log_probs": new, "entropy": torch.zeros(2 * ROWS, TOKENS)}
    loss, grads = value_and_grad(online_dpo_loss, outputs, batch, config)
    assert loss / scale**2 == pytest.approx(theirs["loss"], rel=1e-5)
    close(grads["log_probs"] / scale**2, theirs["grad"])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_ppo(ask_trl, estimator):
    """Whole responses only: TRL gives the score of a shorter one to the token behind its last."""
    old, ref, values = noise(5, ROWS, TOKENS), noise(6, ROWS, TOKENS), noise(7, ROWS, TOKENS)
    scores = torch.tensor([1.0, 0.0, -1.0, 0.5])
    new, vpred = old + 0.3 * noise(8, ROWS, TOKENS), values + 0.5 * noise(9, ROWS, TOKENS)
    tensors = {"logprobs": old, "ref_logprobs": ref, "values": values, "scores": scores}
    settings = {"gamma": 0.9, "lam": 0.8, "kl_coef": 0.1, "kl_estimator": estimator}
    clips = {"cliprange": 0.2, "cliprange_value": 0.3}
    theirs = ask_trl("ppo", {**tensors, "new_logprobs": new, "vpred": vpred}, {**settings, **clips}, old=True)

    lengths = torch.full((ROWS,), TOKENS)
    ragged = {
        "old_log_probs": old,
        "ref_log_probs": ref,
        "values": values,
        "response_mask": torch.ones_like(old).long(),
    }
    batch = DataProto.from_single_dict({name: Ragged.from_padded(v, lengths) for name, v in ragged.items()})
    batch["scores"] = scores
    batch = batch.union(batch.map(partial(token_rewards, kl_coef=0.1, kl_estimator=estimator), reads=batch.keys()))
    batch = batch.union(batch.map(partial(estimate_advantages, gamma=0.9, lam=0.8), reads=batch.keys()))
    close(batch["rewards"].to_padded(), theirs["rewards"])
    close(batch["returns"].to_padded(), theirs["returns"])
    # TRL divides by the unbiased variance, we by the count.
    moments = batch.masked_moments("ppo_advantages", "response_mask")
    std = (moments.var * moments.count / (moments.count - 1)) ** 0.5
    batch["advantages"] = shift_and_scale(batch, mean=moments.mean, std=std)["advantages"]
    close(batch["advantages"].to_padded(), theirs["advantages"])

    padded = {name: batch[name].to_padded() for name in (*ragged, "advantages", "returns")}
    config = PPOConfig(clip_low=0.2, clip_high=0.2, value_clip=0.3, kl_in="none")
    loss, grads = value_and_grad(actor_loss, {"log_probs": new, "entropy": torch.zeros_like(new)}, padded, config)
    assert loss == pytest.approx(theirs["policy_loss"], rel=1e-5)
    close(grads["log_probs"], theirs["policy_grad"])
    loss, grads = value_and_grad(critic_loss, {"values": vpred}, padded, config)
    assert loss == pytest.approx(theirs["value_loss"], rel=1e-5)
    close(grads["values"], theirs["value_grad"])
