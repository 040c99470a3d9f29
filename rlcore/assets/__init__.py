"""The tiny model of the quickstart."""

from __future__ import annotations

from pathlib import Path

TINY = Path(__file__).parent / "tiny"
"""Folder of the shipped model; benchmarks/make_tiny.py makes it."""
