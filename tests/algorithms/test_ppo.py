"""PPO: token rewards, advantages and losses by hand, and its settings end to end."""

import json
import math
from dataclasses import replace

import pytest
import torch
from rlcore_ppo import (
    PPO,
    PPOConfig,
    actor_loss,
    critic_loss,
    estimate_advantages,
    shift_and_scale,
    token_rewards,
)
from safetensors.torch import load_file

from rlcore import DataProto, Ragged
from rlcore.assets import TINY
from rlcore.config import compose
from rlcore.errors import ConfigError
from rlcore.ops import Outputs
from rlcore.plugins import CRITIC, PluginManager
from rlcore.roles.handles import RoleHandle
from rlcore.training.preflight import preflight
from rlcore.training.run import check_roles

LN2 = math.log(2)
MASK = torch.tensor([[1, 0, 1], [1, 1, 1]])


def gradient(term, of):
    (grad,) = torch.autograd.grad(term.total, of)
    return grad


def ragged(*rows, dtype=torch.float32):
    return Ragged.from_list(list(rows), dtype=dtype)


def rows(column):
    return [[round(value, 5) for value in row.tolist()] for row in column]


# Rewards and advantages of tokens


def responses(**columns):
    """Return three responses: one whose third token is not the policy's, one that ends in such tokens, one of none."""
    mask = ragged([1, 1, 0, 1], [1, 1, 0], [], dtype=torch.int64)
    return DataProto.from_single_dict({"response_mask": mask, "scores": torch.tensor([1.0, -2.0, 5.0]), **columns})


def test_the_score_stands_at_the_last_sampled_token():
    made = token_rewards(responses(), kl_coef=0.0, kl_estimator="k1")
    assert rows(made["rewards"]) == [[0, 0, 0, 1], [0, -2, 0], []]
    assert list(made) == ["rewards"]


@pytest.mark.parametrize(("kind", "at_ln2"), [("k1", LN2), ("k2", LN2**2 / 2), ("k3", 0.5 - 1 + LN2)])
def test_kl_in_the_rewards_by_hand(kind, at_ln2):
    """A token that the policy holds twice as likely as the reference costs 0.5 KL; what it did not sample, nothing."""
    old = ragged([-1.0, -1.0, -1.0, -1.0], [-3.0, -2.0, -1.0], [])
    to_reference = ragged([LN2, 0.0, 7.0, LN2], [0.0, LN2, 9.0], [])
    batch = responses(old_log_probs=old, ref_log_probs=old.with_values(old.values - to_reference.values))
    made = token_rewards(batch, kl_coef=0.5, kl_estimator=kind)
    kl = round(at_ln2, 5)
    assert rows(made["ppo_kl"]) == [[kl, 0, 0, kl], [0, kl, 0], []]
    expected = [[-0.5 * at_ln2, 0, 0, 1 - 0.5 * at_ln2], [0, -2 - 0.5 * at_ln2, 0], []]
    for got, wanted in zip(made["rewards"], expected, strict=True):
        assert got.tolist() == pytest.approx(wanted, abs=1e-6)
    free = token_rewards(batch, kl_coef=0.0, kl_estimator=kind)
    assert rows(free["rewards"]) == [[0, 0, 0, 1], [0, -2, 0], []]
    assert rows(free["ppo_kl"]) == rows(made["ppo_kl"])  # measured all the same


def test_advantages_skip_what_was_not_sampled():
    """Rewards 0, 0, 1, values 0.5, 0.25, 0.75, gamma 0.9, lambda 0.5: worked in tests/ops/test_gae.py.

    Second row: rewards 0, -2, values 1, 0: delta -2, A = -2, R = -2; delta -1, A = -1 + 0.45 * -2 = -1.9, R = -0.9.
    """
    batch = responses(values=ragged([0.5, 0.25, 99.0, 0.75], [1.0, 0.0, 99.0], []))
    batch = batch.union(DataProto.from_single_dict(token_rewards(batch, kl_coef=0.0, kl_estimator="k1")))
    made = estimate_advantages(batch, gamma=0.9, lam=0.5)
    assert rows(made["ppo_advantages"]) == [[-0.03313, 0.5375, 0, 0.25], [-1.9, -2, 0], []]
    assert rows(made["returns"]) == [[0.46687, 0.7875, 0, 1], [-0.9, -2, 0], []]


def test_whitening_by_hand():
    """The actions' 1, 2 and 3, 2, 2 have mean 2 and variance 0.4; 77 and 88 are none and stay out of both."""
    batch = responses(ppo_advantages=ragged([1.0, 2.0, 77.0, 3.0], [2.0, 2.0, 88.0], []))
    moments = batch.masked_moments("ppo_advantages", "response_mask")
    assert (moments.count, moments.mean, moments.var) == (5, 2.0, pytest.approx(0.4))
    made = shift_and_scale(batch, mean=moments.mean, std=math.sqrt(moments.var))["advantages"]
    one = round(1 / math.sqrt(0.4), 5)
    assert rows(made) == [[-one, 0, 0, one], [0, 0, 0], []]


# The actor's loss

RATIO = torch.tensor([[1.5, 9.0, 0.5], [0.5, 1.5, 4.0]])
TO_REFERENCE = torch.tensor([[LN2, 7.0, 0.0], [0.0, LN2, 0.0]])  # log_probs - ref_log_probs


def of_actor(mask=MASK, **settings):
    """Return the terms and log_probs [2, 3] of two responses with advantages 2 and -1, clipped to 0.8 and 1.3."""
    config = replace(PPOConfig(clip_low=0.2, clip_high=0.3, kl_in="none"), **settings)
    old = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.5, -2.5]])
    log_probs = (old + RATIO.log()).requires_grad_()
    entropy = torch.tensor([[1.0, 50.0, 2.0], [3.0, 4.0, 5.0]], requires_grad=True)
    advantages = torch.tensor([[2.0, 7.0, 2.0], [-1.0, -1.0, -1.0]])
    batch = {"response_mask": mask, "advantages": advantages, "old_log_probs": old}
    if config.uses_kl:
        batch |= {"ref_log_probs": log_probs.detach() - TO_REFERENCE, "kl_coef": 0.5}
    terms = actor_loss(Outputs({"log_probs": log_probs, "entropy": entropy}), batch, config)
    return terms, log_probs, entropy


def test_policy_loss_is_clipped_on_the_side_that_the_advantage_pushes_to():
    """Advantage 2: ratio 1.5 counts as 1.3, 0.5 as itself. Advantage -1: 0.5 counts as 0.8, 1.5 and 4 as themselves."""
    terms, log_probs, _ = of_actor()
    policy = terms["policy"]
    assert policy.total.item() == pytest.approx(-2.6 - 1.0 + 0.8 + 1.5 + 4.0)
    assert (policy.count, policy.weight) == (5, 1.0)
    # d(-q A)/d(log_prob) = -q A: to a likelier token where the advantage is positive, exactly 0 where it is clipped.
    grad = gradient(policy, log_probs)
    torch.testing.assert_close(grad, torch.tensor([[0.0, 0.0, -1.0], [0.0, 1.5, 4.0]]))
    assert grad[0, 0] == grad[1, 0] == grad[0, 1] == 0  # clipped, clipped, not sampled
    assert (terms["clipped"].total, terms["clipped"].count, terms["clipped"].weight) == (2, 5, None)


@pytest.mark.parametrize(("low", "high", "clipped"), [(0.6, 0.6, 0), (0.6, 0.3, 1), (0.2, 0.6, 1), (0.2, 0.3, 2)])
def test_each_clip_bound_acts_for_itself(low, high, clipped):
    terms, _, _ = of_actor(clip_low=low, clip_high=high)
    first, fourth = -2 * min(1.5, 1 + high), max(0.5, 1 - low)
    assert terms["policy"].total.item() == pytest.approx(first - 1.0 + fourth + 1.5 + 4.0)
    assert terms["clipped"].total == clipped


def test_dual_clip_bounds_the_ratio_where_the_advantage_is_negative_alone():
    """With 3, ratio 4 at advantage -1 counts as 3, without a gradient; ratio 1.5 is below, and 2 * 1.3 is positive."""
    terms, log_probs, _ = of_actor(dual_clip=3.0)
    assert terms["policy"].total.item() == pytest.approx(-2.6 - 1.0 + 0.8 + 1.5 + 3.0)
    torch.testing.assert_close(gradient(terms["policy"], log_probs), torch.tensor([[0.0, 0.0, -1.0], [0.0, 1.5, 0.0]]))
    assert (terms["dual_clipped"].total, terms["dual_clipped"].count) == (1, 5)
    lower, log_probs, _ = of_actor(dual_clip=1.2)
    assert lower["policy"].total.item() == pytest.approx(-2.6 - 1.0 + 0.8 + 1.2 + 1.2)
    assert lower["dual_clipped"].total == 2


def test_entropy_is_a_metric_or_a_bonus():
    plain, _, _ = of_actor()
    assert (plain["entropy"].total, plain["entropy"].count, plain["entropy"].weight) == (15, 5, None)
    terms, _, entropy = of_actor(entropy_coef=0.01)
    bonus = terms["entropy"]
    assert (bonus.total, bonus.count, bonus.weight) == (15, 5, -0.01)  # minimised with the minus: it rises
    assert gradient(bonus, entropy).tolist() == [[1, 0, 1], [1, 1, 1]]


def test_kl_in_the_loss_has_the_controllers_weight_and_a_gradient_towards_the_reference():
    """Estimated by k2 = r^2 / 2: ln(2)^2 / 2 at one token of each row, weighted 0.5; the slope is r."""
    terms, log_probs, _ = of_actor(kl_in="loss", kl_estimator="k2")
    assert terms["kl"].total.item() == pytest.approx(LN2**2)
    assert (terms["kl"].count, terms["kl"].weight) == (5, None)
    penalty = terms["kl_penalty"]
    assert penalty.total.item() == pytest.approx(0.5 * LN2**2)
    assert (penalty.count, penalty.weight) == (5, 1.0)
    expected = torch.tensor([[0.5 * LN2, 0.0, 0.0], [0.0, 0.5 * LN2, 0.0]])
    torch.testing.assert_close(gradient(penalty, log_probs), expected)
    rewarded, _, _ = of_actor(kl_in="reward", kl_estimator="k2")
    assert "kl_penalty" not in rewarded
    assert rewarded["kl"].total == terms["kl"].total
    assert rewarded["kl"].weight is None


def test_a_response_without_actions_is_not_counted():
    terms, log_probs, _ = of_actor(mask=torch.tensor([[0, 0, 0], [1, 1, 1]]))
    assert terms["policy"].count == 3
    assert terms["policy"].total.item() == pytest.approx(0.8 + 1.5 + 4.0)
    assert not gradient(terms["policy"], log_probs)[0].any()


# The critic's loss


def of_critic(value_clip):
    """Return the terms and values [2, 3] of two responses whose values before the update were 1."""
    values = torch.tensor([[1.5, 30.0, 1.5], [1.1, 0.5, 0.9]], requires_grad=True)
    returns = torch.tensor([[2.0, 0.0, 0.0], [2.0, 0.0, 1.0]])
    batch = {"response_mask": MASK, "values": torch.ones(2, 3), "returns": returns}
    return critic_loss(Outputs({"values": values}), batch, PPOConfig(value_clip=value_clip)), values


def test_value_loss_by_hand():
    """Half the squares of -0.5, 1.5, -0.9, 0.5, -0.1; the slope is the difference: values move to the returns."""
    terms, values = of_critic(value_clip=0.0)
    loss = terms["value_loss"]
    assert loss.total.item() == pytest.approx((0.25 + 2.25 + 0.81 + 0.25 + 0.01) / 2)
    assert (loss.count, loss.weight) == (5, 1.0)
    torch.testing.assert_close(gradient(loss, values), torch.tensor([[-0.5, 0.0, 1.5], [-0.9, 0.5, -0.1]]))
    assert terms["clipped"].total == 0
    assert terms["value"].total.item() == pytest.approx(1.5 + 1.5 + 1.1 + 0.5 + 0.9)
    assert terms["return"].total == 5


def test_value_clip_stops_a_value_that_went_far_enough_and_never_one_that_went_the_wrong_way():
    """Within 0.2 of 1. To 1.5 for 2: counts as 1.2, 0.64. To 1.5 for 0: as itself. To 0.5 for 0: as 0.8, 0.64."""
    terms, values = of_critic(value_clip=0.2)
    loss = terms["value_loss"]
    assert loss.total.item() == pytest.approx((0.64 + 2.25 + 0.81 + 0.64 + 0.01) / 2)
    grad = gradient(loss, values)
    torch.testing.assert_close(grad, torch.tensor([[0.0, 0.0, 1.5], [-0.9, 0.0, -0.1]]))
    assert grad[0, 0] == grad[1, 1] == grad[0, 1] == 0
    assert (terms["clipped"].total, terms["clipped"].count) == (2, 5)


# End to end


@pytest.fixture
def updates(monkeypatch):
    """Return what the roles were updated with, name and batch, filled as it happens."""
    seen = []
    update = RoleHandle.update

    def watched(self, batch, *rest, **options):
        seen.append((self.name, batch))
        return update(self, batch, *rest, **options)

    monkeypatch.setattr(RoleHandle, "update", watched)
    return seen


def test_a_first_step(take_steps, updates):
    """The critic's head is of zeros and the reference is the policy: KL 0, values 0, each return the discounted score.

    So the value loss is the mean square of the returns, halved, and the critic explains nothing of their variance.
    """
    (metrics,), (batch,), roles = take_steps(
        "algo=ppo", "algo.samples=2", "algo.gamma=0.5", "algo.lam=1", "algo.whiten=false"
    )
    assert roles == {"actor", "critic", "ref"}
    assert len(batch) == 8
    expected = [
        [float(score) * 0.5 ** (length - 1 - token) for token in range(length)]
        for score, length in zip(batch["scores"].tolist(), batch["response_length"].tolist(), strict=True)
    ]
    flat = [value for row in expected for value in row]
    assert [name for name, _ in updates] == ["critic", "actor"]
    made = updates[1][1]
    for name in ("returns", "advantages", "ppo_advantages"):
        assert rows(made[name]) == [[round(value, 5) for value in row] for row in expected]
    assert metrics["loss/policy"] == pytest.approx(-sum(flat) / len(flat), abs=1e-6)
    assert metrics["critic/return"] == pytest.approx(sum(flat) / len(flat), abs=1e-6)
    assert metrics["critic/value_loss"] == pytest.approx(sum(v * v for v in flat) / len(flat) / 2, abs=1e-6)
    assert metrics["critic/value"] == 0
    assert metrics["critic/explained_variance"] == pytest.approx(0)
    assert metrics["ppo/kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["ppo/kl_coef"] == 0.01
    assert metrics["critic/optimizer_steps"] == metrics["train/optimizer_steps"] == 1
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.e2e
def test_advantages_are_whitened_over_the_whole_batch_and_not_by_mini_batch(take_steps, updates, tmp_path):
    (tmp_path / "length.py").write_text("def score(prompt, response, answer):\n    return len(response)\n")
    options = ["algo.samples=2", "algo.mini_batches=2", "rollout.temperature=2"]
    take_steps("algo=ppo", *options, f"reward.path={tmp_path / 'length.py'}:score", steps=2)
    assert [name for name, _ in updates] == ["critic", "actor"] * 2
    for _, made in updates:
        plain, mask = made["ppo_advantages"].values.double(), made["response_mask"].values.bool()
        expected = (plain - plain[mask].mean()) / plain[mask].std(correction=0)
        torch.testing.assert_close(made["advantages"].values, expected.float())
        half = torch.cat(made["advantages"].to_list()[:4])
        assert abs(half.mean()) > 1e-2


@pytest.mark.e2e
def test_the_update_raises_what_scored_and_the_critic_learns_the_returns(take_steps, updates):
    found = {}

    def look(run):
        batch = updates[1][1]
        now = run.actor.log_probs(batch.select(["prompts", "responses"], [], []), name="now")["now"].values
        moved = now - batch["old_log_probs"].values
        values = run.critic.values(batch)["values"].values
        good = torch.repeat_interleave(batch["scores"], batch["response_length"]) > 0
        found.update(good=moved[good].mean(), bad=moved[~good].mean(), value=values[good].mean() - values[~good].mean())

    take_steps("algo=ppo", "algo.epochs=8", "algo.critic_lr=3e-3", "algo.value_clip=0", "engine.lr=3e-4", then=look)
    assert found["good"] > 0 > found["bad"]
    assert found["value"] > 0.1


def weights(run, folder):
    """Return the weights of the actor and of the critic."""
    found = []
    for role in (run.actor, run.critic):
        role.group.save_pretrained(str(folder / role.name))
        found.append(load_file(folder / role.name / "model.safetensors"))
    return found


@pytest.mark.parametrize("steps", [2, 3])
def test_while_the_critic_warms_up_the_actor_is_left_bit_for_bit_as_it_was(take_steps, tmp_path, steps):
    found = []
    metrics, batches, _ = take_steps(
        "algo=ppo", "algo.critic_warmup=2", steps=steps, then=lambda run: found.extend(weights(run, tmp_path))
    )
    actor, critic = found
    shipped = load_file(TINY / "model.safetensors")
    assert set(actor) == set(shipped)
    same = [torch.equal(actor[name], tensor) for name, tensor in shipped.items()]
    assert all(same) if steps == 2 else not any(same)
    assert critic["score.weight"].any()
    assert [("loss/policy" in row, row["critic/optimizer_steps"]) for row in metrics] == [
        (False, 1.0),
        (False, 1.0),
        (True, 1.0),
    ][:steps]
    assert all((batch["weights_version"] == 0).all() for batch in batches)


def test_learning_rates_are_apart(take_steps, tmp_path):
    found = []
    (metrics,), _, _ = take_steps(
        "algo=ppo", "engine.lr=0", "algo.critic_lr=1e-3", then=lambda run: found.extend(weights(run, tmp_path))
    )
    assert (metrics["train/lr"], metrics["critic/lr"]) == (0, 1e-3)
    shipped = load_file(TINY / "model.safetensors")
    assert all(torch.equal(found[0][name], tensor) for name, tensor in shipped.items())
    assert found[1]["score.weight"].any()
    (metrics,), _, _ = take_steps("algo=ppo", "engine.lr=2e-4")
    assert (metrics["train/lr"], metrics["critic/lr"]) == (2e-4, 2e-4)  # without its own, the engine's


@pytest.mark.e2e
def test_epochs_and_mini_batches_are_optimizer_steps_of_both(take_steps):
    metrics, batches, _ = take_steps("algo=ppo", "algo.epochs=3", "algo.mini_batches=2", steps=2)
    assert [(row["train/optimizer_steps"], row["critic/optimizer_steps"]) for row in metrics] == [(6, 6)] * 2
    assert batches[1]["weights_version"].tolist() == [6] * 4
    assert metrics[0]["loss/kl_old"] > 1e-6  # the policy moved away from the one that sampled
    assert metrics[1]["critic/value"] != 0


def test_the_controllers_weight_is_what_a_resume_needs():
    algorithm = PPO(PPOConfig(kl_controller="adaptive", kl_coef=0.1))
    assert json.loads(json.dumps(algorithm.state_dict())) == {"kl_coef": 0.1}
    algorithm.load_state_dict({"kl_coef": 0.09})
    assert algorithm.state_dict() == {"kl_coef": 0.09}


@pytest.mark.e2e
@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_the_adaptive_controller_end_to_end(take_steps, updates, kl_in):
    """Step 1 has KL 0: 0.1 * (1 - 0.5 * 0.2) = 0.09. Step 2 has far more than the target: 0.09 * 1.1 = 0.099."""
    options = ["algo.kl_controller=adaptive", "algo.kl_coef=0.1", "algo.kl_gain=0.5", "algo.kl_target=1e-4"]
    options += [f"algo.kl_in={kl_in}", "algo.kl_estimator=k3", "algo.epochs=2"]
    metrics, _, _ = take_steps("algo=ppo", *options, steps=3)
    assert [row["ppo/kl_coef"] for row in metrics] == pytest.approx([0.1, 0.09, 0.099])
    batch = updates[3][1]
    kl = batch["ppo_kl"].values
    assert metrics[1]["ppo/kl"] == pytest.approx(float(kl.sum()) / 4, rel=1e-5)
    assert ("loss/kl_penalty" in metrics[1]) == (kl_in == "loss")
    if kl_in == "loss":
        assert metrics[1]["loss/kl_penalty"] == pytest.approx(0.09 * metrics[1]["loss/kl"], rel=1e-5)
    last = torch.zeros_like(kl)
    last[batch["response_length"].cumsum(0) - 1] = batch["scores"]
    charged = 0.09 if kl_in == "reward" else 0.0
    torch.testing.assert_close(batch["rewards"].values, last - charged * kl)
    assert kl.max() > 1e-4


def test_without_the_kl_there_is_no_reference(take_steps):
    for override in ("algo.kl_in=none", "algo.kl_coef=0"):
        (metrics,), _, roles = take_steps("algo=ppo", override)
        assert roles == {"actor", "critic"}
        assert not {"loss/kl", "ppo/kl", "ppo/kl_coef"} & set(metrics)


# Config


def test_roles_say_where_the_critic_starts_and_how_fast_it_learns():
    roles = PPO(PPOConfig(critic_model="folder", critic_lr=0.5)).roles()
    assert (roles["critic"].kind, roles["critic"].model, roles["critic"].lr) == (CRITIC, "folder", 0.5)
    assert (roles["actor"].trains, roles["actor"].generates, roles["ref"].trains) == (True, True, False)


def test_a_critic_model_that_is_not_there_is_refused(tmp_path):
    config = compose(["algo=ppo", f"algo.critic_model={tmp_path / 'none'}"], PluginManager.load())
    with pytest.raises(ConfigError, match="role 'critic'"):
        check_roles(PPO(config.algo).roles(), config, PluginManager.load())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mini_batches=7", "samples=2"], r"algo\.mini_batches is 7, .* = 6 responses"),
        (["critic_warmup=10"], r"algo\.critic_warmup=10 covers all trainer\.total_steps=10"),
        (["dual_clip=1"], r"algo\.dual_clip is 1\.0; it must be above 1"),
        (["kl_controller=adaptive", "kl_coef=0"], r"nothing to steer with .*kl_coef=0"),
        (["kl_controller=adaptive", "kl_in=none"], r"nothing to steer with algo\.kl_in=none"),
        (["kl_in=loss"], r"k1 has zero expected gradient.* use k2 or k3"),
        (["mini_batches=6", "samples=2", "critic_warmup=9", "dual_clip=3", "kl_in=loss", "kl_estimator=k3"], None),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides, message):
    plugins = PluginManager.load()
    options = ["cluster=in_process", "data.batch_size=3", "trainer.total_steps=10"]
    config = compose(["algo=ppo", *options, *(f"algo.{override}" for override in overrides)], plugins)
    if message is None:
        preflight(config, plugins)
        return
    with pytest.raises(ConfigError, match=message):
        preflight(config, plugins)


@pytest.mark.parametrize(
    "override",
    [
        "samples=0",
        "gamma=1.1",
        "lam=-0.1",
        "clip_low=1.5",
        "value_clip=-1",
        "dual_clip=-2",
        "kl_in=both",
        "kl_target=0",
    ],
)
def test_settings_out_of_range_are_refused(override):
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        compose(["algo=ppo", f"algo.{override}"], PluginManager.load())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("kl_penalty", "'algo.kl_coef' or 'algo.kl_estimator'"),  # verl's is the estimator
        ("init_kl_coef", "'algo.kl_coef'"),
        ("kl_loss_coef", "'algo.kl_coef'"),
        ("use_kl_in_reward", "'algo.kl_in'"),
        ("cliprange", "'algo.clip_low' or 'algo.clip_high'"),
        ("cliprange_value", "'algo.value_clip'"),
        ("num_ppo_epochs", "'algo.epochs'"),
        ("n_samples_per_prompt", "'algo.samples'"),
    ],
)
def test_a_name_of_another_framework_is_answered_with_the_key(name, meant):
    with pytest.raises(ConfigError, match=rf"^unknown key 'algo\.{name}'\. Did you mean {meant}\?"):
        compose(["algo=ppo", f"algo.{name}=1"], PluginManager.load())
