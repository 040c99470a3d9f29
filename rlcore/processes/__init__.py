"""Processes that can be killed: rewards, environments, agents and model-written code run in them."""

from pathlib import Path

BECOME = Path(__file__).with_name("become.py")
"""A script that becomes the program that it is given, and dies with its parent."""
