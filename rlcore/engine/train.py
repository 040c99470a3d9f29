"""What a train engine offers to the worker that holds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engine.collectives import Ranks
from rlcore.engine.parallel.layout import Cut, Layout
from rlcore.engine.weights.transfer import Shapes, Weights
from rlcore.ops import Correction, Loss
from rlcore.plugins.roles import POLICY, RoleKind
from rlcore.protocol import DataProto, Ragged

C = TypeVar("C")


@dataclass(frozen=True)
class TrainSetup(Generic[C]):
    """All that a train engine is made from, in each worker process of a role.

    model: the role's model folder, precision and attention.
    engine: the core's keys `engine.*`; `pp`, `tp` and `lr` are the role's.
    config: the engine's own keys `engine.NAME.*`, an object of its spec's `config_class`; None without one.
    ranks: this rank, their number, and its device.
    trains: the role has an optimizer.
    kind: what the role computes (see Role).
    new_head: a critic or reward model may start from a folder without a score head, and gets one of zeros.
    temperature: the run's sampling temperature, by which logits are divided; 0 (greedy) counts as 1.
    total_steps: the run's, for the learning-rate schedule.
    """

    model: ModelConfig
    engine: EngineConfig
    config: C
    ranks: Ranks
    trains: bool
    kind: RoleKind = POLICY
    new_head: bool = True
    temperature: float = 1.0
    total_steps: int = 1


ENGINE_STATE = "engine.json"
"""The file of a saved state that an engine writes last: where it is, the state is whole."""


@dataclass(frozen=True)
class Importance:
    """How tokens get importance weights; see rlcore.ops.importance_weights."""

    kind: Correction
    cap: float
    floor: float = 0.0


@dataclass(frozen=True)
class UpdateItem:
    """One batch with its loss; several may share an optimizer step, each weighted.

    `batch` holds this rank's rows, mini-batch after mini-batch; `sizes` is the number of rows in each, as many for all
    items of an update. `config` is what the loss gets; `keep_together` names a column whose equal values no micro-batch
    may part. `importance` says how tokens are weighted that another policy sampled than is trained; None: not at all.
    """

    batch: DataProto
    sizes: Sequence[int]
    loss: Loss
    config: Any
    weight: float = 1.0
    keep_together: str | None = None
    importance: Importance | None = None


class TrainEngine(ABC):
    """A model that computes log-probs, values or scores and, if it `trains`, takes optimizer steps; all collectively.

    `version` counts optimizer steps; a rollout engine with an older version must be synced before it generates.
    """

    version: int = 0

    @abstractmethod
    def compute(self, batch: DataProto, names: Sequence[str]) -> dict[str, Ragged | Tensor]:
        """Return what `names` asks for, without a gradient.

        Of a policy `log_probs` and `entropy`, of a critic `values`: ragged fp32, as long as `responses`. Of a reward
        model `scores` fp32 [rows].
        """

    @abstractmethod
    def follow(self, other: TrainEngine, share: float) -> None:
        """Move every weight by `share` of the way to the other engine's, which is cut over the ranks like this one.

        1 copies. Raises DataError when the two do not have the same parameters.
        """

    @abstractmethod
    def take(self, weights: Weights, share: float) -> None:
        """Move every weight by `share` of the way to the given ones: `follow`, with whole parameters by name.

        Raises DataError naming the parameters that do not fit, before any has changed.
        """

    @abstractmethod
    def update(self, items: Sequence[UpdateItem], *, epochs: int, step: int) -> dict[str, float]:
        """Take one optimizer step for each mini-batch of each epoch and return the metrics.

        `step` is the run's step, by which the learning rate is scheduled. Raises DataError, before the optimizer step
        and on every rank, when a loss or gradient is not finite, naming the rows.
        """

    @property
    @abstractmethod
    def shapes(self) -> Shapes:
        """The shape of each whole parameter by its Hugging Face name, tied ones once."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """How the model is spread over the engine's ranks, of which this is one."""

    @property
    @abstractmethod
    def cuts(self) -> Mapping[str, Cut]:
        """How the layout cuts each parameter, by the names of `shapes`; the same on every rank."""

    @abstractmethod
    def local_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of every parameter that its stage holds, in the precision of the forward.

        That is the whole of it or, where its Cut has a `dim`, this rank's tensor shard; whole along dp (collective
        there). Ranks of one stage yield the names in the same order. What was yielded is valid until the next.
        """

    @property
    @abstractmethod
    def shared_module(self) -> nn.Module | None:
        """The Hugging Face module if a rollout engine in this process may use it as it stands, else None."""

    def park(self) -> None:  # noqa: B027  (an engine need not)
        """Let weights and optimizer state leave the device until the next call, where the engine can."""

    @abstractmethod
    def rollout_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter whole, in the precision of the forward, by its Hugging Face name, tied ones once.

        What was yielded is valid until the next.
        """

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter whole and in full precision, by its Hugging Face name, tied ones once."""

    @abstractmethod
    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face folder (rank 0 writes): config, safetensors in fp32, tokenizer."""

    @abstractmethod
    def save_state(self, folder: Path) -> None:
        """Write into `folder` all that `load_state` needs to go on bit for bit: weights, optimizer, version, RNG."""

    @abstractmethod
    def load_state(self, folder: Path) -> None:
        """Take back what `save_state` wrote, under any number of ranks. Raises CheckpointError if it does not fit."""
