"""Whether a run could learn: did rewards ever differ within a prompt's samples, and was any row trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.protocol import DataProto
from rlcore.training.evaluate import sample_rows

SHOWN = 200
"""Characters of a text in the message."""


class Learned:
    """What the steps so far had to learn from. It is part of the checkpoints.

    compares_samples: the algorithm learns only where rewards of a prompt's samples differ.
    """

    def __init__(self, compares_samples: bool) -> None:
        self._compares_samples = compares_samples
        self._state: dict[str, Any] = {"groups": 0, "differed": False, "updates": 0, "trained": False, "sample": None}

    def add(self, metrics: Mapping[str, float], scored: Sequence[DataProto]) -> None:
        """Add a step: its metrics, and the batches scored in it."""
        state = self._state
        if (equal := metrics.get("health/equal_groups")) is not None:
            state["groups"] += 1
            state["differed"] |= equal < 1
        taken = [value for name, value in metrics.items() if name.endswith("/optimizer_steps")]
        state["updates"] += len(taken)
        state["trained"] |= any(value > 0 for value in taken)
        if state["sample"] is None and (batches := [batch for batch in scored if len(batch)]):
            (row,) = sample_rows(batches[0], 1)
            # As text, since an answer may be any object and a checkpoint holds JSON.
            prompt, response, answer = (
                str(row.get(name))[:SHOWN] for name in ("prompt_text", "response_text", "answer")
            )
            state["sample"] = f"prompt {prompt!r}, response {response!r}, answer {answer!r}, score {row['scores']}"

    def nothing(self) -> str | None:
        """Return why the run has learned nothing, with its first sample; None if it could learn, or has no step."""
        state = self._state
        if state["updates"] and not state["trained"]:
            reason = "no row was trained in any step"
        elif self._compares_samples and state["groups"] and not state["differed"]:
            reason = "the rewards of a prompt's samples were equal in every step, so none was better than another"
        else:
            return None
        return reason if state["sample"] is None else f"{reason}. The first sample: {state['sample']}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take the state of a checkpoint; None is that of an earlier version, whose steps may have learned."""
        self._state.update(state or {"differed": True, "trained": True})
