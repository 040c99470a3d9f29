"""What a rollout engine offers to the worker that holds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from rlcore.config import ModelConfig, RolloutConfig
from rlcore.engine.weights.meter import Group
from rlcore.engine.weights.transfer import Shapes
from rlcore.ops import noise_key
from rlcore.protocol import DataProto

C = TypeVar("C")


@dataclass(frozen=True)
class RolloutSetup(Generic[C]):
    """All that a rollout engine is made from, in the worker process that it samples in.

    model: the model's folder, precision and attention.
    rollout: the core's keys `rollout.*`.
    config: the engine's own keys `rollout.NAME.*`, an object of its spec's `config_class`; None without one.
    device: where it computes.
    shared: the train engine's module, for an engine that can generate with it; None: the engine keeps its own weights.
    tensor_group: the ranks that sample the same rows together, each with its shard of every layer; None: whole layers.
    engine_order: the ranks of all such groups, group after group; they start together. Empty without a tensor group.
    """

    model: ModelConfig
    rollout: RolloutConfig
    config: C
    device: torch.device
    shared: nn.Module | None = None
    tensor_group: Group | None = None
    engine_order: Sequence[int] = ()


@dataclass(frozen=True)
class Sampling:
    """How one generate call samples, and the names from which its noise is made.

    Row (uid, sample_index) of call number `call` of step `step` draws the same noise on any rank and in any order, and
    another noise in any other call, step or purpose.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int = 0
    step: int = 0
    purpose: str = "train"
    call: int = 0

    def key(self, uid: str, sample_index: int) -> int:
        """Return the noise key of one row."""
        return noise_key(self.seed, self.step, self.purpose, self.call, uid, sample_index)

    @property
    def is_plain(self) -> bool:
        """Whether tokens come from the model's own distribution at a temperature, nothing cut away."""
        return self.top_p >= 1.0 and self.top_k == 0 and self.min_tokens == 0 and self.temperature > 0


class RolloutEngine(ABC):
    """Generates responses with the weights of a train engine.

    `version` is that of the weights it holds. `exact`: its log-probs are the train engine's up to rounding of the same
    arithmetic, so that they can stand in for them. `adopts`: it can generate from tensors that are not its own.
    """

    version: int = -1
    exact: bool = False
    adopts: bool = False
    shares_module: bool = False

    @abstractmethod
    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """Take over whole weights by their Hugging Face names; each is valid until the next.

        `shapes` are those of all that `weights` will yield. Raises DataError when names are missing or unknown or have
        another shape than here, before the first is asked for: the weights held until then go on answering.
        """

    def adopt(self, shards: Iterator[tuple[str, Tensor]], version: int, shapes: Shapes) -> None:
        """Take over this rank's generating shards by name, as `sync` does with whole weights.

        An engine that `adopts` generates from these very tensors, which stay valid until the next call; others copy.
        """
        self.sync(shards, version, shapes)

    @abstractmethod
    def generate(self, batch: DataProto, sampling: Sampling) -> DataProto:
        """Return, for each row's `prompts`, `uid` and `sample_index`, one response.

        Columns: `responses` (ragged int64, with the end token if one was sampled), `response_mask` (ragged int64, 1),
        `rollout_log_probs` (ragged fp32, nats, of the distribution that was sampled), `response_text` (object),
        `prompt_length` and `response_length` (int64, tokens), `finished` (bool: ended by itself), `weights_version`
        (int64).
        """

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Let go of what the process holds for the engine, which is not used again."""
