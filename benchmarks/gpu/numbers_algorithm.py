"""A local plugin: one update on given responses, so that two devices can be compared without sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlcore import Algorithm, AlgorithmSpec, DataProto, Role, Run, hookimpl
from rlcore.ops import Outputs, Term, masked_sum, needs, objective

RLCORE_API = 1


@dataclass(frozen=True)
class NumbersConfig:
    """No settings."""


@needs("log_probs", "entropy")
def loss_of_numbers(out: Outputs, batch: Mapping[str, Any], config: NumbersConfig) -> dict[str, Term]:
    """Return a loss that takes in log-probs and entropy."""
    mask = batch["response_mask"]
    return {"loss": objective(masked_sum(0.1 * out.entropy - out.log_probs, mask), mask.sum())}


class Numbers(Algorithm):
    """One step: the answers' log-probs, written to the run's folder, and an update."""

    config_class = NumbersConfig
    config: NumbersConfig

    def roles(self) -> Mapping[str, Role]:
        """Return the actor."""
        return {"actor": Role(trains=True, generates=True)}

    def step(self, run: Run, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step and return the update's metrics."""
        batch = prompts.union(run.encode(prompts, "answer"))
        batch = batch.union(run.actor.log_probs(batch, name="old_log_probs"))
        torch.save(batch["old_log_probs"].values, run.dir / "log_probs.pt")
        return run.actor.update(batch, loss=loss_of_numbers)


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register it."""
    return AlgorithmSpec("gpu_numbers", Numbers)
