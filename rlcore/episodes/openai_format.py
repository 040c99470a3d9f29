"""OpenAI's request bodies, read and checked, and the bodies of answers and errors."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.episodes.conversation import Message

MOST_CHOICES = 64
MOST_STOPS = 16
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_REFUSED = ("logit_bias", "functions", "function_call", "best_of", "suffix", "audio", "echo")
"""Fields that would change the answer, and that no engine here knows."""


class RequestError(Exception):
    """A request that is answered with an error: its HTTP status, and the fields of OpenAI's error object."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, kind: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.fields = {
            "message": message,
            "type": kind or ("server_error" if status >= 500 else "invalid_request_error"),
            "param": param,
            "code": code,
        }

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": self.fields}


@dataclass(frozen=True)
class Call:
    """A checked request for answers.

    `messages`: of a chat, with plain text as `content` and the arguments of tool calls as objects; None: a completion
    of `prompt`, text or token ids. `tools`: OpenAI function JSON. `template_kwargs`: arguments for the chat template,
    which override the run's. `max_tokens`, `temperature`, `top_p`, `seed`: None
    where the client does not give them.
    """

    messages: list[Message] | None = None
    prompt: str | tuple[int, ...] = ""
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reads_tool_calls: bool = True
    choices: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    log_probs: bool = False
    top_log_probs: int = 0
    token_ids: bool = False
    stream: bool = False
    stream_usage: bool = False


def read_json(body: bytes) -> dict[str, Any]:
    """Return a request's JSON object; RequestError if the body is not one."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(400, f"the body is {_kind(value)}, not a JSON object", code="invalid_json")
    return value


def read_chat(body: Mapping[str, Any]) -> Call:
    """Return the call of a body for /chat/completions; RequestError, status 400, if it cannot be answered."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list with at least one message")
    shape = body.get("response_format")
    if shape is not None and (not isinstance(shape, dict) or shape.get("type") != "text"):
        raise _unsupported("response_format", "answers cannot be forced into a form; leave it out, or give type=text")
    tools = tuple(_tool(each, at) for at, each in enumerate(_optional(body, "tools", list, "a list") or ()))
    top = _number(body, "top_logprobs", int, 0, 20) or 0
    if top > 1:
        raise _unsupported("top_logprobs", f"{top} is more than 1: only the sampled token's log-prob is known")
    tokens = _number(body, "max_completion_tokens", int, 1) or _number(body, "max_tokens", int, 1)
    return Call(
        messages=_named_results([read_message(each, f"messages[{at}]") for at, each in enumerate(messages)]),
        tools=tools,
        template_kwargs=_optional(body, "chat_template_kwargs", dict, "an object") or {},
        reads_tool_calls=bool(tools) and body.get("tool_choice") != "none",
        max_tokens=tokens,
        log_probs=_optional(body, "logprobs", bool, "a boolean") or False,
        top_log_probs=top,
        **_shared(body),
    )


def read_completion(body: Mapping[str, Any]) -> Call:
    """Return the call of a body for /completions; RequestError, status 400, if it cannot be answered."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, list) and prompt and all(type(each) is int and each >= 0 for each in prompt):
        given: str | tuple[int, ...] = tuple(prompt)
    elif isinstance(prompt, str) and prompt:
        given = _well_formed(prompt, "prompt")
    else:
        raise _wrong("prompt", prompt, "text, or a list of token ids; of several prompts send one at a time")
    log_probs = _number(body, "logprobs", int, 0, 20)
    if (log_probs or 0) > 1:
        raise _unsupported("logprobs", f"{log_probs} is more than 1: only the sampled token's log-prob is known")
    return Call(
        prompt=given,
        max_tokens=_number(body, "max_tokens", int, 1) or 16,  # OpenAI's default
        log_probs=log_probs is not None,
        **_shared(body),
    )


def _shared(body: Mapping[str, Any]) -> dict[str, Any]:
    for name in _REFUSED:
        if body.get(name):
            raise _unsupported(name, "it is not supported; leave it out")
    for name in ("presence_penalty", "frequency_penalty"):
        if _number(body, name, float, -2, 2):
            raise _unsupported(name, "penalties are not supported; leave it out, or give 0")
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else (stop or [])
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise _wrong("stop", stop, "a text, or a list of texts")
    if len(stops) > MOST_STOPS:
        raise _wrong("stop", stop, f"at most {MOST_STOPS} texts")
    stream_options = _optional(body, "stream_options", dict, "an object") or {}
    return {
        "choices": _number(body, "n", int, 1, MOST_CHOICES) or 1,
        "stop": tuple(_well_formed(each, "stop") for each in stops),
        "temperature": _number(body, "temperature", float, 0, 100),
        "top_p": _number(body, "top_p", float, 0, 1),
        "seed": _number(body, "seed", int, -(2**63), 2**63 - 1),
        "token_ids": _optional(body, "return_token_ids", bool, "a boolean") or False,
        "stream": _optional(body, "stream", bool, "a boolean") or False,
        "stream_usage": bool(stream_options.get("include_usage")),
    }


def read_message(given: Any, where: str = "message") -> Message:
    """Return a message in the form that chat templates read; RequestError, naming `where`, if it is not one."""
    if not isinstance(given, dict) or given.get("role") not in _ROLES:
        allowed = ", ".join(sorted(_ROLES))
        raise _wrong(where, given, f"an object whose role is one of {allowed}")
    role = "system" if given["role"] == "developer" else given["role"]
    content = given.get("content")
    if content is None and role == "assistant":
        content = ""
    message: Message = {"role": role, "content": _content(content, f"{where}.content")}
    for name in ("name", "tool_call_id"):
        if given.get(name) is not None:
            message[name] = _well_formed(_optional(given, name, str, "a text"), f"{where}.{name}")
    if given.get("tool_calls"):
        calls = given["tool_calls"]
        if role != "assistant" or not isinstance(calls, list):
            raise _wrong(f"{where}.tool_calls", calls, "a list, in an assistant's message")
        message["tool_calls"] = [_tool_call(each, f"{where}.tool_calls[{n}]") for n, each in enumerate(calls)]
    return message


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return _well_formed(content, where)
    if isinstance(content, list):
        parts = []
        for at, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
            if kind not in ("text", "refusal", "input_text", "output_text") or not isinstance(text, str):
                raise _wrong(f"{where}[{at}]", part, "a part of type text: the model reads text only")
            parts.append(_well_formed(text, f"{where}[{at}]"))
        return "".join(parts)
    raise _wrong(where, content, "a text, or a list of parts of type text")


def _tool_call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(where, given, 'an object like {"id": ..., "function": {"name": ..., "arguments": ...}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # a client may send any text; then it stays a text
            arguments = json.loads(arguments or "{}")
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    if isinstance(given.get("id"), str):
        call["id"] = given["id"]
    # A model may write half of a surrogate pair into its arguments, which no tokenizer takes.
    text = json.dumps(call, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return dict(json.loads(text))


def _named_results(messages: list[Message]) -> list[Message]:
    """Give tool results the names of their calls' functions, which some chat templates write."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call.get("id", "")] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return messages


def _tool(given: Any, at: int) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or given.get("type") != "function" or not isinstance(function.get("name"), str):
        raise _wrong(f"tools[{at}]", given, 'an object like {"type": "function", "function": {"name": ...}}')
    if not isinstance(function.get("parameters", {}), (dict, type(None))):
        raise _wrong(f"tools[{at}].function.parameters", function["parameters"], "a JSON schema")
    _well_formed(json.dumps(given, ensure_ascii=False), f"tools[{at}]")
    known = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": {**empty, **known}}


def _optional(body: Mapping[str, Any], name: str, kind: type, words: str) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise _wrong(name, value, words)
    return value


def _number(
    body: Mapping[str, Any], name: str, kind: type[int] | type[float], least: float, most: float = math.inf
) -> Any:
    value = body.get(name)
    if value is None:
        return None
    fits = type(value) is int or (kind is float and type(value) is float)
    if not fits or not least <= value <= most:
        words = "an integer" if kind is int else "a number"
        raise _wrong(name, value, f"{words} of at least {least}" + ("" if most == math.inf else f" and at most {most}"))
    return kind(value)


def _well_formed(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            400, f"{where} is not valid Unicode: character {error.start} is half of a surrogate pair", param=where
        ) from None
    return text


def _wrong(param: str, value: Any, wanted: str) -> RequestError:
    shown = "missing" if value is None else f"{repr(value)[:80]} ({_kind(value)})"
    return RequestError(400, f"{param} is {shown}; it has to be {wanted}", param=param, code="invalid_value")


def _unsupported(param: str, why: str) -> RequestError:
    return RequestError(400, f"{param}: {why}", param=param, code="unsupported_parameter")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


# ---- answers ----


def answer_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of an answer without special tokens; more tokens never change what is there."""
    # Cleaning up takes spaces away once the next token is known.
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class GrowingText:
    """The text of an answer while its tokens come: each part once, and nothing that later tokens may change.

    stop: strings that end the answer and are no part of it. sent: the parts so far.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._held_back = max((len(each) - 1 for each in stop), default=0)
        self._stop = stop
        self._tokens: Sequence[int] = ()
        self._decoded = 0
        self.sent = ""

    def add(self, tokens: Sequence[int]) -> None:
        """Take all tokens so far."""
        self._tokens = tokens

    def next(self) -> str:
        """Return the part of the text that has become certain since the last call; "" for none.

        A character may still lack bytes, and the end may be the beginning of a stop string.
        """
        if len(self._tokens) == self._decoded:
            return ""
        self._decoded = len(self._tokens)
        text = answer_text(self._tokenizer, self._tokens)
        text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        text = text[: min((at for each in self._stop if (at := text.find(each)) >= 0), default=len(text))]
        text = text[: max(0, len(text) - self._held_back)]
        if not text.startswith(self.sent):
            return ""
        part, self.sent = text[len(self.sent) :], text
        return part


@dataclass(frozen=True)
class Choice:
    """One answer. `tokens`: pairs of a token's text and its log-prob in nats. `reason`: OpenAI's finish_reason."""

    message: Message
    reason: Literal["stop", "length", "tool_calls"]
    token_ids: Sequence[int]
    tokens: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Reply:
    """The answers to a call, and what both endpoints' bodies say beside them.

    Before they are there `choices` is empty, and `weights_version` None: for the chunks of a stream.
    """

    id: str
    created: int
    model: str
    call: Call
    prompt: Sequence[int]
    choices: Sequence[Choice] = ()
    weights_version: int | None = None

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of the prompt and of all answers."""
        answered = sum(len(each.token_ids) for each in self.choices)
        total = len(self.prompt) + answered
        return {"prompt_tokens": len(self.prompt), "completion_tokens": answered, "total_tokens": total}

    def body(self) -> dict[str, Any]:
        """Return the whole answer as one JSON body."""
        chat = self.call.messages is not None
        return {
            **self._head("chat.completion" if chat else "text_completion"),
            "choices": [self._choice(at, "message" if chat else "text") for at in range(len(self.choices))],
            "usage": self.usage,
            **({"prompt_token_ids": list(self.prompt)} if self.call.token_ids else {}),
        }

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the bodies with which a stream begins: the role of each chat choice."""
        if self.call.messages is not None:
            first = {"prompt_token_ids": list(self.prompt)} if self.call.token_ids else {}
            for at in range(self.call.choices):
                yield {**self._stream_head, **first, "choices": [_delta(at, {"role": "assistant", "content": ""})]}

    def text_chunk(self, at: int, text: str) -> dict[str, Any]:
        """Return the body with the next part of a choice's text."""
        if self.call.messages is None:
            choice: dict[str, Any] = {"index": at, "text": text, "finish_reason": None, "logprobs": None}
        else:
            choice = _delta(at, {"content": text})
        return {**self._stream_head, "choices": [choice]}

    def last_chunks(self, sent: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
        """Yield the bodies with which a stream ends: of each choice the rest of its text with its calls, and its end.

        sent: the texts that have been sent of each choice, with which it begins.
        """
        chat = self.call.messages is not None
        for at, choice in enumerate(self.choices):
            length = len(sent[at]) if sent else 0
            if not chat:
                yield {**self._stream_head, "choices": [self._choice(at, "text", length)]}
                continue
            if not length or length < len(choice.message["content"] or ""):
                yield {**self._stream_head, "choices": [self._choice(at, "delta", length)]}
            yield {**self._stream_head, "choices": [{**_delta(at, {}), "finish_reason": choice.reason}]}
        if self.call.stream_usage:
            yield {**self._stream_head, "choices": [], "usage": self.usage}

    @property
    def _stream_head(self) -> dict[str, Any]:
        return self._head("text_completion" if self.call.messages is None else "chat.completion.chunk")

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head if self.weights_version is None else {**head, "weights_version": self.weights_version}

    def _choice(self, at: int, form: Literal["message", "text", "delta"], begin: int = 0) -> dict[str, Any]:
        """Return a choice in the form of a body; `begin`: the characters of its text that have been sent."""
        choice, log_probs = self.choices[at], None
        if self.call.log_probs:
            log_probs = _text_log_probs(choice) if form == "text" else self._log_probs(choice)
        body: dict[str, Any] = {"index": at, "finish_reason": choice.reason, "logprobs": log_probs}
        if form == "text":
            body["text"] = choice.message["content"][begin:]
        elif form == "message":
            body["message"] = {**choice.message, "refusal": None}
        else:
            calls = choice.message.get("tool_calls", ())
            content = choice.message["content"]
            delta: dict[str, Any] = {"content": content and content[begin:]}
            if calls:
                delta["tool_calls"] = [{"index": n, **each} for n, each in enumerate(calls)]
            body |= {"delta": delta, "finish_reason": None}
        if self.call.token_ids:
            body["token_ids"] = list(choice.token_ids)
        return body

    def _log_probs(self, choice: Choice) -> dict[str, Any]:
        content = []
        for text, value in choice.tokens:
            entry = {"token": text, "logprob": value, "bytes": None if "�" in text else list(text.encode())}
            content.append({**entry, "top_logprobs": [entry] if self.call.top_log_probs else []})
        return {"content": content, "refusal": None}


def _text_log_probs(choice: Choice) -> dict[str, Any]:
    offsets, length = [], 0
    for text, _ in choice.tokens:
        offsets.append(length)
        length += len(text)
    return {
        "tokens": [text for text, _ in choice.tokens],
        "token_logprobs": [value for _, value in choice.tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _delta(at: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": at, "delta": dict(delta), "finish_reason": None, "logprobs": None}
