"""Engines of small random models, and rows for them."""

import pytest
import torch

from rlcore.config import ModelConfig
from rlcore.engines.hf.rollout import HFRollout
from rlcore.protocol import DataProto, Ragged


@pytest.fixture(scope="session")
def make_rollout(model_folder):
    def make(kind: str = "qwen2", batch_size: int = 64, shared: torch.nn.Module | None = None) -> HFRollout:
        model = ModelConfig(path=str(model_folder(kind)))
        rollout = HFRollout(model, batch_size=batch_size, device=torch.device("cpu"), shared=shared)
        rollout.version = 0
        return rollout

    return make


def make_prompts(groups: int = 5, size: int = 4) -> DataProto:
    """Return `size` rows of each of some random prompts of 1 to 8 tokens."""
    generator = torch.Generator().manual_seed(11)
    made = [
        torch.randint(5, 90, (int(n),), generator=generator)
        for n in torch.randint(1, 9, (groups,), generator=generator)
    ]
    return DataProto.from_single_dict(
        {
            "prompts": Ragged.from_list([p for p in made for _ in range(size)]),
            "uid": [f"0:{i}" for i in range(groups) for _ in range(size)],
            "sample_index": torch.arange(size).repeat(groups),
        }
    )


@pytest.fixture(scope="session")
def prompts():
    return make_prompts


@pytest.fixture(scope="session")
def tokens_of():
    return lambda out: [row.tolist() for row in out["responses"].to_list()]
