"""Importance weights against gradients that are written out one row at a time, on the plain Hugging Face model."""

import math

import pytest
import torch
from rlcore_grpo import GRPOConfig, grpo_loss
from transformers import AutoModelForCausalLM

from rlcore.engine.update.items import Importance, UpdateItem
from rlcore.ops import masked_sum, needs, objective

CONFIG = GRPOConfig(kl_coef=0.1)


def nll(out, batch, config):
    mask = batch["response_mask"]
    return {"nll": objective(masked_sum(-out.log_probs, mask), mask.sum())}


@needs("logits")
def nll_of_logits(out, batch, config):
    mask = batch["response_mask"]
    log_probs = out.logits.log_softmax(-1).gather(-1, batch["responses"][..., None]).squeeze(-1)
    return {"nll": objective(masked_sum(-log_probs, mask), mask.sum())}


def nll_of_all(out, batch, config):
    return {"nll": objective(-out.log_probs.sum(), batch["responses"].numel())}


@pytest.fixture
def sampled(random_batch):
    """12 rows whose behaviour policy is off by up to a factor of 5 from old_log_probs, in both directions."""
    batch = random_batch(seed=3)
    old = batch["old_log_probs"]
    off = torch.rand(len(old.values), generator=torch.Generator().manual_seed(1)) * 3.2 - 1.6
    batch["rollout_log_probs"] = old.with_values(old.values - off)
    batch["weights_version"] = torch.tensor([3, 4] * 6)
    return batch


def update(engine, batch, cap, *, loss=grpo_loss, config=CONFIG):
    how = cap if cap is None or isinstance(cap, Importance) else Importance("token", cap)
    item = UpdateItem(batch, [len(batch)], loss, config, importance=how)
    return engine.update([item], epochs=1, step=0)


def truncated(ratio, mask, cap):
    """w = min(pi_old / pi_rollout, cap)"""
    return ratio.clamp(max=cap)


def by_hand(folder, batch, cap, term, old=True, weigh=truncated):
    """The gradient of sum(w * term) / tokens, w a constant; and w of every token."""
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, tokens, weights = 0.0, 0, []
    for i in range(len(batch)):
        prompt, response, mask = batch["prompts"][i], batch["responses"][i], batch["response_mask"][i]
        logits = hf(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        log_p = logits.log_softmax(-1)[range(len(response)), response]
        compared = batch["old_log_probs"][i] if old else log_p.detach()
        weight = weigh((compared - batch["rollout_log_probs"][i]).exp(), mask, cap)
        total = total + (weight * term(log_p, batch[[i]]) * mask).sum()
        tokens += int(mask.sum())
        weights.append(weight[mask.bool()])
    (total / tokens).backward()
    return {name: p.grad for name, p in hf.named_parameters()}, torch.cat(weights)


def grpo_term(log_p, row):
    advantage, ref = row["advantages"][0], row["ref_log_probs"][0]
    ratio = (log_p - row["old_log_probs"][0]).exp()
    surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -surrogate + 0.1 * ((ref - log_p).exp() - (ref - log_p) - 1).clamp(max=10)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_clipped_loss_is_weighted_by_old_over_rollout(
    make_engine, model_folder, sampled, gradients, assert_close, rows
):
    """In micro-batches of any size; what the loss reports is what it reports without weights, to the last bit."""
    engine, plain = make_engine(micro_batch_rows=rows), make_engine(micro_batch_rows=rows)
    engine.version = 5
    metrics, unweighted = update(engine, sampled, 2.0), update(plain, sampled, None)
    want, weights = by_hand(model_folder(), sampled, 2.0, grpo_term)
    assert_close(gradients(engine), want)
    assert {k: v for k, v in metrics.items() if k.startswith("loss/")} == {
        k: v for k, v in unweighted.items() if k.startswith("loss/")
    }
    assert metrics["train/importance_weight"] == pytest.approx(weights.mean().item(), rel=1e-5)
    truncated = (weights == 2.0).float().mean().item()
    assert 0.1 < truncated < 0.9
    assert metrics["train/importance_truncated"] == pytest.approx(truncated)
    assert (metrics["rollout/staleness"], metrics["rollout/staleness_max"]) == (1.5, 2.0)  # 5 - 3 and 5 - 4
    assert not {"train/importance_weight", "rollout/staleness"} & unweighted.keys()


def whole_inside(ratio, mask, cap):
    whole = ratio[mask.bool()].prod()
    return (whole if 0.5 <= whole <= 2.0 else 0.0) + 0 * ratio


@pytest.mark.parametrize(
    ("how", "weigh"),
    [
        (Importance("sequence", 3.0), lambda ratio, mask, cap: ratio[mask.bool()].prod().clamp(max=3.0) + 0 * ratio),
        (Importance("mask", band=(0.5, 2.0)), lambda ratio, mask, cap: ratio * ((ratio >= 0.5) & (ratio <= 2.0))),
        (Importance("sequence_mask", band=(0.5, 2.0)), whole_inside),
    ],
)
def test_a_weight_for_the_sequence_and_a_band(make_engine, model_folder, sampled, gradients, assert_close, how, weigh):
    engine = make_engine(micro_batch_rows=5)
    metrics = update(engine, sampled, how)
    want, weights = by_hand(model_folder(), sampled, how.cap, grpo_term, weigh=weigh)
    assert_close(gradients(engine), want)
    assert weights.std() > 0.1
    assert metrics["train/importance_weight"] == pytest.approx(weights.mean().item(), rel=1e-5)
    cut = weights == (3.0 if how.kind == "sequence" else 0.0)
    assert 0 < cut.float().mean() < 1
    assert metrics["train/importance_truncated"] == pytest.approx(cut.float().mean().item(), rel=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_rows_of_the_weights_that_train_are_measured_by_themselves(make_engine, sampled, rows):
    engine = make_engine(micro_batch_rows=rows)
    newest = [0, 3, 7]
    sampled["weights_version"] = torch.tensor([engine.version if row in newest else -1 for row in range(12)])
    log_probs = make_engine().compute(sampled, ["log_probs"])["log_probs"]
    apart = [
        (log_probs[row] - sampled["rollout_log_probs"][row])[sampled["response_mask"][row].bool()] for row in newest
    ]
    metrics = engine.update([UpdateItem(sampled, [12], grpo_loss, CONFIG)], epochs=2, step=0)
    found = metrics["rollout/train_rollout_logprob_diff_same_weights"]
    assert found == pytest.approx(torch.cat(apart).abs().mean().item(), rel=1e-4)
    assert found != pytest.approx(metrics["rollout/train_rollout_logprob_diff"], rel=1e-2)


def test_the_gap_between_the_engines_is_measured_before_the_first_step(make_engine, sampled):
    """Whatever the micro-batches, and not again once the weights have moved; without samples there is none."""
    log_probs = make_engine().compute(sampled, ["log_probs"])["log_probs"]
    mask = sampled["response_mask"].values.bool()
    apart = (log_probs.values - sampled["rollout_log_probs"].values)[mask]
    for rows in (0, 1, 5):
        engine = make_engine(micro_batch_rows=rows)
        item = UpdateItem(sampled, [len(sampled)], grpo_loss, CONFIG)
        metrics = engine.update([item], epochs=3, step=0)
        assert metrics["train/optimizer_steps"] == 3
        assert metrics["rollout/train_rollout_logprob_diff"] == pytest.approx(apart.abs().mean().item(), rel=1e-4)
        assert metrics["rollout/train_rollout_logprob_diff_max"] == pytest.approx(apart.abs().max().item(), rel=1e-4)
        beyond = (apart.abs() > 0.5).float().mean().item()
        assert 0 < beyond < 1
        assert metrics["rollout/train_rollout_logprob_diff_beyond"] == pytest.approx(beyond, rel=1e-4)
        assert metrics["rollout/kl"] == pytest.approx((apart.exp() - 1 - apart).clamp(max=10).mean().item(), rel=1e-4)
        assert "rollout/train_rollout_logprob_diff_same_weights" not in metrics  # versions 3 and 4 have sampled all
    values = sampled["rollout_log_probs"].values.clone()
    values[mask.nonzero()[0]] = torch.nan  # what a broken rollout engine gives is not lost among what is sound
    broken = sampled[:]
    broken["rollout_log_probs"] = sampled["rollout_log_probs"].with_values(values)
    metrics = make_engine(micro_batch_rows=1).update(
        [UpdateItem(broken, [len(broken)], grpo_loss, CONFIG)], epochs=1, step=0
    )
    assert math.isnan(metrics["rollout/train_rollout_logprob_diff"])
    assert math.isnan(metrics["rollout/train_rollout_logprob_diff_max"])
    no_samples = sampled.select([name for name in sampled.batch.keys() if name != "rollout_log_probs"])  # noqa: SIM118
    assert not [name for name in update(make_engine(), no_samples, None) if name.startswith("rollout/")]


@pytest.mark.parametrize("loss", [nll, nll_of_logits])
def test_without_old_log_probs_the_present_policy_is_compared(
    make_engine, model_folder, sampled, gradients, assert_close, loss
):
    sampled = sampled.select([name for name in sampled.batch.keys() if name != "old_log_probs"])  # noqa: SIM118
    engine = make_engine(micro_batch_rows=5)
    now = engine.compute(sampled, ["log_probs"])["log_probs"]
    off = sampled["rollout_log_probs"].values - sampled["rollout_log_probs"].values.mean()
    sampled["rollout_log_probs"] = now.with_values(now.values + off)
    update(engine, sampled, 1.5, loss=loss)
    want, weights = by_hand(model_folder(), sampled, 1.5, lambda log_p, row: -log_p, old=False)
    assert weights.std() > 0.1
    assert_close(gradients(engine), want)


def test_tokens_that_were_not_sampled_and_rows_that_are_no_samples_weigh_1(make_engine, sampled, gradients):
    plain = make_engine()
    update(plain, sampled, None, loss=nll_of_all)
    ratio_1 = sampled[:]
    ratio_1["rollout_log_probs"] = sampled["old_log_probs"].with_values(
        sampled["old_log_probs"].values.masked_fill(sampled["response_mask"].values == 0, -90.0)
    )
    no_samples = sampled.select([name for name in sampled.batch.keys() if name != "rollout_log_probs"])  # noqa: SIM118
    for batch in (ratio_1, no_samples):
        engine = make_engine()
        metrics = update(engine, batch, 2.0, loss=nll_of_all)
        assert all(torch.equal(grad, gradients(plain)[name]) for name, grad in gradients(engine).items())
        assert metrics.get("train/importance_weight", 1.0) == 1.0
