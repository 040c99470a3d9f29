"""A server alone, without a run: it answers until the process is interrupted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlcore.engine.rollout import RolloutEngine, Sampling
from rlcore.episodes.call_queue import CallQueue
from rlcore.episodes.openai_format import RequestError
from rlcore.episodes.rows import episode_columns
from rlcore.episodes.server import Server, ServerOptions
from rlcore.episodes.sessions import Limits, Renderers
from rlcore.episodes.setup import EpisodeSetup
from rlcore.episodes.source import answer_requests
from rlcore.errors import DataError
from rlcore.protocol import DataProto

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Standalone:
    """Episodes that are never played: `play` answers the calls of a server instead, and returns without rows.

    `ready` is called with the server's address. `held_tokens`: as in Limits.
    """

    setup: EpisodeSetup
    options: ServerOptions
    ready: Callable[[str], None]
    held_tokens: int
    key: str = "standalone"
    max_failures: float = 1.0

    def open(self, engine: RolloutEngine) -> _Answering:
        """See Episodes."""
        return _Answering(self, engine)


class _Answering:
    is_exact = False

    def __init__(self, episodes: Standalone, engine: RolloutEngine) -> None:
        self._episodes, self._engine = episodes, engine

    def play(self, batch: DataProto, sampling: Sampling) -> DataProto:
        """Answer until a KeyboardInterrupt."""
        episodes, engine, calls = self._episodes, self._engine, CallQueue(self._engine)
        setup = episodes.setup
        limits = Limits(
            sampling,
            setup.prompt_len,
            turn_len=setup.env.turn_len,
            held_tokens=episodes.held_tokens,
            fixed=False,
        )
        server = Server(episodes.options, calls, Renderers(setup), limits, seed=sampling.seed)
        try:
            server.start()
            episodes.ready(server.url)
            while not calls.done:
                try:
                    answer_requests(engine, calls)
                except (DataError, torch.OutOfMemoryError) as error:
                    # The engine is idle again. A client may have asked for more than fits; the others can ask again.
                    log.exception("the engine could not answer")
                    calls.fail(RequestError(500, f"the engine could not answer: {error}", code="engine_error"))
        except KeyboardInterrupt:
            calls.end()
            calls.fail(RequestError(503, "the server is ending", code="server_ending"))
        finally:
            server.close()
        out = episode_columns([], engine.tokenizer)
        out["episode_row"] = batch.view("episode_row")
        return out

    def close(self) -> None:
        """See EpisodeSource."""
