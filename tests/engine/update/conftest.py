"""The tests of the loss contract run over every train engine."""

import pytest


@pytest.fixture(params=["torch", "plain"])
def make_engine(request, engine_models, model_folder):
    """A function that creates an engine of an architecture; see engine_models.TRAIN_ENGINES."""
    create = engine_models.TRAIN_ENGINES[request.param]
    return lambda kind="qwen2", **options: create(model_folder(kind), **options)
