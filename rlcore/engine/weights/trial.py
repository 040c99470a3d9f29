"""The trial of a rollout engine that no test has seen (`RolloutEngine.untested`), with the first weights that it gets.

Two rows are sampled with weights under which every token is equally likely, so that a change of weights is seen, and
twice with the trained weights: their tokens must be equal, and their log-probs those of the train engine. Rows draw by
noise keys of their own, so the trial changes no sample of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from rlcore.engine.rollout import RolloutEngine, Sampling
from rlcore.engine.train import TrainEngine
from rlcore.engine.weights.transfer import Shapes
from rlcore.protocol import DataProto, Ragged

Weights = Iterable[tuple[str, Tensor]]
Change = Callable[[Weights], Iterator[tuple[str, Tensor]]]
"""Replaces some weights on their way to a rollout engine."""

LARGEST_GAP = 0.1
"""Nats. Rounding to bf16 makes less of a difference, and other weights more."""
LEVEL = 2**-6
"""The number in all places of the matrices of `Trial.level`; exact in every precision."""


def unchanged(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights as they are."""
    return iter(weights)


def sample_probe(engine: RolloutEngine, temperature: float, rows: int = 1) -> DataProto:
    """Return at most 16 sampled tokens of each of `rows` rows of one prompt, and the prompt."""
    batch = DataProto.from_single_dict(
        {
            "prompts": Ragged.from_list([torch.arange(8)] * rows),
            "uid": ["probe"] * rows,
            "sample_index": torch.arange(rows),
        }
    )
    return batch.union(engine.generate(batch, Sampling(16, temperature=temperature)))


def compare_with_training(rows: DataProto, train: TrainEngine) -> str:
    """Compare the log-probs of sampled rows with the train engine's; return the fault, or "". All ranks call it."""
    log_probs = train.compute(rows, ["log_probs"])["log_probs"]
    assert isinstance(log_probs, Ragged)
    trained, sampled = log_probs.values, rows.view("rollout_log_probs").values
    gap = float((trained - sampled).abs().mean())
    if gap <= LARGEST_GAP:
        return ""
    return (
        f"log-probs of a probe differ from training's by {gap:.3g} nats: they are {float(sampled.mean()):.4g} on "
        f"average, and training's {float(trained.mean()):.4g}"
    )


class Trial:
    """Tries an engine; afterwards it has the trained weights, or a fault is found.

    deliver: gives the engine all weights, some of them replaced; all ranks call it.
    shapes: of all weights. None: the engine samples with the trained module itself, so that none may be replaced.
    train: whose log-probs are compared; None: it is in other processes.
    offload: frees the memory of all train engines of this process. Then the log-probs are not compared, as there may be
        no room for a forward beside an engine that is awake.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        deliver: Callable[[Change], None],
        shapes: Shapes | None,
        train: TrainEngine | None,
        offload: Callable[[], None] | None,
    ) -> None:
        self._engine, self._deliver, self._shapes = engine, deliver, shapes
        self._train, self._offload = train, offload
        self._temperature = 1.0 if train is None else train.temperature

    def run(self) -> str:
        """Return the fault, the same on all ranks of a train engine, or ""."""
        if self._shapes is not None:
            self._deliver(self.level)
            fault = self._agreed(self._sees_change(self._shapes))
            self._engine.sleep()  # the train engines come back to the device for the next delivery
            if fault:
                return fault
        self._deliver(unchanged)
        fault, rows = self._repeats()
        if self.compares and not fault:
            assert self._train is not None
            fault = compare_with_training(rows, self._train)
        return self._agreed(fault)

    @property
    def compares(self) -> bool:
        """Whether log-probs are compared with the train engine's."""
        return self._train is not None and self._offload is None

    def level(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, with one number in all places of those that have a row for each token of the vocabulary.

        Also a shard of them gives all tokens the same logit, whatever the other weights are.
        """
        assert self._shapes is not None
        rows = vocabulary(self._shapes)
        for name, tensor in weights:
            yield name, torch.full_like(tensor, LEVEL) if self._shapes[name][:1] == (rows,) else tensor

    def _sample(self) -> DataProto:
        if self._offload is not None:
            self._offload()
        return sample_probe(self._engine, self._temperature, rows=2)

    def _sees_change(self, shapes: Shapes) -> str:
        log_probs, equal = self._sample().view("rollout_log_probs").values, -math.log(vocabulary(shapes))
        if float((log_probs - equal).abs().max()) <= 0.01:
            return ""
        return (
            "weights were delivered under which all tokens are equally likely, with a log-prob of "
            f"{equal:.4g} nats, but its log-probs are {float(log_probs.min()):.4g} to {float(log_probs.max()):.4g}"
        )

    def _repeats(self) -> tuple[str, DataProto]:
        first, second = self._sample(), self._sample()
        for one, other in zip(*(rows.view("responses").to_list() for rows in (first, second)), strict=True):
            if one.tolist() != other.tolist():
                return f"the same row has tokens {one.tolist()}, and sampled again {other.tolist()}", first
        return "", first

    def _agreed(self, fault: str) -> str:
        """Return the first rank's fault: all ranks stop together, as the next delivery needs all of them."""
        faults = [fault] if self._train is None else self._train.ranks.gather(fault)
        return next(filter(None, faults), "")


def vocabulary(shapes: Shapes) -> int:
    """Return the rows of a model's token embedding, its first matrix."""
    return next(shape[0] for shape in shapes.values() if len(shape) == 2)
