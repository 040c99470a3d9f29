"""The state of a process's global random generators, as values that JSON can hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the state of this process's global random generators as values that JSON can hold."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    version, internal, gauss_next = random.getstate()
    state = {
        "torch": torch.get_rng_state().tolist(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(internal), gauss_next],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the state that `random_state` returned."""
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    # A state saved on a GPU may be restored on a machine without one, and the other way round.
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
