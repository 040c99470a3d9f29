"""The tiny model of the quickstart."""

from __future__ import annotations

from pathlib import Path

TINY = Path(__file__).parent / "tiny"
"""Folder of the shipped model; `rlcore.assets.make_tiny` makes it."""
