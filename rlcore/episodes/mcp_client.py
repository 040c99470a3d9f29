"""A synchronous client of the Model Context Protocol over a server's pipes (docs/decisions/0034-mcp-client.md)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.episodes.environment import EnvironmentFailure
from rlcore.processes.child import limit_memory
from rlcore.processes.ends import how_it_ended, kill_group

VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
"""Revisions of the protocol that begin with `initialize`, oldest first."""
ENVELOPE_VERSION = "2026-07-28"
"""A revision without `initialize`: each request names the version."""
MOST_LINE = 2**24  # bytes of one message
MOST_FOREIGN = 100  # lines on the server's output that are no messages
_SHOWN = 2000  # characters of standard error that a failure shows
_PART = 2**16
_GRACE = 1.0  # seconds for the server to end after its input has ended
_TERMINATED = 0.5  # seconds after SIGTERM
_METHOD_NOT_FOUND, _UNSUPPORTED_VERSION = -32601, -32022
_CLIENT = {"name": "rlcore", "version": "1"}


class ServerRefusal(Exception):
    """The server answered a request with a JSON-RPC error."""

    def __init__(self, code: Any, text: str, data: Any) -> None:
        super().__init__(text)
        self.code, self.data = code, data


class McpClient:
    """One MCP server in a process of its own, and the session with it. Not for several threads.

    A server that ends, breaks the protocol or is late raises EnvironmentFailure, with the tail of its standard error as
    traceback. `close` ends it with all processes of its group.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        folder: str | None = None,
        memory_mb: int = 0,
        seconds: float = float("inf"),
    ) -> None:
        """Start the process. `seconds`: for one request. `memory_mb`: limit of its address space in MiB (0: none)."""
        self._seconds = seconds
        self._number = 0
        self._envelope: dict[str, Any] = {}
        self._incoming, self._searched = bytearray(), 0
        self._outgoing, self._errors = bytearray(), bytearray()
        self._messages: deque[dict[str, Any]] = deque()
        self._foreign: list[str] = []
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=variables,
                cwd=folder,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise EnvironmentFailure(f"the MCP server cannot be started: {error}") from error
        if memory_mb:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and reading its output says so
                limit_memory(memory_mb, self._process.pid)
        self._pipes = [pipe for pipe in (self._process.stdin, self._process.stdout, self._process.stderr) if pipe]
        self._in, self._out, self._err = (pipe.fileno() for pipe in self._pipes)
        self._reads = {self._out, self._err}
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)

    # The session

    def initialize(self) -> None:
        """Begin the session. Raises ServerRefusal, and EnvironmentFailure for a version that is not known."""
        given = {"protocolVersion": VERSIONS[-1], "capabilities": {}, "clientInfo": _CLIENT}
        try:
            version = self._request("initialize", given).get("protocolVersion")
        except ServerRefusal as refusal:
            offered = refusal.data.get("supported") if isinstance(refusal.data, dict) else None
            if refusal.code != _UNSUPPORTED_VERSION or not isinstance(offered, list) or ENVELOPE_VERSION not in offered:
                raise
            prefix = "io.modelcontextprotocol/"
            meta = {"protocolVersion": ENVELOPE_VERSION, "clientInfo": _CLIENT, "clientCapabilities": {}}
            self._envelope = {"_meta": {prefix + name: value for name, value in meta.items()}}
            return
        if version not in VERSIONS:
            raise self._failure(f"speaks version {version!r} of the protocol; known are {', '.join(VERSIONS)}")
        self._send({"method": "notifications/initialized"})

    def tools(self) -> list[dict[str, Any]]:
        """Return the server's tools as OpenAI function JSON, in its order. Raises as `initialize` does."""
        found: list[dict[str, Any]] = []
        cursors: set[str] = set()
        cursor: str | None = None
        while True:
            result = self._request("tools/list", {} if cursor is None else {"cursor": cursor})
            tools = result.get("tools")
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise self._failure(f"listed its tools as {tools!r:.200}")
            found += [_schema(tool) for tool in tools]
            cursor = result.get("nextCursor")
            if cursor is None:
                return found
            if not isinstance(cursor, str) or cursor in cursors:
                raise self._failure(f"goes on listing tools at the cursor {cursor!r:.200}, which is no new text")
            cursors.add(cursor)

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the text of a tool's result, and whether the call was an error.

        Parts of the result that are not text are named, such as [image image/png]. A JSON-RPC error is an error of the
        call: servers answer so to arguments that they do not take.
        """
        try:
            result = self._request("tools/call", {"name": name, "arguments": dict(arguments)})
        except ServerRefusal as refusal:
            return f"Error: {refusal}", True
        if result.get("resultType", "complete") != "complete":
            return "Error: the tool asks for more input, which nobody here can give", True
        parts = result.get("content", [])
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise self._failure(f"answered {name!r} with the content {parts!r:.200}")
        text = "\n".join(map(_text_of, parts))
        if not parts and result.get("structuredContent") is not None:
            text = json.dumps(result["structuredContent"], ensure_ascii=False)
        return text, result.get("isError") is True

    def _request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its result. Meanwhile, notifications are dropped and requests answered."""
        self._number += 1
        self._send({"id": self._number, "method": method, "params": {**params, **self._envelope}})
        deadline = time.monotonic() + self._seconds
        while True:
            while not self._messages:
                self._exchange(method, deadline)
            message = self._messages.popleft()
            if "method" in message:
                self._serve(message)
            elif message.get("id") == self._number:
                break
        error, result = message.get("error"), message.get("result")
        if isinstance(error, dict):
            raise ServerRefusal(error.get("code"), str(error.get("message")), error.get("data"))
        if not isinstance(result, dict):
            raise self._failure(f"answered {method} with {message!r:.200}, which has neither a result nor an error")
        return result

    def _serve(self, message: Mapping[str, Any]) -> None:
        """Answer the server's request, if it is one: a ping; all others, such as sampling, are refused."""
        if "id" not in message:
            return
        if message["method"] == "ping":
            self._send({"id": message["id"], "result": {}})
            return
        text = f"rlcore does not answer {message['method']!r:.100}"
        self._send({"id": message["id"], "error": {"code": _METHOD_NOT_FOUND, "message": text}})

    # The pipes

    def _send(self, message: dict[str, Any]) -> None:
        self._outgoing += json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        if len(self._outgoing) > 2 * MOST_LINE:
            raise self._failure("does not read its input")

    def _exchange(self, method: str, deadline: float) -> None:
        """Write and read what the pipes take and hold, waiting for either until `deadline` (monotonic)."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._failure(f"gave no answer to {method} within {self._seconds:g} s")
        poll = select.poll()
        for pipe in self._reads:
            poll.register(pipe, select.POLLIN)
        if self._outgoing:
            poll.register(self._in, select.POLLOUT)
        for pipe, _ in poll.poll(None if left == float("inf") else 1000 * left + 1):
            if pipe == self._in:
                self._write()
            elif pipe == self._err:
                self._read_errors()
            else:
                self._read()
                if self._out not in self._reads:
                    raise self._failure(f"{self._end(terminate=False)} before it answered {method}")

    def _write(self) -> None:
        try:
            del self._outgoing[: os.write(self._in, self._outgoing[:_PART])]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the end of its output says why
            self._outgoing.clear()

    def _read(self) -> None:
        """Take a part of the server's output, and the messages that it completes."""
        part = os.read(self._out, _PART)
        if not part:
            self._reads.discard(self._out)
            return
        self._incoming += part
        while (end := self._incoming.find(b"\n", self._searched)) >= 0:
            line = bytes(self._incoming[:end])
            del self._incoming[: end + 1]
            self._searched = 0
            self._take(line)
        self._searched = len(self._incoming)
        if self._searched > MOST_LINE:
            raise self._failure(f"wrote a line of more than {MOST_LINE} bytes")

    def _take(self, line: bytes) -> None:
        """Take the message, or the batch of messages, of a line. Other output is passed over, up to 100 lines."""
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        messages = value if isinstance(value, list) else [value]
        if all(isinstance(each, dict) and each.get("jsonrpc") == "2.0" for each in messages):
            self._messages += messages
        elif line.strip():
            self._foreign.append(line.decode(errors="replace")[:200])
            if len(self._foreign) > MOST_FOREIGN:
                raise self._failure("does not speak JSON-RPC")

    def _read_errors(self) -> None:
        part = os.read(self._err, _PART)
        if not part:
            self._reads.discard(self._err)
        self._errors += part
        del self._errors[: -4 * _SHOWN]

    def _failure(self, what: str) -> EnvironmentFailure:
        """Return the failure of a server that did `what`."""
        if self._err in self._reads:
            with contextlib.suppress(BlockingIOError):
                self._read_errors()
        shown = f"; its output holds {self._foreign[0]!r}, which is no JSON-RPC message" if self._foreign else ""
        return EnvironmentFailure(f"the MCP server {what}{shown}", self._errors.decode(errors="replace")[-_SHOWN:])

    # The end

    def close(self) -> None:
        """End the server: its input ends, then it gets SIGTERM, then SIGKILL."""
        self._end(terminate=True)
        for pipe in self._pipes:
            pipe.close()
        self._reads.clear()

    def _end(self, terminate: bool) -> str:
        """End the process and its group, and return how it ended."""
        if self._process.returncode is None:
            self._pipes[0].close()
            alive = not self._ends_within(_GRACE)
            if alive and terminate:
                os.kill(self._process.pid, signal.SIGTERM)
                self._ends_within(_TERMINATED)
            kill_group(self._process.pid)
            self._process.wait()
            if alive and not terminate:
                return "closed its output"
        return how_it_ended(self._process.returncode)

    def _ends_within(self, seconds: float) -> bool:
        """Whether the process ends within this time. Its output is read meanwhile, as it may wait for that."""
        until = time.monotonic() + seconds
        while not self._has_ended():
            if time.monotonic() > until:
                return False
            poll = select.poll()
            for pipe in self._reads:
                poll.register(pipe, select.POLLIN)
            for pipe, _ in poll.poll(5):
                if pipe == self._err:
                    self._read_errors()
                elif not os.read(pipe, _PART):
                    self._reads.discard(pipe)
        return True

    def _has_ended(self) -> bool:
        """Whether the process has ended. It is not reaped, so its number is still that of its group."""
        if not hasattr(os, "waitid"):  # macOS
            return self._process.poll() is not None
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool of `tools/list` as OpenAI function JSON, unchecked."""
    parameters = tool.get("inputSchema", {"type": "object", "properties": {}})
    description = tool.get("description") or tool.get("title") or ""
    return {
        "type": "function",
        "function": {"name": tool.get("name"), "description": description, "parameters": parameters},
    }


def _text_of(part: Mapping[str, Any]) -> str:
    """Return a part of a result as the model reads it."""
    kind = part.get("type")
    if kind == "text":
        return str(part.get("text", ""))
    if kind == "resource" and isinstance(part.get("resource"), dict):
        resource = part["resource"]
        return str(resource.get("text") or f"[resource {resource.get('uri')}]")
    if kind == "resource_link":
        return f"[resource {part.get('uri')}]"
    return f"[{kind} {part.get('mimeType', '')}]".replace(" ]", "]")
