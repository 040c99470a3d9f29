"""The loss contract: invariances of loss and gradient, accounting, and what is refused."""

import math

import pytest
import torch
from rlcore_grpo import GRPOConfig, grpo_loss
from transformers import AutoModelForCausalLM

from rlcore.engine.update.items import Numerics, UpdateItem
from rlcore.errors import DataError
from rlcore.ops import masked_sum, metric, needs, objective
from rlcore.protocol import DataProto

CONFIG = GRPOConfig(kl_coef=0.1)
RESPONSE_LEN = 20


def update(engine, batch, *, loss=grpo_loss, config=CONFIG, epochs=1, sizes=None, **options):
    item = UpdateItem(batch, sizes or [len(batch)], loss, config, **options)
    return engine.update([item], epochs=epochs, step=0)


def by_hand(folder, batch: DataProto, config: GRPOConfig):
    """GRPO's loss and gradient one row at a time on the plain Hugging Face model, written out from the paper."""
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, tokens, per_row, rows = 0.0, 0, 0.0, 0
    for i in range(len(batch)):
        prompt, response = batch["prompts"][i], batch["responses"][i]
        mask, old, ref = batch["response_mask"][i], batch["old_log_probs"][i], batch["ref_log_probs"][i]
        logits = hf(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        log_p = logits.log_softmax(-1)[range(len(response)), response]
        advantage = batch["advantages"][i]
        ratio = (log_p - old).exp()
        surrogate = torch.min(ratio * advantage, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage)
        token = -surrogate + config.kl_coef * ((ref - log_p).exp() - (ref - log_p) - 1).clamp(max=10)
        total = total + (token * mask).sum()
        tokens += int(mask.sum())
        if mask.any():
            per_row = per_row + (token * mask).sum() / mask.sum()
            rows += 1
    counts = {"token": (total, tokens), "sequence": (per_row, rows), "constant": (total, len(batch) * RESPONSE_LEN)}
    total, count = counts[config.loss_mean]
    loss = total / count
    loss.backward()
    return loss.item(), {name: p.grad for name, p in hf.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "loss_mean"), [("qwen2", "token"), ("qwen2", "sequence"), ("qwen2", "constant"), ("llama", "token")]
)
def test_loss_and_gradient_equal_the_formula_written_out(
    make_engine, model_folder, random_batch, gradients, assert_close, kind, loss_mean
):
    config = GRPOConfig(kl_coef=0.1, loss_mean=loss_mean)
    engine = make_engine(kind, micro_batch_rows=5)
    metrics = update(engine, random_batch(), config=config, constants={"response_len": RESPONSE_LEN})
    want_loss, want = by_hand(model_folder(kind), random_batch(), config)
    assert metrics["loss/policy"] + 0.1 * metrics["loss/kl"] == pytest.approx(want_loss, rel=1e-5)
    assert_close(gradients(engine), want)


def by_padding(folder, batch: DataProto, side: str, extra: int):
    """GRPO's gradient from one padded batch on the plain Hugging Face model, padded on one side by an amount."""
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [torch.cat([p, r]) for p, r in zip(batch["prompts"].to_list(), batch["responses"].to_list(), strict=True)]
    width = max(len(row) for row in rows) + extra
    ids, attention = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    starts = [width - len(row) if side == "left" else 0 for row in rows]
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        ids[i, start : start + len(row)], attention[i, start : start + len(row)] = row, 1
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    log_p = hf(input_ids=ids, attention_mask=attention, position_ids=positions).logits.log_softmax(-1)
    total, tokens = 0.0, 0
    for i, response in enumerate(batch["responses"].to_list()):
        first = starts[i] + len(batch["prompts"][i]) - 1
        new = log_p[i, first : first + len(response)][range(len(response)), response]
        old, ref, mask = (batch[name][i] for name in ("old_log_probs", "ref_log_probs", "response_mask"))
        ratio, advantage = (new - old).exp(), batch["advantages"][i]
        token = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        token = token + CONFIG.kl_coef * ((ref - new).exp() - (ref - new) - 1).clamp(max=10)
        total, tokens = total + (token * mask).sum(), tokens + int(mask.sum())
    (total / tokens).backward()
    return {name: p.grad for name, p in hf.named_parameters()}


@pytest.mark.parametrize(("side", "extra"), [("left", 0), ("left", 5), ("right", 0), ("right", 5)])
def test_gradient_does_not_depend_on_padding_side_or_amount(
    make_engine, model_folder, random_batch, gradients, assert_close, side, extra
):
    engine = make_engine()
    update(engine, random_batch())
    assert_close(gradients(engine), by_padding(model_folder(), random_batch(), side, extra))


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_rows": 1},
        {"micro_batch_rows": 5},
        {"micro_batch_tokens": 30},
    ],
)
def test_gradient_does_not_depend_on_micro_batches(
    make_engine, random_batch, gradients, assert_close, options, loss_mean
):
    config = GRPOConfig(kl_coef=0.1, loss_mean=loss_mean)
    plain, other = make_engine(), make_engine(**options)
    want = update(plain, random_batch(), config=config)
    got = update(other, random_batch(), config=config)
    assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert_close(gradients(other), gradients(plain))


def test_gradient_does_not_depend_on_row_order(make_engine, random_batch, gradients, assert_close):
    plain, other = make_engine(micro_batch_rows=4), make_engine(micro_batch_rows=4)
    batch = random_batch()
    update(plain, batch)
    update(other, batch[torch.randperm(len(batch), generator=torch.Generator().manual_seed(3))])
    assert_close(gradients(other), gradients(plain))


@pytest.mark.parametrize("extra", [1, 9])
def test_gradient_does_not_depend_on_padding_in_the_batch(make_engine, random_batch, gradients, assert_close, extra):
    """Responses padded on the right with masked tokens, as a batch from a padded tensor would have them."""
    from rlcore.protocol import Ragged

    batch, padded = random_batch(), random_batch()
    length = int(batch["responses"].lengths.max()) + extra
    for name in ("responses", "response_mask", "old_log_probs", "ref_log_probs"):
        rows = batch[name].to_padded(length=length)
        padded[name] = Ragged.from_list(list(rows))
    plain, other = make_engine(), make_engine()
    update(plain, batch)
    update(other, padded)
    assert_close(gradients(other), gradients(plain))


def test_masked_tokens_give_no_gradient(make_engine, random_batch, gradients):
    first, second = random_batch(), random_batch()
    # What stands on masked tokens' own log-probs may be anything; the tokens themselves stay, they are context.
    for name in ("old_log_probs", "ref_log_probs"):
        values = torch.where(second["response_mask"].values.bool(), second[name].values, torch.tensor(-50.0))
        second[name] = second[name].with_values(values)
    a, b = make_engine(), make_engine()
    assert update(a, first) == update(b, second)
    for name, grad in gradients(a).items():
        assert torch.equal(grad, gradients(b)[name])


def test_a_higher_advantage_raises_the_log_prob(make_engine, random_batch):
    batch = random_batch(groups=2, size=2)
    engine = make_engine(lr=1e-3)
    before = engine.compute(batch, ["log_probs"])["log_probs"]
    batch["old_log_probs"], batch["ref_log_probs"] = before, before
    batch["advantages"] = torch.tensor([1.0, -1.0, 0.0, 0.0])
    update(engine, batch, config=GRPOConfig(kl_coef=0.0))
    after = engine.compute(batch, ["log_probs"])["log_probs"]
    mask = batch["response_mask"]
    change = [
        float(((a - b) * m).sum()) for a, b, m in zip(after.to_list(), before.to_list(), mask.to_list(), strict=True)
    ]
    assert change[0] > 0 > change[1]


def test_learning_rate_zero_leaves_the_weights_bit_for_bit(make_engine, random_batch):
    engine = make_engine(lr=0.0)
    before = {name: tensor.clone() for name, tensor in engine.export(torch.float32)}
    update(engine, random_batch())
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.export(torch.float32))
    assert engine.version == 1


def half(out, batch, config):
    return {"half": objective(masked_sum(out.log_probs, batch["response_mask"]), batch["response_mask"].sum())}


def test_several_batches_share_one_optimizer_step(make_engine, random_batch, gradients, assert_close):
    a, b = random_batch(seed=1), random_batch(groups=2, seed=2)
    both, alone = make_engine(), make_engine()
    items = [UpdateItem(a, [len(a)], grpo_loss, CONFIG, 0.7), UpdateItem(b, [len(b)], half, None, 0.5)]
    metrics = both.update(items, epochs=1, step=0)
    assert metrics["train/optimizer_steps"] == 1
    assert {"loss/policy", "loss/half"} <= set(metrics)
    update(alone, a)
    grad_a = gradients(alone)
    update(alone, b, loss=half)
    want = {name: 0.7 * grad_a[name] + 0.5 * grad for name, grad in gradients(alone).items()}
    assert_close(gradients(both), want)


def test_epochs_and_mini_batches_make_optimizer_steps(make_engine, random_batch):
    engine = make_engine(lr=1e-3)
    metrics = update(engine, random_batch(), epochs=2, sizes=[3, 6, 3])
    assert metrics["train/optimizer_steps"] == engine.version == 6


def test_clipping_bounds_the_gradient_and_reports_the_norm_before(make_engine, random_batch, gradients):
    free, clipped = make_engine(), make_engine(clip_grad=0.01)
    assert update(free, random_batch())["train/grad_norm"] == update(clipped, random_batch())["train/grad_norm"] > 0.01
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients(clipped).values()))
    assert norm == pytest.approx(0.01, rel=1e-3)


def test_an_update_over_no_rows_is_skipped_and_counted(make_engine, random_batch):
    engine = make_engine()
    metrics = update(engine, random_batch()[:0], sizes=[0])
    assert metrics["train/skipped_updates"] == 1
    assert engine.version == 0


def test_an_update_with_every_token_masked_is_skipped(make_engine, random_batch):
    batch = random_batch()
    batch["response_mask"] = batch["response_mask"].map(torch.zeros_like)
    engine = make_engine()
    assert update(engine, batch)["train/skipped_updates"] == 1


def test_a_loss_that_is_not_finite_stops_before_the_step_and_names_the_rows(make_engine, random_batch):
    batch = random_batch()
    advantages = batch["advantages"]
    advantages[4] = float("nan")
    batch["advantages"] = advantages
    engine = make_engine(lr=1e-3, micro_batch_rows=1)
    before = {name: tensor.clone() for name, tensor in engine.export(torch.float32)}
    with pytest.raises(DataError, match=r"term 'policy' is nan over rows uid=0:1 sample=1;? ?.*weights were left"):
        update(engine, batch)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.export(torch.float32))
    assert engine.version == 0


def steep(out, batch, config):
    # Finite in value, infinite in slope: the square root at 0.
    zero = (out.log_probs - out.log_probs.detach()).square().sqrt()
    return {"steep": objective(zero.sum(), batch["response_mask"].sum())}


def test_a_gradient_that_is_not_finite_stops_before_the_step(make_engine, random_batch):
    engine = make_engine(lr=1e-3)
    with pytest.raises(
        DataError, match=r"gradient norm is nan; the gradient of term 'steep' .* rows .*uid=0:0 sample=0"
    ):
        update(engine, random_batch(), loss=steep)
    assert engine.version == 0


def steep_in_one_row(out, batch, config):
    mask, far = batch["response_mask"], (batch["advantages"] == 7.0)[:, None]
    zero = (out.log_probs - out.log_probs.detach()).square()
    return {
        "sound": objective(masked_sum(out.log_probs, mask), mask.sum()),
        "kl": objective(torch.where(far, zero, 1 + zero).sqrt().sum(), mask.sum(), 0.5),
    }


def one_row_apart(random_batch):
    batch = random_batch()
    advantages = batch["advantages"]
    advantages[4] = 7.0
    batch["advantages"] = advantages
    return batch


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_gradient_that_is_not_finite_names_its_term_its_rows_and_keys(make_engine, random_batch, rows):
    """In micro-batches of any size only the row of the square root at 0, and only its term."""
    engine = make_engine(lr=1e-3, micro_batch_rows=rows)
    with pytest.raises(DataError) as caught:
        update(engine, one_row_apart(random_batch), loss=steep_in_one_row, config=GRPOConfig(kl_coef=0.25))
    assert str(caught.value) == (
        "the gradient norm is nan; the gradient of term 'kl' is not finite in rows uid=0:1 sample=1; the weights were "
        "left unchanged. Keys that may help: engine.lr below 0.001, algo.kl_coef below 0.25, "
        "trainer.on_nonfinite=skip, which leaves such steps out and may be set when the run is resumed"
    )


def huge_in_one_row(out, batch, config):
    mask = batch["response_mask"]
    factor = torch.where((batch["advantages"] == 7.0)[:, None], 1e36, 1.0)
    return {"kl": objective(masked_sum(out.log_probs * factor, mask), mask.sum(), 0.5)}


def test_a_norm_that_overflows_names_the_largest_gradient(make_engine, random_batch):
    """All gradients are finite, but the sum of their squares is infinite in fp32: 0.5 * 1e36 = 5e35."""
    with pytest.raises(
        DataError, match=r"is inf; .* finite, the largest 5e\+35 of term 'kl' in rows uid=0:1 sample=1; the"
    ):
        update(make_engine(lr=1e-3), one_row_apart(random_batch), loss=huge_in_one_row)


def far_from_the_reference(random_batch):
    """The probability of a token fell by e^100, so that exp in k3 and its gradient are infinite in fp32."""
    batch = random_batch()
    ref = batch["ref_log_probs"].values.clone()
    ref[(batch["response_mask"].values > 0).nonzero()[0]] = 100.0
    batch["ref_log_probs"] = batch["ref_log_probs"].with_values(ref)
    return batch


def test_a_kl_far_from_the_reference_trains_and_without_a_bound_names_it(make_engine, random_batch):
    engine = make_engine(lr=1e-3)
    metrics = update(engine, far_from_the_reference(random_batch), config=GRPOConfig(kl_coef=0.1))
    assert math.isfinite(metrics["loss/kl"])
    assert math.isfinite(metrics["train/grad_norm"])
    with pytest.raises(DataError, match=r"term 'kl' is inf over .*trainer.log_ratio_bound=20.*algo.kl_coef below 0.1"):
        update(
            engine,
            far_from_the_reference(random_batch),
            config=GRPOConfig(kl_coef=0.1),
            numerics=Numerics(log_ratio_bound=0),
        )


SKIP = Numerics(on_nonfinite="skip")


def test_a_skipped_step_leaves_everything_as_without_it(make_engine, random_batch):
    """Three mini-batches, the middle one with a NaN: weights and optimizer end as after the other two alone."""
    batch = random_batch()
    advantages = batch["advantages"]
    advantages[5] = float("nan")
    batch["advantages"] = advantages
    engine, plain = make_engine(lr=1e-2), make_engine(lr=1e-2)
    metrics = update(engine, batch, sizes=[4, 4, 4], numerics=SKIP)
    kept = update(plain, batch[[*range(4), *range(8, 12)]], sizes=[4, 4])
    assert (metrics.pop("train/nonfinite_updates"), kept.pop("train/nonfinite_updates")) == (1, 0)
    assert metrics == kept
    for each in (engine, plain):
        update(each, random_batch(seed=2), sizes=[12])
    assert engine.version == plain.version == 3
    theirs = dict(plain.export(torch.float32))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in engine.export(torch.float32))


def test_five_steps_in_a_row_are_skipped_and_the_sixth_stops_the_run(make_engine, random_batch):
    bad = one_row_apart(random_batch)
    options = {"loss": steep_in_one_row, "numerics": SKIP}
    engine = make_engine(lr=1e-3)
    metrics = update(engine, bad, epochs=5, **options)
    assert (metrics["train/nonfinite_updates"], metrics["train/optimizer_steps"]) == (5, 0)
    update(engine, random_batch(), numerics=SKIP)
    assert update(engine, bad, epochs=5, **options)["train/nonfinite_updates"] == 5
    with pytest.raises(DataError, match=r"6 optimizer steps in a row were not finite; .* at most 5.* uid=0:1 sample=1"):
        update(engine, bad, **options)
    assert engine.version == 1


def mean_over_micro_batch(out, batch, config):
    return {"loss": objective(out.log_probs.mean(), 1.0)}


def count_from_output(out, batch, config):
    return {"loss": objective(out.log_probs.sum(), (out.log_probs < -4).sum())}


def metrics_only(out, batch, config):
    return {"loss": metric(out.log_probs.sum(), 1)}


def uses_entropy_undeclared(out, batch, config):
    return {"loss": objective(out.entropy.sum(), 1)}


def not_terms(out, batch, config):
    return out.log_probs.mean()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), TypeError("a fault in a loss")])
def test_no_gradient_is_left_in_memory_by_an_update_that_failed(make_engine, random_batch, monkeypatch, error):
    engine = make_engine()
    whole = engine.forward_backward

    def fail(*args, **options):
        whole(*args, **options)
        raise error

    monkeypatch.setattr(engine, "forward_backward", fail)
    with pytest.raises(type(error), match=str(error)):
        update(engine, random_batch())
    module = engine.model.hf if hasattr(engine.model, "hf") else engine.model
    assert not any(p.grad is not None and p.grad.any() for p in module.parameters())


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (mean_over_micro_batch, DataError, "add up to 3.0 over the micro-batches, but to 1.0"),
        (count_from_output, DataError, "changes with the model's outputs"),
        (metrics_only, DataError, "at least one must be an objective"),
        (not_terms, DataError, "must return a dict of terms"),
        (uses_entropy_undeclared, AttributeError, r"put @needs\('entropy'\)"),
    ],
)
def test_a_loss_that_breaks_the_contract_is_refused(make_engine, random_batch, loss, error, message):
    engine = make_engine(lr=1e-3, micro_batch_rows=4)
    with pytest.raises(error, match=message):
        update(engine, random_batch(), loss=loss)
    assert engine.version == 0


@needs("logits")
def from_logits(out, batch, config):
    log_p = out.logits.log_softmax(-1).gather(-1, batch["responses"][..., None]).squeeze(-1)
    return {"loss": objective(masked_sum(log_p, batch["response_mask"]), batch["response_mask"].sum())}


def test_a_loss_can_ask_for_logits(make_engine, random_batch, gradients, assert_close):
    a, b = make_engine(), make_engine()
    update(a, random_batch(), loss=from_logits)
    update(b, random_batch(), loss=half)
    assert_close(gradients(a), gradients(b))


def test_a_frozen_engine_refuses_updates(make_engine, random_batch):
    with pytest.raises(DataError, match="frozen"):
        update(make_engine(trains=False), random_batch())


def test_log_probs_come_in_row_order_and_for_zero_rows(make_engine, random_batch):
    batch = random_batch()
    one, many = make_engine(trains=False), make_engine(trains=False, micro_batch_rows=2)
    a, b = one.compute(batch, ["log_probs", "entropy"]), many.compute(batch, ["log_probs", "entropy"])
    for name in ("log_probs", "entropy"):
        assert torch.equal(a[name].lengths, batch["responses"].lengths)
        torch.testing.assert_close(a[name].values, b[name].values, rtol=1e-5, atol=1e-5)
    assert len(one.compute(batch[:0], ["log_probs"])["log_probs"]) == 0


def test_a_model_in_bf16_trains_with_fp32_weights(make_engine, random_batch):
    engine = make_engine(dtype="bf16", lr=1e-3)
    off = (
        engine.compute(random_batch(), ["log_probs"])["log_probs"].values
        - make_engine().compute(random_batch(), ["log_probs"])["log_probs"].values
    )
    assert 1e-4 < off.abs().max() < 0.3
    metrics = update(engine, random_batch())
    assert math.isfinite(metrics["loss/policy"])
    assert all(tensor.dtype is torch.float32 for _, tensor in engine.export(torch.float32))
