"""Learning rates by hand."""

import pytest

from rlcore.config import EngineConfig
from rlcore.engine.update.schedule import learning_rate


def rates(**options):
    config = EngineConfig(lr=1.0, **options)
    return [learning_rate(config, step, 6) for step in range(6)]


def test_constant_with_warmup():
    # Two warm-up steps: 1/3, 2/3, then 1.
    assert rates(warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])


def test_linear_goes_to_its_floor():
    # From step 2 on, 4 steps from 1 to 0.2: 1, 0.8, 0.6, 0.4.
    assert rates(schedule="linear", warmup_steps=2, min_lr_ratio=0.2) == pytest.approx([1 / 3, 2 / 3, 1, 0.8, 0.6, 0.4])


def test_cosine():
    # (1 + cos(pi x)) / 2 at x = 0, 1/6, ..., 5/6.
    assert rates(schedule="cosine") == pytest.approx([1, 0.9330127, 0.75, 0.5, 0.25, 0.0669873])
