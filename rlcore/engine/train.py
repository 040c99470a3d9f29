"""The interface of train engines: forward, backward, optimizer step and weights of one model.

An engine runs in the worker processes of a role; with several ranks, every rank calls each method together. It holds
no loss accounting: `rlcore.engine.update.Updater` cuts batches, counts, normalises and checks, for every engine alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engine.collectives import Ranks
from rlcore.engine.parallel.layout import Layout, ShardSpec
from rlcore.engine.parallel.mesh import TrainMesh
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.update.micro_batch_size import micro_batch_limit
from rlcore.engine.update.updater import Updater
from rlcore.engine.weights.fingerprint import checksum
from rlcore.engine.weights.transfer import Shapes
from rlcore.errors import DataError
from rlcore.model_folder import model_dtype
from rlcore.ops import Need
from rlcore.plugins import POLICY, RoleKind
from rlcore.protocol import DataProto, Ragged

C = TypeVar("C")

ENGINE_STATE = "engine.json"
"""The file that `save` writes last: a saved state with this file is complete."""

Finish = Callable[[DataProto | None, dict[str, Tensor]], Tensor]
"""Called with each micro-batch and its outputs; returns the scalar to backpropagate.

Outputs by name, for the response tokens of all rows laid end to end: `log_probs`, `entropy` and `values` fp32
[tokens], `logits` [tokens, vocab]; a reward model's `scores` fp32 [rows].
"""

Approve = Callable[[float], float]
"""Called once before the optimizer step with this rank's share of the squared gradient norm.

The shares of all ranks add up to the square of the global norm. Returns the factor to multiply the gradients by; raises
DataError on every rank when the step must not be taken.
"""


@dataclass(frozen=True)
class TrainSetup(Generic[C]):
    """The arguments of a train engine, in each worker process.

    `engine` holds the keys of all train engines, `config` the engine's own section `engine.NAME`. `ranks` are the
    processes of the role. `trains` False: no optimizer and no gradients. `new_head`: a critic or reward model may start
    from a folder without a score head, and gets one of zeros. `frozen`: only forwards read the weights, so the engine
    may keep them in the precision of the forward. `temperature` divides the logits, as in sampling. `total_steps` is
    the run's, for the learning-rate schedule. `seed` is the run's, for the weights of a new adapter (`model.lora`).
    """

    model: ModelConfig
    engine: EngineConfig
    config: C
    ranks: Ranks
    trains: bool
    kind: RoleKind = POLICY
    new_head: bool = True
    frozen: bool = False
    temperature: float = 1.0
    total_steps: int = 1
    seed: int = 0


class TrainEngine(ABC):
    """One model with its optimizer. An engine subclasses this and inherits `update` and `compute`.

    `version` counts changes of the weights. `step`, `load` and `follow` add one; a rollout engine with an older version
    is synced before it generates.
    """

    version: int = 0
    description: str = ""
    """How the engine computes, in a few words for the run's first lines."""
    skipped_in_a_row: int = 0
    """The optimizer steps that `trainer.on_nonfinite=skip` has left out since the last one that was taken."""
    micro_batch_tokens: int
    """Most tokens in one forward; 0: no limit. `engine.micro_batch_tokens`; `auto` is set by the worker."""

    def __init__(self, setup: TrainSetup[Any], layout: Layout | None = None, shard: int = 0) -> None:
        """`layout` spreads the model over the ranks; without one, every rank holds the whole model.

        `shard` is the number of data-parallel ranks that share one copy of the weights; 0: all of them.
        """
        self.engine_config = setup.engine
        self.micro_batch_tokens = micro_batch_limit(
            setup.engine.micro_batch_tokens, gpu=setup.ranks.device.type == "cuda"
        )
        self.config = setup.config
        self.model_config = setup.model
        self.ranks = setup.ranks
        self.trains = setup.trains
        self.kind = setup.kind
        # A greedy rollout has temperature 0, by which logits cannot be divided.
        self.temperature = setup.temperature if setup.temperature > 0 else 1.0
        self.total_steps = setup.total_steps
        self.dtype = model_dtype(setup.model)
        self.mesh = TrainMesh(setup.ranks, layout or Layout(dp=setup.ranks.world_size), shard if layout else 1)

    # Compute

    @abstractmethod
    def forward(self, parts: Sequence[DataProto | None], needs: Sequence[Need], finish: Finish) -> None:
        """Run each micro-batch without a gradient and pass its outputs `needs` to `finish`.

        A part has the columns `prompts` and `responses`, ragged int64. All ranks pass the same number of parts; None
        stands for a rank without rows, which joins the collectives on made-up tokens. With pipeline stages `finish` is
        called on the last stage only.
        """

    @abstractmethod
    def forward_backward(
        self, parts: Sequence[DataProto | None], needs: Sequence[Need], finish: Finish, *, last: bool
    ) -> None:
        """Run each micro-batch and backpropagate the loss of `finish`; gradients add up over calls.

        They are averaged over the data-parallel ranks at the latest in `step`. `last`: no other call follows before
        `step`.
        """

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop the gradients added up so far."""

    @abstractmethod
    def step(self, lr: float, approve: Approve) -> None:
        """Complete the gradients, multiply them by the factor that `approve` returns, and step with rate `lr`.

        An error of `approve` passes through and leaves weights, version and optimizer as they were: the updater may
        skip the step and go on.
        """

    # Weights

    @property
    @abstractmethod
    def shapes(self) -> Shapes:
        """The shape of each whole parameter by its Hugging Face name, tied ones once; the same on every rank."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of logits of a token."""

    @abstractmethod
    def export(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield every whole parameter by its Hugging Face name, tied ones once, in `dtype`.

        fp32 gives the master weights; the dtype of the forward may give the weights as the forward rounds them. A
        tensor is valid until the next one. All ranks iterate to the end.
        """

    @abstractmethod
    def load(self, weights: Mapping[str, Tensor], shapes: Shapes, tau: float) -> None:
        """Move every weight by the share `tau` of the way to the given one; 1 copies.

        Each rank reads its own shard. Raises DataError naming the parameters that do not fit, before any has changed.
        """

    def follow(self, other: TrainEngine, tau: float) -> None:
        """Move every weight by the share `tau` of the way to those of an engine in the same processes; 1 copies.

        Raises DataError when the two do not have the same parameters.
        """
        # An exported tensor is valid only until the next one.
        theirs = {name: tensor.clone() for name, tensor in other.export(torch.float32)}
        self.load(theirs, other.shapes, tau)

    @abstractmethod
    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face folder (rank 0 writes): config, safetensors in fp32, tokenizer."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the state from which `restore` continues bit for bit: weights, optimizer, version, random state.

        `folder/model` is a Hugging Face folder, and the file ENGINE_STATE is written last.
        """

    @abstractmethod
    def restore(self, folder: Path) -> None:
        """Read the files of `save`, also under another number of ranks. Raises CheckpointError if it does not fit."""

    # Members that an engine may override

    @property
    def shared_module(self) -> nn.Module | None:
        """The Hugging Face module, if a rollout engine in this process may sample with it as it is."""
        return None

    @property
    def shard_specs(self) -> Mapping[str, ShardSpec]:
        """How the layout divides each parameter, by the names of `shapes`; the same on every rank."""
        return {name: ShardSpec(shape, (0,)) for name, shape in self.shapes.items()}

    @property
    def trained_specs(self) -> Mapping[str, ShardSpec]:
        """How the layout divides each parameter that the optimizer steps: all of them, but with an adapter fewer."""
        return self.shard_specs

    def without_adapter(self) -> TrainEngine:
        """Return a frozen engine on the same weights, whose adapters are as they started.

        Raises DataError for an engine without an adapter.
        """
        raise DataError(f"{type(self).__name__} trains no adapter, so it cannot compute without one")

    def export_local(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's model-parallel shard of each parameter of its stage, in the dtype of the forward.

        Along dp the shards are whole. A parameter whose ShardSpec has no `dim` is whole along tp too. The ranks of a
        stage yield the names in the same order. A tensor is valid until the next one.
        """
        return self.export(self.dtype)

    def held_parameters(self) -> Mapping[str, Tensor]:
        """Return the tensors that hold this rank's shard of the weights between calls, by name."""
        return {}

    def fingerprint(self, dtype: torch.dtype) -> dict[str, int]:
        """Return the checksum of every whole parameter, rounded to `dtype`, on every rank; all ranks call it together.

        An engine that shards its weights may add up the checksums of the shards, which gathers no weights.
        """
        return {name: checksum(tensor) for name, tensor in self.export(dtype)}

    def offload(self) -> None:  # noqa: B027  (an engine need not)
        """Move weights and optimizer state to main memory until the next call of any other method."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the engine's own, added to those of each update."""
        return {}

    # Inherited members

    @property
    def layout(self) -> Layout:
        """How the model is spread over the ranks, of which this is one."""
        return self.mesh.layout

    def compute(self, batch: DataProto, names: Sequence[Need]) -> dict[str, Ragged | Tensor]:
        """Return the outputs `names` of all rows, without a gradient; see Updater.compute."""
        return Updater(self).compute(batch, names)

    def update(self, items: Sequence[UpdateItem], *, epochs: int, step: int) -> dict[str, float]:
        """Take one optimizer step for each mini-batch of each epoch; see Updater.update."""
        return Updater(self).update(items, epochs=epochs, step=step)
