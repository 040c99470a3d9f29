"""A server alone, without a run: it answers until the process is interrupted."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
from rlcore.protocol import DataProto, Ragged

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Standalone:
    """Makes a source that plays no episodes: its `play` answers the calls of a server, and returns without rows.

    `show` is called with a line about the server once it listens.
    """

    options: ServerOptions
    show: Callable[[str], None]

    def __call__(self, setup: EpisodeSetup, engine: RolloutEngine) -> EpisodeSource:
        """Return the source for an engine."""
        return _Answering(self, setup, engine)


class _Answering:
    def __init__(self, server: Standalone, setup: EpisodeSetup, engine: RolloutEngine) -> None:
        self.is_exact = False
        self._server, self._setup, self._engine = server, setup, engine

    def play(self, batch: DataProto, sampling: Sampling) -> DataProto:
        """Answer until Ctrl-C or SIGTERM."""
        setup, engine, calls, options = self._setup, self._engine, CallQueue(self._engine), self._server.options
        limits = Limits(
            sampling,
            setup.prompt_len,
            turn_len=setup.env.turn_len,
            held_tokens=options.held_tokens,
            fixed=False,
        )
        server = Server(options, calls, Renderers(setup), limits, seed=sampling.seed)
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            server.start()
            self._server.show(
                f"serving {options.model} at {server.url}/v1; sessions: POST {server.url}/sessions; Ctrl-C ends it"
            )
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
            signal.signal(signal.SIGTERM, before)
            server.close()
        out = episode_columns([], engine.tokenizer)
        out["episode_row"] = batch.view("episode_row")
        return out

    def waited(self) -> float:
        """See EpisodeSource."""
        return 0.0

    def close(self) -> None:
        """See EpisodeSource."""


def no_prompts() -> DataProto:
    """Return a batch without rows for `play`."""
    return DataProto.from_dict(
        {"prompts": Ragged.from_list([], dtype=torch.int64), "sample_index": torch.zeros(0, dtype=torch.int64)},
        {"uid": [], "prompt_text": []},
    )


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
