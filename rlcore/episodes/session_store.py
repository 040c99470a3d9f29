"""The sessions of a server, and the form in which they are shown."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from rlcore.episodes.openai_format import RequestError
from rlcore.episodes.rows import EpisodeRow
from rlcore.episodes.sessions import Session


@dataclass
class SessionStore:
    """The sessions of a server, by id.

    `most`: at a time. `idle_seconds`: without a call, after which one is forgotten (`expire`).
    """

    most: int = 1024
    idle_seconds: float = math.inf
    sessions: dict[str, Session] = field(default_factory=dict)

    def add(self, session: Session) -> Session:
        """Keep a session. RequestError, status 429, if there are `most`."""
        if len(self.sessions) >= self.most:
            raise RequestError(
                429, f"there are {self.most} sessions; end one first", code="too_many_sessions", kind="rate_limit_error"
            )
        self.sessions[session.id] = session
        return session

    def get(self, id: str) -> Session:
        """Return a session. RequestError, status 404, if there is none."""
        if id not in self.sessions:
            raise RequestError(404, f"there is no session {id[:80]!r}; it may have ended", code="session_not_found")
        return self.sessions[id]

    def end(self, id: str) -> Session:
        """Close a session and forget it. RequestError as `get`."""
        session = self.get(id)
        session.is_closed = True
        del self.sessions[id]
        return session

    def expire(self) -> None:
        """End the sessions that have been idle for too long."""
        for session in [each for each in self.sessions.values() if each.quiet_seconds > self.idle_seconds]:
            self.end(session.id)


def row_json(row: EpisodeRow) -> dict[str, Any]:
    """Return a branch as JSON.

    Where the policy did not sample a token, its mask and log-prob (in nats) are 0, and its weights version is -1.
    """
    spans = row.conversation.spans
    return {
        "branch": row.branch,
        "prompt_token_ids": list(row.conversation.prompt),
        "response_token_ids": [token for span in spans for token in span.tokens],
        "response_mask": [int(span.is_sampled) for span in spans for _ in span.tokens],
        "log_probs": [value for span in spans for value in span.log_probs or [0.0] * len(span.tokens)],
        "weights_versions": [span.version for span in spans for _ in span.tokens],
        "stop_reason": row.stop_reason,
        "tool_calls": row.tool_calls,
        "tool_errors": row.tool_errors,
        "messages": row.conversation.messages,
    }
