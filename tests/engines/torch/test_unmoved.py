"""An update that should change weights and changes none is an error; one that may leave them as they are is none."""

import pytest
import torch
from rlcore_grpo import GRPOConfig, grpo_loss

from rlcore.engine.update.items import UpdateItem
from rlcore.errors import WeightsError


def update(engine, batch):
    return engine.update([UpdateItem(batch, [len(batch)], grpo_loss, GRPOConfig(kl_coef=0.0))], epochs=1, step=0)


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.export(torch.float32)}


def detached(engine):
    """Have the optimizer step copies of the parameters, as after a model was replaced."""
    groups = engine.optimizer.param_groups
    for group in groups:
        group["params"] = [torch.nn.Parameter(parameter.detach().clone()) for parameter in group["params"]]
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)


def skipping(engine):
    """Have the optimizer take no step."""
    engine.optimizer.step = lambda: None


@pytest.mark.parametrize("fault", [detached, skipping])
@pytest.mark.parametrize("lr", [1e-2, 1e-6, 1e-8])
def test_an_optimizer_that_does_not_step_the_model_is_found_in_the_first_update(make_engine, random_batch, fault, lr):
    engine, batch = make_engine(lr=lr), random_batch()
    before = weights(engine)
    fault(engine)
    with pytest.raises(WeightsError, match=rf"changed no weight, with learning rate {lr:g} and gradient norm \d"):
        update(engine, batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())


@pytest.mark.parametrize("lr", [1e-2, 1e-6, 1e-9])
def test_sound_updates_pass(make_engine, random_batch, lr):
    engine = make_engine(lr=lr)
    before = weights(engine)
    assert update(engine, random_batch())["train/grad_norm"] > 0
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())


def without_rate(engine, batch):
    engine.engine_config = type(engine.engine_config)(lr=0.0)


def without_advantages(engine, batch):
    batch["advantages"] = torch.zeros(len(batch))


def with_advantages_too_small_for_adamw(engine, batch):
    batch["advantages"] = batch["advantages"] * 1e-12


def with_a_rate_below_fp32s_precision(engine, batch):
    engine.engine_config = type(engine.engine_config)(lr=1e-14)


def of_no_actions(engine, batch):
    batch["response_mask"] = batch["response_mask"].with_values(torch.zeros_like(batch["response_mask"].values))


@pytest.mark.parametrize(
    "harmless",
    [
        without_rate,
        without_advantages,
        with_advantages_too_small_for_adamw,
        with_a_rate_below_fp32s_precision,
        of_no_actions,
    ],
)
def test_weights_may_stay_as_they_are(make_engine, random_batch, harmless):
    """Also where the optimizer is at fault: nothing shows it."""
    engine, batch = make_engine(lr=1e-3), random_batch()
    skipping(engine)
    harmless(engine, batch)
    update(engine, batch)


def test_the_rest_of_a_model_may_stay_as_it_is(make_engine, random_batch):
    """One parameter that changes is enough, as a new critic's head in its first step."""
    engine = make_engine(lr=1e-3)
    names = [name for name, _ in engine.parameters.named_local()]
    for name, parameter in engine.parameters.named_local():
        parameter.requires_grad_(name == names[-1])
    update(engine, random_batch())
    assert len(names) > 20
