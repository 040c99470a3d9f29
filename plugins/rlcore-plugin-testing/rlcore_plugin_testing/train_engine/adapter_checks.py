"""The check of a train engine's LoRA adapters."""

from __future__ import annotations

import torch

from rlcore import DataError, Ragged
from rlcore.config import LoraConfig
from rlcore.engine import TrainEngine
from rlcore_plugin_testing.report import CheckFailed, NotApplicable, expect_error
from rlcore_plugin_testing.train_engine import problem
from rlcore_plugin_testing.train_engine.suite import SMOOTH, TrainEngineSuite, expect_equal, weights_of

NEAR = 1e-4
"""Largest difference of a log-prob between an adapter beside the weights and one merged into them, in nats."""


def adapters(suite: TrainEngineSuite) -> str:
    """Only the adapter trains; the model beneath it is the reference; saved states and folders bring it back."""
    if not suite.spec.capabilities.adapters:
        raise NotApplicable("the engine declares no adapters")
    lora = LoraConfig(rank=3)
    plain, engine = suite.engine(trains=False), suite.engine(lora=lora, **SMOOTH)
    before = _log_probs(suite, plain)
    if not torch.equal(_log_probs(suite, engine), before):
        raise CheckFailed("a new adapter changes log-probs, though its B is 0")
    expect_equal(weights_of(engine), weights_of(plain), "the export with a new adapter")
    for seed in range(2):
        engine.update([suite.item(seed=seed)], epochs=1, step=seed)
    after = _log_probs(suite, engine)
    if torch.equal(after, before):
        raise CheckFailed("two updates of an adapter change no log-prob")
    reference = engine.without_adapter()
    if not torch.equal(_log_probs(suite, reference), before):
        raise CheckFailed("without_adapter() does not compute as the model did before training")
    with expect_error(DataError, "a step of without_adapter()"):
        reference.step(1.0, lambda squares: 1.0)
    merged = suite.engine(trains=False)
    merged.load(weights_of(engine), engine.shapes, 1.0)
    _expect_near(_log_probs(suite, merged), after, "a model that loads the exported weights")
    engine.save(suite.folder / "adapter")
    again = suite.engine(lora=lora, **SMOOTH)
    again.restore(suite.folder / "adapter")
    started = suite.engine(lora=LoraConfig(path=str(suite.folder / "adapter" / "model")), **SMOOTH)
    _expect_near(_log_probs(suite, started), after, "an engine that starts from the saved adapter")
    for each in (engine, again):
        each.update([suite.item(seed=2)], epochs=1, step=2)
    expect_equal(weights_of(again), weights_of(engine), "an update after restore")
    return "a new adapter, its base, its merged weights, its folder and its saved state"


def _log_probs(suite: TrainEngineSuite, engine: TrainEngine) -> torch.Tensor:
    columns = engine.compute(problem.rows(suite.vocab), ["log_probs"])
    log_probs = columns["log_probs"]
    assert isinstance(log_probs, Ragged)
    return log_probs.values


def _expect_near(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    if (off := float((got - want).abs().max())) > NEAR:
        raise CheckFailed(f"{what} has log-probs that are off by {off:.2g}")
