"""The tiny model of the quickstart, and the folder of a model path."""

from __future__ import annotations

from pathlib import Path

TINY = Path(__file__).parent / "tiny"
"""Folder of the shipped model; `rlcore.assets.make_tiny` makes it."""


def model_path(path: str) -> Path:
    """Return the folder of `model.path`: the shipped model for `tiny`, else the path itself with `~` expanded."""
    return TINY if path == "tiny" else Path(path).expanduser()
