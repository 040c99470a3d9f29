"""Failed episodes: played again with the same seed, and then rows with their cause, never with a reward of zero."""

from __future__ import annotations

import logging

from rlcore.config.environment import EnvConfig
from rlcore.episodes.conversation import Conversation
from rlcore.episodes.environment import EnvironmentFailure
from rlcore.episodes.rows import EpisodeRow

log = logging.getLogger(__name__)


def plays_again(name: str, failure: EnvironmentFailure, attempts: int, env: EnvConfig) -> bool:
    """Return whether an episode is played again after this many failed attempts."""
    if attempts > env.retries:
        return False
    log.info("episode %s failed and is played again: %s", name, failure)
    return True


def failed_row(row: int, empty: Conversation, failure: EnvironmentFailure, attempts: int) -> EpisodeRow:
    """Return the row of an episode that is given up; `empty` has its prompt only."""
    error = {"cause": str(failure), "traceback": failure.traceback, "attempts": attempts}
    return EpisodeRow(row, 0, empty, "failed", error=error)
