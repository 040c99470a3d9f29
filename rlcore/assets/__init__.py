"""The tiny model that the quickstart trains, and where a model path points."""

from __future__ import annotations

from pathlib import Path

TINY = Path(__file__).parent / "tiny"
"""Folder of the shipped model; `rlcore.assets.make_tiny` makes it."""


def model_path(path: str) -> Path:
    """Return the folder that `model.path` names: the shipped model for `tiny`, else the path itself, `~` expanded."""
    return TINY if path == "tiny" else Path(path).expanduser()
