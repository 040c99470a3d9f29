"""The torch engine's own options change no number."""

import pytest
import torch
from rlcore_grpo import GRPOConfig, grpo_loss

from rlcore.engine.update.items import UpdateItem
from rlcore.protocol import Ragged

CONFIG = GRPOConfig(kl_coef=0.1)


def update(engine, batch, config=CONFIG):
    return engine.update([UpdateItem(batch, [len(batch)], grpo_loss, config)], epochs=1, step=0)


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
@pytest.mark.parametrize(
    "options",
    [
        {"padding_free": False},
        {"padding_free": False, "micro_batch_rows": 3},
        {"logits_chunk": 7},
        {"activation_checkpointing": True},
    ],
)
def test_gradient_does_not_depend_on_how_it_is_computed(
    make_engine, random_batch, gradients, assert_close, options, loss_mean
):
    config = GRPOConfig(kl_coef=0.1, loss_mean=loss_mean)
    plain, other = make_engine(), make_engine(**options)
    want = update(plain, random_batch(), config)
    got = update(other, random_batch(), config)
    assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert_close(gradients(other), gradients(plain))


@pytest.mark.parametrize("extra", [1, 9])
def test_gradient_does_not_depend_on_padding_in_the_batch(make_engine, random_batch, gradients, assert_close, extra):
    """Responses padded on the right with masked tokens, as a batch from a padded tensor would have them."""
    batch, padded = random_batch(), random_batch()
    length = int(batch["responses"].lengths.max()) + extra
    for name in ("responses", "response_mask", "old_log_probs", "ref_log_probs"):
        padded[name] = Ragged.from_list(list(batch[name].to_padded(length=length)))
    plain, other = make_engine(), make_engine(padding_free=False)
    update(plain, batch)
    update(other, padded)
    assert_close(gradients(other), gradients(plain))


def test_recomputing_activations_turns_no_dropout_on(make_engine, random_batch, gradients, assert_close):
    plain, recomputing = make_engine("gpt2"), make_engine("gpt2", activation_checkpointing=True)
    for engine in (plain, recomputing):
        update(engine, random_batch())
    assert_close(gradients(recomputing), gradients(plain))
    a, b = (engine.compute(random_batch(), ["log_probs"])["log_probs"].values for engine in (plain, recomputing))
    torch.testing.assert_close(a, b)
