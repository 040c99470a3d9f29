"""The base class of algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from rlcore.plugins.roles import Role

if TYPE_CHECKING:
    from rlcore.config import schema
    from rlcore.protocol import DataProto


class Algorithm:
    """Base class of algorithms: a config, the roles it needs, and the loop of one step.

    It holds no Ray, ranks, devices, padding, weight sync, logging or checkpointing. `config` is the algorithm's own
    frozen dataclass.
    """

    config_class: ClassVar[type]
    uses_reward: bool = True
    """Whether `step` learns from `run.reward`, so that the rows need what the reward reads."""
    compares_samples: bool = False
    """Whether `step` learns only where the rewards of a prompt's samples differ, so that these must not be greedy."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def roles(self) -> Mapping[str, Role]:
        """Return the roles by name; `run.NAME` is the handle of each. Called once, before anything starts."""
        return {"actor": Role(trains=True, generates=True)}

    def data(self, config: schema.Config) -> Mapping[str, schema.DataConfig]:
        """Return further data sets by name, for `run.next_prompts(name)`. Called once, before anything starts."""
        return {}

    def check(self, config: schema.Config) -> None:
        """Raise ConfigError when the config cannot work with this algorithm. Called once, before anything starts."""

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise DataError when a row of the run's data set lacks something that the algorithm reads, such as a column.

        Called for each row, held-out ones included, before anything starts; rlcore adds the row's number to the error.
        `answer` is the value of `data.answer_key`.
        """

    def evaluate(self, run: Any, held_out: DataProto) -> Mapping[str, float]:
        """Return metrics of held-out rows by name, including `accuracy`; for an algorithm with a measure of its own.

        Without this method the role `actor` answers the held-out prompts, and the reward functions decide which answers
        are right.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no evaluate(self, run, held_out)")

    @property
    def evaluates(self) -> bool:
        """Whether the algorithm brings an `evaluate` of its own."""
        return type(self).evaluate is not Algorithm.evaluate

    def step(self, run: Any, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step on a batch of prompts and return its metrics (numbers, or the Metrics of `update`)."""
        raise NotImplementedError(f"{type(self).__name__} defines no step(self, run, prompts)")

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state for a resumed run, without the models, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    def fork_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state with which a fork goes on from a checkpoint of another run; by default that run's own.

        For a state that tells of files in the other run's folder, which the fork does not have.
        """
        return state
