"""A server alone, without a run: it answers until the process is interrupted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlcore.engine.rollout import EpisodeSource, RolloutEngine, Sampling
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
    """Makes a source that plays no episodes: its `play` answers the calls of a server, and returns without rows.

    `ready` is called with the server's address. `held_tokens`: as in Limits.
    """

    options: ServerOptions
    ready: Callable[[str], None]
    held_tokens: int

    def __call__(self, setup: EpisodeSetup, engine: RolloutEngine) -> EpisodeSource:
        """Return the source for an engine."""
        return _Answering(self, setup, engine)


class _Answering:
    def __init__(self, server: Standalone, setup: EpisodeSetup, engine: RolloutEngine) -> None:
        self.is_exact = False
        self._server, self._setup, self._engine = server, setup, engine

    def play(self, batch: DataProto, sampling: Sampling) -> DataProto:
        """Answer until a KeyboardInterrupt."""
        setup, engine, calls = self._setup, self._engine, CallQueue(self._engine)
        limits = Limits(
            sampling,
            setup.prompt_len,
            turn_len=setup.env.turn_len,
            held_tokens=self._server.held_tokens,
            fixed=False,
        )
        server = Server(self._server.options, calls, Renderers(setup), limits, seed=sampling.seed)
        try:
            server.start()
            self._server.ready(server.url)
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
