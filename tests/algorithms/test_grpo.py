"""GRPO: its loss by hand, and its settings end to end."""

import math

import pytest
import torch
from rlcore_grpo import GRPO, GRPOConfig, grpo_loss
from rlcore_plugin_testing.policy_losses import compare_policy_loss

from rlcore.config import compose
from rlcore.errors import ConfigError
from rlcore.ops import Outputs, group_index
from rlcore.plugins import PluginManager
from rlcore.training.preflight import preflight

LN2 = math.log(2)
RATIO = torch.tensor([[1.5, 0.5, 9.0], [0.5, 1.5, 1.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
TO_REFERENCE = torch.tensor([[LN2, 0.0, 7.0], [0.0, LN2, 0.0]])  # log_probs - ref_log_probs
ENTROPY = torch.tensor([[1.0, 2.0, 50.0], [3.0, 4.0, 5.0]])


def loss(mask=MASK, **settings):
    """Return the terms and log_probs [2, 3] of two responses with advantages 2 and -1, clipped to 0.8 and 1.3."""
    old = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.5, -2.5]])
    log_probs = (old + RATIO.log()).requires_grad_()
    batch = {
        "response_mask": mask,
        "advantages": torch.tensor([2.0, -1.0]),
        "old_log_probs": old,
        "ref_log_probs": log_probs.detach() - TO_REFERENCE,
        "response_len": 4,
    }
    config = GRPOConfig(**{"clip_low": 0.2, "clip_high": 0.3, "kl_coef": 0.0, **settings})
    if not config.kl_coef:
        del batch["ref_log_probs"]  # there is none when no reference was started
    return grpo_loss(Outputs({"log_probs": log_probs, "entropy": ENTROPY}), batch, config), log_probs


def gradient(term, log_probs):
    (grad,) = torch.autograd.grad(term.total, log_probs)
    return grad


def test_policy_loss_is_clipped_on_the_side_that_the_advantage_pushes_to():
    """Advantage 2: ratio 1.5 counts as 1.3, ratio 0.5 as itself. Advantage -1: 0.5 counts as 0.8, 1.5 as itself."""
    terms, log_probs = loss()
    policy = terms["policy"]
    assert policy.total.item() == pytest.approx(-2.6 - 1.0 + 0.8 + 1.5 + 1.0)
    assert policy.count == 5
    assert policy.weight == 1.0
    # d(-r A)/d(log_prob) = -r A: to a likelier token where the advantage is positive, exactly 0 where it is clipped.
    grad = gradient(policy, log_probs)
    torch.testing.assert_close(grad, torch.tensor([[0.0, -1.0, 0.0], [0.0, 1.5, 1.0]]))
    assert grad[0, 0] == 0
    assert grad[1, 0] == 0
    assert grad[0, 2] == 0  # masked


@pytest.mark.parametrize(("low", "high", "clipped"), [(0.6, 0.6, 0), (0.6, 0.3, 1), (0.2, 0.6, 1), (0.2, 0.3, 2)])
def test_each_clip_bound_acts_for_itself(low, high, clipped):
    terms, _ = loss(clip_low=low, clip_high=high)
    first, fourth = -2 * min(1.5, 1 + high), max(0.5, 1 - low)
    assert terms["policy"].total.item() == pytest.approx(first - 1.0 + fourth + 1.5 + 1.0)
    assert terms["clipped"].total == clipped
    assert terms["clipped"].count == 5


def test_sequence_mean_gives_every_response_the_same_weight():
    terms, log_probs = loss(loss_mean="sequence")
    policy = terms["policy"]
    assert policy.total.item() == pytest.approx((-2.6 - 1.0) / 2 + (0.8 + 1.5 + 1.0) / 3)
    assert policy.count == 2
    expected = torch.tensor([[0.0, -0.5, 0.0], [0.0, 0.5, 1 / 3]])
    torch.testing.assert_close(gradient(policy, log_probs), expected)


def test_constant_mean_divides_by_the_budget_whatever_the_lengths():
    """Two responses of 2 and 3 tokens with a budget of 4 each: every token weighs 1/8."""
    terms, log_probs = loss(loss_mean="constant", kl_coef=0.25)
    policy = terms["policy"]
    assert policy.total.item() == pytest.approx(-2.6 - 1.0 + 0.8 + 1.5 + 1.0)
    assert (policy.count, terms["kl"].count) == (8, 8)
    torch.testing.assert_close(gradient(policy, log_probs), torch.tensor([[0.0, -1.0, 0.0], [0.0, 1.5, 1.0]]))
    masked, _ = loss(mask=torch.tensor([[0, 0, 0], [1, 1, 1]]), loss_mean="constant", kl_coef=0.25)
    assert masked["policy"].total.item() == pytest.approx(0.8 + 1.5 + 1.0)
    assert masked["policy"].count == masked["kl"].count == 8


@pytest.mark.parametrize(("loss_mean", "count"), [("token", 3), ("sequence", 1)])
def test_a_response_without_tokens_is_not_counted(loss_mean, count):
    terms, log_probs = loss(mask=torch.tensor([[0, 0, 0], [1, 1, 1]]), loss_mean=loss_mean, kl_coef=0.1)
    assert terms["policy"].count == terms["kl"].count == count
    assert terms["policy"].total.item() == pytest.approx(3.3 if loss_mean == "token" else 1.1)
    assert not gradient(terms["policy"], log_probs)[0].any()


@pytest.mark.parametrize(
    ("kind", "at_ln2", "slope"),
    [
        ("k1", LN2, [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]),
        ("k2", LN2**2 / 2, [[LN2, 0.0, 0.0], [0.0, LN2, 0.0]]),
        ("k3", 0.5 - 1 + LN2, [[0.5, 0.0, 0.0], [0.0, 0.5, 0.0]]),
    ],
)
def test_kl_to_the_reference(kind, at_ln2, slope):
    """One token of two and one of three have a log-ratio of ln 2, the others of 0, where every estimate is 0."""
    terms, log_probs = loss(kl_coef=0.25, kl_estimator=kind)
    assert terms["kl"].total.item() == pytest.approx(2 * at_ln2)
    assert (terms["kl"].count, terms["kl"].weight) == (5, 0.25)
    torch.testing.assert_close(gradient(terms["kl"], log_probs), torch.tensor(slope))
    sequence, _ = loss(kl_coef=0.25, kl_estimator=kind, loss_mean="sequence")
    assert sequence["kl"].total.item() == pytest.approx(at_ln2 / 2 + at_ln2 / 3)
    assert sequence["kl"].count == 2


def written_out(config):
    """Return GRPO's loss of responses, token by token."""

    def token(response, t):
        ratio, a = (response.log_probs[t] - response.old_log_probs[t]).exp(), response.advantages[t]
        first = ratio.clamp(max=config.delta) if config.delta is not None and a < 0 else ratio
        loss = -torch.minimum(first * a, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * a)
        d = response.log_probs[t] - response.ref_log_probs[t]
        kl = {"k2": d * d / 2, "k3": (-d).exp() - 1 + d}[config.kl_estimator]
        return loss + config.kl_coef * (ratio * kl if config.kl_unbiased else kl)

    def by_hand(responses):
        losses = [torch.stack([token(r, t) for t in range(len(r.log_probs))]) for r in responses if r.log_probs]
        if config.loss_mean == "sequence":
            return torch.stack([loss.mean() for loss in losses]).mean()
        total = torch.cat(losses)
        return total.mean() if config.loss_mean == "token" else total.sum() / sum(r.budget for r in responses)

    return by_hand


@pytest.mark.parametrize("loss_mean", ["token", "sequence", "constant"])
@pytest.mark.parametrize(
    "settings",
    [
        {"kl_coef": 0.0},
        {"kl_coef": 0.0, "delta": 1.4},
        {"kl_coef": 0.0, "delta": 1.1},
        {"kl_coef": 0.3, "kl_unbiased": True},
        {"kl_coef": 0.3, "kl_unbiased": True, "kl_estimator": "k2", "delta": 2.0},
    ],
)
def test_the_loss_is_the_formula_written_out(loss_mean, settings):
    config = GRPOConfig(clip_low=0.2, clip_high=0.28, loss_mean=loss_mean, **settings)
    compare_policy_loss(grpo_loss, config, written_out(config))


def test_delta_bounds_the_ratio_only_where_the_advantage_is_negative():
    """Of advantage -1, the ratio 1.5 counts as 1.4 and has no gradient; 0.5 is clipped to 0.8, and 1 stays."""
    terms, log_probs = loss(delta=1.4)
    assert terms["policy"].total.item() == pytest.approx(-2.6 - 1.0 + 0.8 + 1.4 + 1.0)
    torch.testing.assert_close(gradient(terms["policy"], log_probs), torch.tensor([[0, -1.0, 0], [0, 0, 1.0]]))
    assert terms["clipped"].total == 3
    lower, _ = loss(delta=1.2)  # the second product's bound, 1 + clip_high, is larger, and acts
    assert lower["policy"].total.item() == pytest.approx(-2.6 - 1.0 + 0.8 + 1.3 + 1.0)


def test_the_unbiased_kl_has_the_gradient_of_the_kl():
    """Over all tokens of pi_old, weighted by their probability, its gradient is that of sum_y pi log(pi / ref)."""
    old, ref, logits = (torch.randn(6, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    old, ref = old.log_softmax(0), ref.log_softmax(0)
    leaf = logits.requires_grad_()
    batch = {"response_mask": torch.ones(6, 1), "old_log_probs": old[:, None], "ref_log_probs": ref[:, None]}
    batch["advantages"] = torch.zeros(6)
    for unbiased in (True, False):
        out = Outputs({"log_probs": leaf.log_softmax(0)[:, None], "entropy": torch.zeros(6, 1)})
        config = GRPOConfig(kl_coef=1.0, kl_unbiased=unbiased)
        # Row y stands for a sample of token y: a sum over samples, each weighted by pi_old(y).
        each = [grpo_loss(_row(out, y), {k: v[y : y + 1] for k, v in batch.items()}, config)["kl"] for y in range(6)]
        expected = sum(p.exp() * term.total for p, term in zip(old, each, strict=True))
        (got,) = torch.autograd.grad(expected, leaf)
        policy = leaf.log_softmax(0)
        (exact,) = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), leaf)
        assert torch.allclose(got, exact, atol=1e-6) is unbiased


def _row(out, y):
    return Outputs({name: values[y : y + 1] for name, values in out.given.items()})


def test_the_length_baseline_end_to_end(take_steps, tmp_path):
    """OPO: the score minus sum(length * score) / sum(length) of the group, without a division."""
    (tmp_path / "length.py").write_text("def score(prompt, response, answer):\n    return len(response)\n")
    options = ["algo.kl_coef=0", "algo.divide_by_std=false", "algo.baseline=length", "algo.loss_mean=constant"]
    options += ["algo.group_size=4", "rollout.temperature=2", f"reward.path={tmp_path / 'length.py'}:score"]
    (metrics,), (batch,), _ = take_steps(*options)
    total = 0.0
    for first in range(0, 16, 4):
        lengths = batch["response_length"][first : first + 4].tolist()
        scores = batch["scores"][first : first + 4].tolist()
        baseline = sum(n * s for n, s in zip(lengths, scores, strict=True)) / sum(lengths)
        total -= sum(n * (s - baseline) for n, s in zip(lengths, scores, strict=True))
    # Weighted by length, advantages over this baseline add up to 0: the token sum's constant part vanishes.
    assert metrics["loss/policy"] == pytest.approx(total / (16 * 6), abs=1e-6) == 0
    assert metrics["train/grad_norm"] > 0


def test_metrics_are_reported_and_not_optimised():
    terms, _ = loss()
    assert set(terms) == {"policy", "entropy", "clipped", "kl_old"}
    for name in ("entropy", "clipped", "kl_old"):
        assert terms[name].weight is None
        assert not terms[name].total.requires_grad
        assert terms[name].count == 5
    assert terms["entropy"].total == 1 + 2 + 3 + 4 + 5
    # KL(old || new) of a token sampled by old: r - 1 - ln r; over ratios 1.5, 0.5, 0.5, 1.5, 1.
    assert terms["kl_old"].total.item() == pytest.approx(2 * (0.5 - math.log(1.5)) + 2 * (LN2 - 0.5), rel=1e-5)


def hand_advantages(batch, divide_by_std):
    """Return the advantages in the module's docstring, group by group."""
    group, scores = group_index(batch["uid"]), batch["scores"]
    advantages = torch.zeros_like(scores)
    for number in group.unique():
        own = scores[group == number]
        advantages[group == number] = (own - own.mean()) / (own.std() + 1e-6 if divide_by_std else 1.0)
    return advantages


def test_without_kl_no_reference_is_started_and_the_first_loss_is_that_of_the_advantages(take_steps, tmp_path):
    """At ratio 1 the loss is minus the mean advantage: over tokens, so that of a longer response weighs more."""
    (tmp_path / "length.py").write_text("def score(prompt, response, answer):\n    return len(response)\n")
    options = ["algo.kl_coef=0", "rollout.temperature=2", f"reward.path={tmp_path / 'length.py'}:score"]
    (metrics,), (batch,), roles = take_steps("algo.group_size=4", *options)
    assert roles == {"actor"}
    assert "loss/kl" not in metrics
    assert not any(name.startswith("ref") for name in batch.keys())  # noqa: SIM118 (a batch is not a dict)
    assert len(batch) == 16
    assert batch["sample_index"].tolist() == [0, 1, 2, 3] * 4
    lengths = batch["response_length"].float()
    expected = -(hand_advantages(batch, True) * lengths).sum() / lengths.sum()
    assert abs(expected) > 1e-3
    assert metrics["loss/policy"] == pytest.approx(float(expected), abs=1e-6)
    assert metrics["loss/entropy"] > 0
    assert metrics["loss/clipped"] == 0
    assert metrics["loss/kl_old"] == pytest.approx(0, abs=1e-6)
    assert metrics["train/optimizer_steps"] == 1


def test_dr_grpo_end_to_end(take_steps, tmp_path):
    """At ratio 1 its loss is minus the sum of (score - group mean) * length, over 16 responses * 6 tokens."""
    (tmp_path / "length.py").write_text("def score(prompt, response, answer):\n    return len(response)\n")
    options = ["algo.kl_coef=0", "algo.divide_by_std=false", "algo.loss_mean=constant", "algo.group_size=4"]
    options += ["rollout.temperature=2", f"reward.path={tmp_path / 'length.py'}:score"]
    (metrics,), (batch,), roles = take_steps(*options)
    assert roles == {"actor"}
    lengths = batch["response_length"].float()
    assert 1 < lengths.mean() < 6
    expected = -(hand_advantages(batch, False) * lengths).sum() / (16 * 6)
    assert abs(expected) > 1e-3
    assert metrics["loss/policy"] == pytest.approx(float(expected), abs=1e-6)


def test_sequence_mean_and_no_division_by_std_end_to_end(take_steps):
    """Groups of two whose rewards are 0 and 1 have advantages -0.5 and 0.5, or divided by sqrt(1/2)."""
    first = ["algo.group_size=2", "algo.kl_coef=0", "algo.loss_mean=sequence", "engine.clip_grad=0"]
    (divided,), (batch,), _ = take_steps(*first)
    (plain,), (same,), _ = take_steps(*first, "algo.divide_by_std=false")
    assert batch["response_text"].tolist() == same["response_text"].tolist()
    assert hand_advantages(batch, False).tolist() == [-0.5, 0.5] * 4
    # Advantages of a group add up to 0, and so does their mean over responses.
    assert divided["loss/policy"] == pytest.approx(0, abs=1e-6)
    assert plain["train/grad_norm"] > 0
    assert divided["train/grad_norm"] / plain["train/grad_norm"] == pytest.approx(math.sqrt(2), rel=1e-4)


@pytest.mark.e2e
def test_kl_estimators_end_to_end(take_steps):
    """Before the first update the reference is the policy: each KL is 0, and of the three only k1 has a slope there."""
    found = {}
    for kind in ("k1", "k2", "k3"):
        options = ["algo.group_size=2", "algo.kl_coef=1", f"algo.kl_estimator={kind}"]
        options += ["algo.kl_unbiased=true"] if kind == "k1" else []
        metrics, _, roles = take_steps(*options, steps=2)
        assert roles == {"actor", "ref"}
        assert metrics[0]["loss/kl"] == pytest.approx(0, abs=1e-6)
        found[kind] = metrics
    k1, k2, k3 = found.values()
    assert k2[0]["train/grad_norm"] == pytest.approx(k3[0]["train/grad_norm"], rel=1e-4)
    assert abs(k1[0]["train/grad_norm"] - k3[0]["train/grad_norm"]) > 0.01 * k3[0]["train/grad_norm"]
    # After it k2 and k3 see the same weights and samples, and estimate differently.
    assert k2[1]["loss/kl"] > 0
    assert k3[1]["loss/kl"] > 0
    assert abs(k2[1]["loss/kl"] - k3[1]["loss/kl"]) > 1e-4 * k3[1]["loss/kl"]


@pytest.mark.e2e
def test_epochs_and_mini_batches_are_optimizer_steps_that_the_next_rollout_sees(take_steps):
    options = ["algo.group_size=2", "algo.epochs=2", "algo.mini_batches=2"]
    metrics, batches, _ = take_steps(*options, steps=2)
    assert [row["train/optimizer_steps"] + row["train/skipped_updates"] for row in metrics] == [4, 4]
    assert [set(batch["weights_version"].tolist()) for batch in batches] == [{0}, {metrics[0]["train/optimizer_steps"]}]
    assert metrics[0]["train/optimizer_steps"] == 4
    assert metrics[0]["loss/kl_old"] > 1e-6  # the policy moved away from the one that sampled


@pytest.mark.parametrize("mini_batches", [1, 3, 4])
def test_fewer_prompts_than_mini_batches_are_refused(mini_batches):
    plugins = PluginManager.load()
    overrides = ["algo=grpo", "cluster=in_process", "data.batch_size=3", f"algo.mini_batches={mini_batches}"]
    config = compose(overrides, plugins)
    if mini_batches <= 3:
        preflight(config, plugins)
        return
    with pytest.raises(ConfigError, match=r"algo\.mini_batches is 4, but .*data\.batch_size = 3"):
        preflight(config, plugins)


@pytest.mark.parametrize(
    "override",
    [
        "group_size=1",
        "delta=0.9",
        "baseline=max",
        "clip_low=-0.1",
        "clip_low=1.5",
        "kl_coef=-1",
        "kl_estimator=k4",
        "epochs=0",
        "beta=1",
    ],
)
def test_settings_out_of_range_are_refused(override):
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        compose(["algo=grpo", f"algo.{override}"], PluginManager.load())


def test_a_kl_without_a_gradient_is_refused():
    plugins = PluginManager.load()
    same = ["algo=grpo", "cluster=in_process", "algo.kl_estimator=k1"]
    for fine in ("algo.kl_unbiased=true", "algo.kl_coef=0"):
        preflight(compose([*same, fine], plugins), plugins)
    with pytest.raises(ConfigError, match=r"algo\.kl_estimator=k1 has zero expected gradient; set k2, k3 or"):
        preflight(compose(same, plugins), plugins)


def test_roles_follow_the_kl():
    assert set(GRPO(GRPOConfig(kl_coef=0.0)).roles()) == {"actor"}
    roles = GRPO(GRPOConfig(kl_coef=0.1)).roles()
    assert (roles["actor"].trains, roles["actor"].generates) == (True, True)
    assert (roles["ref"].trains, roles["ref"].generates) == (False, False)
