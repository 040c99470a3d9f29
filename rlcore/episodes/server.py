"""An OpenAI-compatible server over a rollout engine, which captures the conversations of agents in tokens."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rlcore.episodes.call_queue import CallQueue, Watch
from rlcore.episodes.openai_format import (
    Call,
    GrowingText,
    Reply,
    RequestError,
    read_chat,
    read_completion,
    read_json,
)
from rlcore.episodes.session_store import SessionStore, row_json
from rlcore.episodes.sessions import Limits, Pending, Renderers, Session
from rlcore.errors import ConfigError
from rlcore.ops import noise_key

log = logging.getLogger(__name__)
T = TypeVar("T")

IMPLICIT = "default"
"""The session of calls that name none."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SWEEP = 5.0  # seconds between looks for idle sessions
_START_TIMEOUT = 30.0
_KEEP_ALIVE = 120  # seconds; longer than clients keep an idle connection, so that none is closed under a new request


@dataclass(frozen=True)
class ServerOptions:
    """How a server listens and what it refuses.

    port: 0: any free one. key: of the header `Authorization: Bearer KEY`; "": none is needed.
    opens_sessions: clients may open sessions; False: the run opens them.
    body_bytes: longest request body. held_tokens: most tokens that a session of a client keeps.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 0
    key: str = ""
    opens_sessions: bool = True
    body_bytes: int = 2**23
    most_sessions: int = 1024
    idle_seconds: float = float("inf")
    held_tokens: int = 2**22


class Server:
    """An HTTP server with an event loop in a thread of its own.

    The engine's thread answers its calls with `answer_requests(engine, server.calls)`. Sessions belong to the event
    loop: other threads reach them through `run`.
    """

    def __init__(
        self, options: ServerOptions, calls: CallQueue, renderers: Renderers, limits: Limits, seed: int
    ) -> None:
        """`limits`: of the sessions that clients open, whose noise begins with `seed`."""
        self.options, self.calls, self.renderers, self.limits = options, calls, renderers, limits
        self.store = SessionStore(options.most_sessions, options.idle_seconds)
        self._seed, self._opened = seed, 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None
        self._http: uvicorn.Server | None = None

    # ---- the thread ----

    def start(self) -> None:
        """Listen. Raises ConfigError if the address cannot be used."""
        host, port = self.options.host, self.options.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=2048)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
        config = uvicorn.Config(
            self.app(),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
            timeout_keep_alive=_KEEP_ALIVE,
        )
        self._http = uvicorn.Server(config)
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._serve, args=(ready,), name="rlcore-serve", daemon=True)
        self._thread.start()
        ready.result(_START_TIMEOUT)

    @property
    def url(self) -> str:
        """The address, without a path."""
        assert self._socket is not None
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the event loop; for other threads."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Answer no more calls, and end the thread."""
        self.calls.end()
        if self._thread is not None and self._http is not None:
            self._http.should_exit = True
            self._thread.join()
        if self._socket is not None:
            self._socket.close()
        self._thread = self._loop = None

    def _serve(self, ready: Future[None]) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                runner.run(self._listen(ready))
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            else:
                log.exception("the server ended by an error")

    async def _listen(self, ready: Future[None]) -> None:
        assert self._http is not None
        assert self._socket is not None
        ready.set_result(None)  # the socket listens: clients wait until it is read
        sweep = asyncio.create_task(self._sweep())
        try:
            await self._http.serve(sockets=[self._socket])
        finally:
            sweep.cancel()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP, self.options.idle_seconds))
            self.store.expire()

    # ---- routes ----

    def app(self) -> Starlette:
        """Return the ASGI application."""
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/sessions", self._open, methods=["POST"]),
            Route("/sessions/{sid}", self._show, methods=["GET"]),
            Route("/sessions/{sid}", self._end, methods=["DELETE"]),
            Route("/sessions/{sid}/end", self._end, methods=["POST"]),
        ]
        for prefix in ("/sessions/{sid}", "/sessions/{sid}/v1", "/v1"):
            routes.append(Route(f"{prefix}/reward", self._reward, methods=["POST"]))
        for prefix in ("/sessions/{sid}/v1", "/v1"):
            routes += [
                Route(f"{prefix}/chat/completions", self._chat, methods=["POST"]),
                Route(f"{prefix}/completions", self._complete, methods=["POST"]),
                Route(f"{prefix}/models", self._models, methods=["GET"]),
                Route(f"{prefix}/models/{{model:path}}", self._models, methods=["GET"]),
            ]
        wrapped = [Route(each.path, self._guarded(each.endpoint), methods=list(each.methods or ())) for each in routes]
        handlers: Mapping[Any, Any] = {HTTPException: _http_error}
        return Starlette(routes=wrapped, exception_handlers=handlers)

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Check the key before an endpoint, and give its errors OpenAI's form."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                return await endpoint(request)
            except RequestError as error:
                return JSONResponse(error.body, error.status)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Exception:
                log.exception("a request failed: %s %s", request.method, request.url.path)
                failed = RequestError(500, "an error of the server; its log has the traceback", code="internal_error")
                return JSONResponse(failed.body, 500)

        return guarded

    def _check_key(self, request: Request) -> None:
        if not self.options.key or request.url.path == "/health":
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.options.key}".encode()):
            raise RequestError(
                401,
                "the header Authorization: Bearer KEY is missing or has another key",
                code="invalid_api_key",
                kind="authentication_error",
            )

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "sessions": len(self.store.sessions)})

    async def _open(self, request: Request) -> Response:
        body = await self._body(request)
        if not self.options.opens_sessions:
            raise RequestError(403, "the run opens one session for each episode; use the address that it gives")
        seed = body.get("seed")
        if seed is not None and type(seed) is not int:
            raise RequestError(400, "seed has to be an integer", param="seed", code="invalid_value")
        session = self._new(secrets.token_hex(16), seed)
        url = f"{str(request.base_url).rstrip('/')}/sessions/{session.id}"
        return JSONResponse({"session_id": session.id, "url": url, "base_url": f"{url}/v1"}, 201)

    async def _show(self, request: Request) -> Response:
        return JSONResponse(self._captured(self._session(request)))

    async def _end(self, request: Request) -> Response:
        session = self._session(request)
        captured = self._captured(session)
        self.store.end(session.id)
        return JSONResponse(captured)

    async def _reward(self, request: Request) -> Response:
        body = await self._body(request)
        session = self._session(request)
        session.set_reward(body.get("reward"))
        return JSONResponse({"session_id": session.id, "reward": session.reward})

    async def _models(self, request: Request) -> Response:
        model = {"id": self.options.model, "object": "model", "created": 0, "owned_by": "rlcore"}
        if "model" not in request.path_params:
            return JSONResponse({"object": "list", "data": [model]})
        return JSONResponse({**model, "id": request.path_params["model"]})  # any name means the one model

    async def _chat(self, request: Request) -> Response:
        return await self._answered(request, read_chat(await self._body(request)), "chatcmpl")

    async def _complete(self, request: Request) -> Response:
        return await self._answered(request, read_completion(await self._body(request)), "cmpl")

    # ---- calls ----

    async def _answered(self, request: Request, call: Call, kind: str) -> Response:
        session = self._session(request)
        pending = session.begin(call)
        name = f"{kind}-{session.id}-{session.calls}"
        reply = Reply(name, int(time.time()), self.options.model, call, pending.prompt)
        if call.stream:
            stream = _Stream(self.renderers.tokenizer, pending)
            work = asyncio.create_task(self._reply(session, pending, reply, stream.watch))
            # Until something can be sent an error is a status.
            await _unless_disconnected(request, stream.begins(work))
            return _Streamed(stream.events(reply, work), work)
        return JSONResponse((await _unless_disconnected(request, self._reply(session, pending, reply))).body())

    async def _reply(self, session: Session, pending: Pending, reply: Reply, watch: Watch | None = None) -> Reply:
        """Return a call's reply with its answers."""
        try:
            rows = await self.calls.answers(pending.requests, watch)
            if session.is_closed:
                raise RequestError(404, f"session {session.id} has ended", code="session_not_found")
            choices = session.answer(pending, rows)
        finally:
            session.leave(pending)
        return replace(reply, choices=choices, weights_version=min(row.weights_version for row in rows))

    def _session(self, request: Request) -> Session:
        """Return the session that a request names in its path or header; one of the client's own name opens it."""
        named = request.path_params.get("sid")
        if named is not None:
            return self.store.get(named)
        given = request.headers.get("x-session-id", IMPLICIT)
        if given in self.store.sessions:
            session = self.store.sessions[given]
            if given != IMPLICIT or session.held <= self.limits.held_tokens // 2:
                return session
            del self.store.sessions[given]  # nobody ends it, so it begins anew; calls under way keep the old one
        if not self.options.opens_sessions:
            raise RequestError(404, f"there is no session {given[:80]!r}", code="session_not_found")
        if not _NAME.fullmatch(given):
            raise RequestError(400, "X-Session-ID has to be 1 to 64 letters, digits, '_', '-' or '.'")
        return self._new(given, None)

    def _new(self, id: str, seed: int | None) -> Session:
        key = noise_key("session", seed) if seed is not None else noise_key(self._seed, "session", self._opened)
        session = self.store.add(Session(id, key, self.limits, self.renderers))
        self._opened += 1
        return session

    def _captured(self, session: Session) -> dict[str, Any]:
        rows = [row_json(row) for row in session.rows()]
        return {"session_id": session.id, "reward": session.reward, "calls": session.calls, "rows": rows}

    async def _body(self, request: Request) -> dict[str, Any]:
        most, body = self.options.body_bytes, bytearray()
        declared = request.headers.get("content-length", "")
        too_long = declared.isdigit() and int(declared) > most
        if not too_long:
            async for part in request.stream():
                body += part
                too_long = len(body) > most
                if too_long:
                    break
        if too_long:
            raise RequestError(413, f"the body has more than {most} bytes", code="body_too_large")
        return read_json(bytes(body)) if body else {}


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result; cancel it if the client goes away, which raises ClientDisconnect."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError, RequestError):
            await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Stream:
    """The events of a call's answers: texts as they are sampled, unless they need all tokens, as tool calls do."""

    def __init__(self, tokenizer: Any, pending: Pending) -> None:
        call = pending.call
        reads_calls = call.messages is not None and call.reads_tool_calls
        whole = reads_calls or call.log_probs or call.token_ids
        self._texts = {each.id: GrowingText(tokenizer, each.sampling.stop) for each in pending.requests}
        self.watch: Watch | None = None if whole else self._watch
        self._changed = asyncio.Event()

    def _watch(self, name: str, tokens: Sequence[int]) -> None:
        self._texts[name].add(tokens)
        self._changed.set()

    async def begins(self, work: asyncio.Task[Reply]) -> None:
        """Wait until there is something to send; raises the error of work that has failed. Cancelled, it ends it."""
        work.add_done_callback(lambda _: self._changed.set())
        try:
            await self._changed.wait()
        except asyncio.CancelledError:
            work.cancel()
            raise
        if work.done():
            work.result()

    async def events(self, reply: Reply, work: asyncio.Task[Reply]) -> AsyncIterator[str]:
        """Yield the events."""
        try:
            for chunk in reply.first_chunks():
                yield _event(chunk)
            while not work.done():
                await self._changed.wait()
                self._changed.clear()
                for at, text in enumerate(self._texts.values()):
                    if part := text.next():
                        yield _event(reply.text_chunk(at, part))
            done, sent = work.result(), [text.sent for text in self._texts.values()]
            for choice, begun in zip(done.choices, sent, strict=True):
                if not (choice.message["content"] or "").startswith(begun):
                    raise RequestError(500, "later tokens have changed the text that was sent; ask without `stream`")
            for chunk in done.last_chunks(sent):
                yield _event(chunk)
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield _event(error.body)


class _Streamed(StreamingResponse):
    """A stream's response. A client that goes away ends the work, also before the first event."""

    def __init__(self, events: AsyncIterator[str], work: asyncio.Task[Reply]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See StreamingResponse."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.cancel()


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


async def _http_error(request: Request, error: HTTPException) -> Response:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    found = RequestError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code=code)
    return JSONResponse(found.body, error.status_code)
