"""The hf engine's own config: the keys `rollout.hf.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlcore.config import option


@dataclass(frozen=True)
class HFConfig:
    """How the hf engine decodes."""

    batch_size: int = option(256, "sequences that a worker decodes at once", min=1, was="rollout.batch_size")
    graphs: Literal["auto", "off"] = option(
        "auto",
        "replay the decoding step as CUDA graphs if GPU and model allow it; off: launch each kernel",
    )
