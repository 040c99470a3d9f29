"""The routes of weights to a rollout engine. A worker chooses one at its start and keeps it.

SharedModule: the rollout engine samples with the trained module itself; nothing is sent.
Resharded: the model is sharded over pp or tp, and the rollout engine takes shards; ranks exchange the missing ones.
Gathered: the rollout engine has weights of its own; every parameter is gathered in full, one at a time.
Received: the rollout engine is in other processes; every parameter travels by reference through Ray.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn

import torch

from rlcore.engine.rollout import RolloutEngine
from rlcore.engine.train import TrainEngine
from rlcore.engine.weights.fingerprint import CHECK_EVERY, differences
from rlcore.engine.weights.generation import GenerationLayout
from rlcore.engine.weights.meter import Meter, ProcessGroups
from rlcore.engine.weights.reshard import Reshard
from rlcore.engine.weights.transfer import RemoteWeights
from rlcore.engine.weights.trial import Change, Trial, compare_with_training, sample_probe, unchanged
from rlcore.errors import ConfigError, DataError, WeightsError
from rlcore.plugins import RolloutCapabilities

log = logging.getLogger(__name__)


class WeightRoute(ABC):
    """Updates a rollout engine to the newest weights. `meter` counts the bytes of switches, in Resharded only.

    `offload`: moves all train engines of the process to main memory before an engine samples in a trial; None: they
    stay. `leads`: this process speaks for all that sample for the role.
    """

    offload: Callable[[], None] | None = None
    leads: bool = True

    def __init__(self, rollout: RolloutEngine) -> None:
        self.rollout = rollout
        self.meter, self._fault = Meter(), ""
        self._trial_due = rollout.untested is not None

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
            self._stop(
                f"{type(self.rollout).__name__} has not got the trained weights of version {self.version} by the route "
                f"{type(self).__name__}: {fault}. Nothing was sampled; test both engines by `rlcore plugins test`"
            )

    def _stop(self, message: str) -> NoReturn:
        """Raise WeightsError; the engine then has no version, so that it does not sample if the error is caught."""
        self._fault, self.rollout.version = message, -1
        raise WeightsError(message)

    def _try(self, trial: Trial) -> None:
        """Try the engine with its first weights, which it then has.

        Raises WeightsError if it fails or raises; its ConfigError and DataError as they are.
        """
        untested = self.rollout.untested
        assert untested is not None
        fault, cause = "it was interrupted", None
        try:
            fault = trial.run()
        except (ConfigError, DataError):
            raise  # of the weights or the settings, which another version would refuse too
        except Exception as error:
            fault, cause = f"{type(error).__name__}: {error}", error
        finally:
            if fault:
                self.rollout.version = -1  # it may have the trial's weights
        if fault:
            self._fault = (
                f"{untested.name} was tried with its first weights, as no test of rlcore has seen it, and failed: "
                f"{fault}. Known to pass: {untested.tested}. Install one of these, or choose another rollout engine"
            )
            raise WeightsError(self._fault) from cause
        self._trial_due = False
        if self.leads:
            log.warning(
                "no test of rlcore has seen %s; it was tried with its first weights and passed%s. Known to pass: %s",
                *(untested.name, "" if trial.compares else ", without a look at training's log-probs", untested.tested),
            )


class _FromTrainEngine(WeightRoute):
    """A route from the train engine in the same process.

    The first switch and every CHECK_EVERY-th after it are checked, by fingerprints or else by a probe. `dtype`: of the
    delivered weights; None: that of the forward. `replaces_weights`: the rollout engine has weights of its own.
    """

    replaces_weights = True

    def __init__(self, rollout: RolloutEngine, train: TrainEngine, dtype: torch.dtype | None = None) -> None:
        super().__init__(rollout)
        self.train, self._dtype = train, dtype or train.dtype
        self._switches = 0

    @property
    def version(self) -> int:
        """See WeightRoute."""
        return self.train.version

    def bring(self) -> None:
        """See WeightRoute."""
        tried = self._trial_due
        if tried:
            shapes = self.train.shapes if self.replaces_weights else None
            self._try(Trial(self.rollout, self._deliver_in_trial, shapes, self.train, self.offload))
        else:
            self._deliver(unchanged)
        self._check(probe=not tried)

    @abstractmethod
    def _deliver(self, change: Change) -> None:
        """Give the rollout engine the weights of `version`, some of them replaced by `change`."""

    def _deliver_in_trial(self, change: Change) -> None:
        received, copied = self.meter.received, self.meter.copied
        self._deliver(change)
        if change is not unchanged:  # a run without the trial has not sent these
            self.meter.received, self.meter.copied = received, copied

    def _check(self, *, probe: bool) -> None:
        """After a switch: raise WeightsError if the rollout engine has other weights than the trained ones.

        `probe`: an engine without a fingerprint is compared by log-probs; a trial has done so.
        """
        if self._switches % CHECK_EVERY == 0:
            trained, held = self.train.fingerprint(self._dtype), self.rollout.fingerprint()
            if held is not None:
                self._refuse(differences(held, trained))
            elif probe:
                self._refuse(compare_with_training(sample_probe(self.rollout, self.train.temperature), self.train))
        self._switches += 1  # not before: the switch after a refused one is checked too


class SharedModule(_FromTrainEngine):
    """The rollout engine samples with the trained module, so only the version changes."""

    replaces_weights = False

    def _deliver(self, change: Change) -> None:
        self.rollout.version = self.train.version


class Gathered(_FromTrainEngine):
    """Every parameter is gathered in full, one at a time, and copied into the rollout engine's own weights."""

    def _deliver(self, change: Change) -> None:
        self.rollout.sync(change(self.train.export(self.train.dtype)), self.train.version, self.train.shapes)


class Resharded(_FromTrainEngine):
    """Ranks exchange the shards that their generating shards lack (HybridFlow, arXiv 2409.19256, section 5.3).

    `adopted`: the rollout engine decodes from the shards themselves; without it they are freed when it has copied them.
    """

    def __init__(self, rollout: RolloutEngine, train: TrainEngine, reshard: Reshard, *, adopted: bool) -> None:
        super().__init__(rollout, train)
        self._reshard = reshard
        self._adopted = adopted
        self.meter = reshard.meter

    def _deliver(self, change: Change) -> None:
        shards = change(self._reshard.gather(self.train.export_local()))
        try:
            self.rollout.adopt(shards, self.train.version, self._reshard.shapes)
            self.meter.redundant = self._reshard.redundant_bytes(self.train.held_parameters())
        finally:
            if not self._adopted:
                self._reshard.release()


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
        if self._fault:
            self._stop(self._fault)
        raise DataError(
            f"this worker was sent weights of version {self._sent}, but its engine has version {self.rollout.version}: "
            "the update failed; send the weights again before sampling"
        )

    def receive(self, weights: RemoteWeights) -> None:
        """Copy the weights into the rollout engine, and compare their fingerprint, unless one of the two has none.

        Raises DataError naming the parameters that do not fit, and WeightsError naming those that then differ.
        """
        self._sent, self._fault = weights.version, ""

        def deliver(change: Change) -> None:
            self.rollout.sync(change(weights.items()), weights.version, weights.shapes)

        if self._trial_due:
            self._try(Trial(self.rollout, deliver, weights.shapes, None, self.offload))
        else:
            deliver(unchanged)
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
