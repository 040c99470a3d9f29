"""The routes of weights to a rollout engine. A worker chooses one at its start and keeps it.

SharedModule: the rollout engine samples with the trained module itself; nothing is sent.
Resharded: the model is sharded over pp or tp, and the rollout engine takes shards; ranks exchange the missing ones.
Gathered: the rollout engine has weights of its own; every parameter is gathered in full, one at a time.
Received: the rollout engine is in other processes; every parameter travels by reference through Ray.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from rlcore.engine.rollout import RolloutEngine, Sampling
from rlcore.engine.train import TrainEngine
from rlcore.engine.weights.fingerprint import CHECK_EVERY, differences
from rlcore.engine.weights.generation import GenerationLayout
from rlcore.engine.weights.meter import Meter, ProcessGroups
from rlcore.engine.weights.reshard import Reshard
from rlcore.engine.weights.transfer import RemoteWeights
from rlcore.errors import DataError, WeightsError
from rlcore.plugins import RolloutCapabilities
from rlcore.protocol import DataProto, Ragged


class WeightRoute(ABC):
    """Updates a rollout engine to the newest weights. `meter` counts the bytes of switches, in Resharded only."""

    def __init__(self, rollout: RolloutEngine) -> None:
        self.rollout = rollout
        self.meter, self._fault = Meter(), ""

    @property
    @abstractmethod
    def version(self) -> int:
        """The version of the weights that sampling must use."""

    @abstractmethod
    def bring(self) -> None:
        """Give the rollout engine the weights of `version`. All ranks of the role call it together.

        Raises WeightsError if the rollout engine then does not have them.
        """

    @property
    def is_current(self) -> bool:
        """Whether the rollout engine has these weights already."""
        return self.rollout.version == self.version

    def _refuse(self, fault: str) -> None:
        """Raise WeightsError for a fault of the delivered weights, unless it is ""; the engine then has no version."""
        if fault:
            self._fault, self.rollout.version = fault, -1
            raise WeightsError(
                f"{type(self.rollout).__name__} has not got the trained weights of version {self.version} by the route "
                f"{type(self).__name__}: {fault}. Nothing was sampled; test both engines by `rlcore plugins test`"
            )


class _FromTrainEngine(WeightRoute):
    """A route from the train engine in the same process.

    The first switch and every CHECK_EVERY-th after it are checked, by fingerprints or else by a probe. `dtype`: of the
    delivered weights; None: that of the forward.
    """

    def __init__(self, rollout: RolloutEngine, train: TrainEngine, dtype: torch.dtype | None = None) -> None:
        super().__init__(rollout)
        self.train, self._dtype = train, dtype or train.dtype
        self._switches = 0

    @property
    def version(self) -> int:
        """See WeightRoute."""
        return self.train.version

    def _check(self) -> None:
        """After a switch: raise WeightsError if the rollout engine has other weights than the trained ones."""
        if self._switches % CHECK_EVERY == 0:
            trained, held = self.train.fingerprint(self._dtype), self.rollout.fingerprint()
            self._refuse(self._probe() if held is None else differences(held, trained))
        self._switches += 1  # not before: the switch after a refused one is checked too

    def _probe(self) -> str:
        """Compare the log-probs of a few sampled tokens with the train engine's; return the fault, or ""."""
        row = {"prompts": Ragged.from_list([torch.arange(8)]), "uid": ["probe"], "sample_index": torch.arange(1)}
        batch = DataProto.from_single_dict(row)
        batch = batch.union(self.rollout.generate(batch, Sampling(16, temperature=self.train.temperature)))
        trained = self.train.compute(batch, ["log_probs"])["log_probs"]
        gap = float((trained.values - batch.view("rollout_log_probs").values).abs().mean())
        # Rounding to bf16 makes less of a difference, and other weights more.
        return "" if gap <= 0.1 else f"log-probs of a probe differ from training's by {gap:.3g} nats"


class SharedModule(_FromTrainEngine):
    """The rollout engine samples with the trained module, so only the version changes."""

    def bring(self) -> None:
        """See WeightRoute."""
        self.rollout.version = self.train.version
        self._check()


class Gathered(_FromTrainEngine):
    """Every parameter is gathered in full, one at a time, and copied into the rollout engine's own weights."""

    def bring(self) -> None:
        """See WeightRoute."""
        self.rollout.sync(self.train.export(self.train.dtype), self.train.version, self.train.shapes)
        self._check()


class Resharded(_FromTrainEngine):
    """Ranks exchange the shards that their generating shards lack (HybridFlow, arXiv 2409.19256, section 5.3).

    `adopted`: the rollout engine decodes from the shards themselves; without it they are freed when it has copied them.
    """

    def __init__(self, rollout: RolloutEngine, train: TrainEngine, reshard: Reshard, *, adopted: bool) -> None:
        super().__init__(rollout, train)
        self._reshard = reshard
        self._adopted = adopted
        self.meter = reshard.meter

    def bring(self) -> None:
        """See WeightRoute."""
        shards = self._reshard.gather(self.train.export_local())
        try:
            self.rollout.adopt(shards, self.train.version, self._reshard.shapes)
            self.meter.redundant = self._reshard.redundant_bytes(self.train.held_parameters())
        finally:
            if not self._adopted:
                self._reshard.release()
        self._check()


class Received(WeightRoute):
    """Other processes train; the controller sends their weights to `receive` before it asks for samples."""

    def __init__(self, rollout: RolloutEngine) -> None:
        super().__init__(rollout)
        self._sent: int | None = None

    @property
    def version(self) -> int:
        """See WeightRoute: the version sent last, also if the engine could not take it; 0 before the first."""
        return self._sent or 0

    def bring(self) -> None:
        """See WeightRoute. Nothing can be brought from here, so it raises: why the weights are missing or stale.

        DataError, or the WeightsError of `receive`, as the controller reads the error of a sample first.
        """
        if self._sent is None:
            raise DataError("this worker samples with the weights of other processes, but has received none")
        self._refuse(self._fault)
        raise DataError(
            f"this worker was sent weights of version {self._sent}, but its engine has version {self.rollout.version}: "
            "the update failed; send the weights again before sampling"
        )

    def receive(self, weights: RemoteWeights) -> None:
        """Copy the weights into the rollout engine, and compare their fingerprint, unless one of the two has none.

        Raises DataError naming the parameters that do not fit, and WeightsError naming those that then differ.
        """
        self._sent, self._fault = weights.version, ""
        self.rollout.sync(iter(weights.items()), weights.version, weights.shapes)
        if weights.trained and (held := self.rollout.fingerprint()) is not None:
            self._refuse(differences(held, weights.trained))


def choose_route(
    train: TrainEngine,
    rollout: RolloutEngine,
    can: RolloutCapabilities,
    generation: GenerationLayout,
    groups: ProcessGroups,
) -> WeightRoute:
    """Return the route between two engines in one process, by the capabilities of the rollout engine's spec.

    All ranks call it together, as it makes process groups. Raises ConfigError for a tensor that the layouts cannot
    divide evenly.
    """
    if can.shares_module and train.shared_module is not None:
        return SharedModule(rollout, train, torch.float32)  # of the masters, which the module holds
    is_cut = train.layout.pp * train.layout.tp > 1
    # An engine with a copy of the whole model on each rank gains nothing from an exchange of shards.
    if is_cut and (can.adopts_weights or generation.tp > 1):
        dtype, device = train.dtype, train.ranks.device
        reshard = Reshard(generation, train.shard_specs, groups, dtype=dtype, device=device)
        return Resharded(rollout, train, reshard, adopted=can.adopts_weights)
    return Gathered(rollout, train)
