"""The data sets that come with rlcore, registered the way a plugin registers its own."""

from __future__ import annotations

from rlcore import DatasetSpec, hookimpl
from rlcore.data import arithmetic, files, gsm8k

RLCORE_API = 1


@hookimpl
def rlcore_datasets() -> list[DatasetSpec]:
    """Return the built-in data sets."""
    return [
        DatasetSpec("arithmetic", arithmetic.load, reward="arithmetic"),
        DatasetSpec("gsm8k", gsm8k.load, reward="gsm8k"),
        DatasetSpec("file", files.load, reward="math"),
    ]
