"""Sessions of an agent: the tree of its conversations in tokens, built from the calls that it makes."""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlcore.data.chat import OfferedTools, PromptEncoder
from rlcore.data.template_kwargs import check_template_kwargs
from rlcore.engine.rollout import Finished, Request, Sampling
from rlcore.episodes.conversation import Conversation, Message
from rlcore.episodes.openai_format import Call, Choice, RequestError, answer_text, read_message
from rlcore.episodes.rendering import TurnRenderer
from rlcore.episodes.rows import EpisodeRow
from rlcore.episodes.tool_calls import BadCall, ToolCall
from rlcore.errors import ConfigError, DataError
from rlcore.ops import noise_key

if TYPE_CHECKING:
    from rlcore.episodes.setup import EpisodeSetup

MOST_RENDERERS = 32
"""Renderers kept, one for each set of tools that clients have sent lately."""


@dataclass(frozen=True)
class Limits:
    """What a session may ask for.

    sampling: the run's; `max_tokens` limits the tokens after a conversation's first prompt, over all its turns.
    prompt_len: most tokens of a first prompt.
    max_turns: most answers of a session; 0: any number.
    turn_len: most tokens of one answer; 0: only `sampling.max_tokens` limits it.
    held_tokens: most tokens that a session keeps.
    fixed: the client's temperature, top_p and seed are ignored, as in a training run.
    """

    sampling: Sampling
    prompt_len: int
    max_turns: int = 0
    turn_len: int = 0
    held_tokens: int = 2**22
    fixed: bool = True


class Renderers:
    """The renderers of a model's turns, one for each set of tools."""

    def __init__(self, setup: EpisodeSetup) -> None:
        self.plain = setup.renderer()
        self.tokenizer = self.plain.tokenizer
        self.tool_format = setup.tool_format
        self._shows_tools = setup.env.tools != "off"
        self._made: OrderedDict[str, tuple[TurnRenderer, str]] = OrderedDict()

    def of(self, tools: Sequence[dict[str, Any]], given: Mapping[str, Any] | None = None) -> tuple[TurnRenderer, str]:
        """Return the renderer, and instructions about the tools for a template that does not write them.

        `given`: arguments for the template, which override the run's.
        """
        if not tools or not self._shows_tools:
            return self.plain.with_kwargs(given), ""
        name = json.dumps(tools)
        if name not in self._made:
            plain = self.plain
            renderer = TurnRenderer(
                plain.tokenizer,
                tools=list(tools),
                template=plain.template,
                end_ids=plain.end_ids,
                plain_text=plain.plain_text,
            )
            instructions = "" if renderer.writes_tools else self.tool_format.instructions(tools)
            self._made[name] = renderer, instructions
            if len(self._made) > MOST_RENDERERS:
                self._made.popitem(last=False)
        self._made.move_to_end(name)
        renderer, instructions = self._made[name]
        return renderer.with_kwargs(given), instructions


@dataclass(eq=False)
class Answer:
    """A node of the tree: a conversation up to an answer of the policy.

    `request`: its id in the engine. `digest` names the conversation's messages in the client's form. `order`: the
    number of the answer among those to the same prompt. `ended`: its tokens end with an end token. `text` and
    `tokens`: of a completion, to continue it.
    """

    conversation: Conversation
    request: str
    digest: bytes
    order: int
    ended: bool
    stop_reason: str
    tool_calls: int
    tool_errors: int
    text: str | None = None
    tokens: tuple[int, ...] = ()
    is_continued: bool = False


@dataclass(eq=False)
class Pending:
    """A call under way: the branch that it continues, and its requests, one for each choice."""

    call: Call
    parent: Answer | None
    conversation: Conversation
    digest: bytes
    order: int
    renderer: TurnRenderer
    requests: list[Request]
    prompt: tuple[int, ...]


class Session:
    """The calls of one agent in one episode. Belongs to one thread.

    `key` determines the noise of all its answers. An answer's noise is named by its whole prompt in tokens and by its
    number among the answers to that prompt, so it does not depend on the order of calls that run at the same time. The
    first answer to `own_prompt`, with the run's sampling, draws the noise of `key` itself, as `generate` does.
    `template_kwargs`: arguments of all chats for the template, which a call's override.

    `kept`: requests of which the engine may keep keys and values; only in a run, where sessions end soon.
    """

    def __init__(
        self,
        id: str,
        key: int,
        limits: Limits,
        renderers: Renderers,
        own_prompt: tuple[int, ...] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.id, self.key, self.limits = id, key, limits
        self.reward: float | None = None
        self.refused = ""
        self.is_closed = False
        self.calls = 0
        self.pending = 0
        self.active = time.monotonic()
        self.held = 0
        self.keeps, self.kept = limits.fixed and limits.max_turns > 1, list[str]()
        self._renderers, self._own_prompt = renderers, own_prompt
        self._template_kwargs = template_kwargs or {}
        self._answers: list[Answer] = []
        self._known: dict[bytes, Answer] = {}
        self._asked: dict[str, int] = {}
        self._turns = 0

    @property
    def quiet_seconds(self) -> float:
        """Seconds since its last answer or reward; 0 while a call waits."""
        return 0.0 if self.pending else time.monotonic() - self.active

    def begin(self, call: Call) -> Pending:
        """Return the requests of a call; RequestError for a call that cannot be answered, kept as `refused`."""
        try:
            return self._begin(call)
        except RequestError as error:
            self.refused = str(error)
            raise

    def _begin(self, call: Call) -> Pending:
        self._check_open()
        self.active = time.monotonic()
        given = {**self._template_kwargs, **call.template_kwargs}
        try:
            check_template_kwargs(self._renderers.tokenizer, call.template_kwargs, "chat_template_kwargs")
        except ConfigError as error:
            raise RequestError(400, str(error), param="chat_template_kwargs", code="invalid_value") from error
        try:
            renderer, instructions = self._renderers.of(call.tools, given)
            if call.messages is None:
                parent, branch, digest = self._completion(call.prompt)
            else:
                parent, branch, digest = self._chat(call, renderer, instructions)
        except (DataError, ConfigError) as error:
            raise RequestError(400, str(error), param="messages", code="chat_template") from error
        sampling = self._sampling(call, parent, branch)
        prompt = branch.tokens
        name = hashlib.blake2b(array("q", prompt).tobytes() + repr(sampling).encode(), digest_size=16).hexdigest()
        order = self._asked.get(name, 0)
        self._asked[name] = order + call.choices
        self._turns += call.choices
        self.calls += 1
        after = None if parent is None or not self.keeps else parent.request
        most = len(branch.prompt) + self.limits.sampling.max_tokens if self.keeps else None
        requests = [
            Request(f"{self.id}/{self.calls}/{at}", prompt, key, sampling, keep=self.keeps, after=after, row_limit=most)
            for at, key in enumerate(self._keys(call, name, order, prompt, sampling))
        ]
        self.kept += [request.id for request in requests if request.keep]
        self.pending += 1
        return Pending(call, parent, branch, digest, order, renderer, requests, prompt)

    def leave(self, pending: Pending) -> None:
        """Forget a call: after its `answer`, or in place of it."""
        self.pending -= 1
        self.active = time.monotonic()

    def answer(self, pending: Pending, rows: Sequence[Finished]) -> list[Choice]:
        """Add the answers to a call, one row for each request, and return them in the client's form."""
        choices = [self._add(pending, at, row) for at, row in enumerate(rows)]
        if pending.parent is not None:
            pending.parent.is_continued = True
        return choices

    def set_reward(self, value: Any) -> None:
        """Keep the session's reward; the last one counts. RequestError unless it is a finite 32-bit number."""
        self._check_open()
        if type(value) not in (int, float) or not abs(value) <= 3.4028234663852886e38:
            raise RequestError(
                400, f"reward is {repr(value)[:80]}; it has to be a finite 32-bit number", param="reward"
            )
        self.reward = float(value)
        self.active = time.monotonic()

    def rows(self, row: int = 0) -> list[EpisodeRow]:
        """Return the branches, one row each, ordered by their tokens. `row`: of the batch, as in EpisodeRow."""
        leaves = sorted((each for each in self._answers if not each.is_continued), key=lambda a: a.conversation.tokens)
        return [
            EpisodeRow(
                row=row,
                branch=branch,
                conversation=leaf.conversation,
                stop_reason=leaf.stop_reason,
                tool_calls=leaf.tool_calls,
                tool_errors=leaf.tool_errors,
                score=self.reward,
            )
            for branch, leaf in enumerate(leaves)
        ]

    # ---- the branch that a call continues ----

    def _chat(self, call: Call, renderer: TurnRenderer, instructions: str) -> tuple[Answer | None, Conversation, bytes]:
        messages = call.messages
        assert messages is not None
        # With other arguments the template may render earlier turns otherwise.
        given = json.dumps(call.template_kwargs, sort_keys=True) if call.template_kwargs else ""
        digests = [_digest(b"", json.dumps(call.tools) + given)]
        for message in messages:
            digests.append(_digest(digests[-1], _written(message)))
        for end in range(len(messages), 0, -1):
            known = self._known.get(digests[end])
            if known is not None:
                branch, new = _whole(known.conversation), messages[end:]
                branch.extend(renderer.continuation(branch.messages, new, ended=known.ended), new)
                return known, branch, digests[-1]
        if instructions:
            encoder = PromptEncoder(renderer.tokenizer, None, OfferedTools(instructions=instructions))
            messages = encoder.messages(messages)
        return None, Conversation(tuple(renderer.prompt(messages)), list(messages), len(messages)), digests[-1]

    def _completion(self, prompt: str | tuple[int, ...]) -> tuple[Answer | None, Conversation, bytes]:
        """Continue the longest known text, or the longest known token ids, that the prompt begins with."""
        tokenizer, best, length = self._renderers.tokenizer, None, -1
        for each in self._answers:
            known = each.text if isinstance(prompt, str) else each.tokens
            if known and len(known) > length and prompt[: len(known)] == known:
                best, length = each, len(known)
        rest = prompt if best is None else prompt[length:]
        if isinstance(rest, str):
            # Special tokens, such as one for the start of a text, only before the first prompt.
            ids = tuple(tokenizer(rest, add_special_tokens=best is None)["input_ids"]) if rest else ()
            text = rest
        else:
            ids, text = rest, str(tokenizer.decode(list(rest)))
            if max(ids, default=0) >= len(tokenizer):
                raise RequestError(
                    400, f"prompt has token {max(ids)}; the model has {len(tokenizer)} tokens", param="prompt"
                )
        message = {"role": "user", "content": text}
        if best is not None:
            branch = _whole(best.conversation)
            branch.extend(ids, [message] if ids else [])
            return best, branch, b""
        if not ids:
            raise RequestError(400, "prompt has no tokens", param="prompt")
        return None, Conversation(ids, [message], 1), b""

    # ---- limits and noise ----

    def _check_open(self) -> None:
        if self.is_closed:
            raise RequestError(404, f"session {self.id} has ended", code="session_not_found")

    def _sampling(self, call: Call, parent: Answer | None, branch: Conversation) -> Sampling:
        """Return the sampling of the call's requests; RequestError beyond a limit, which then is the branch's end."""
        limits, base = self.limits, self.limits.sampling
        if limits.max_turns and self._turns + call.choices > limits.max_turns:
            if parent is not None:
                parent.stop_reason = "turns"
            raise RequestError(
                400,
                f"the session has had {self._turns} answers of at most {limits.max_turns} (env.max_turns)",
                code="max_turns_exceeded",
            )
        if parent is None and len(branch.prompt) > limits.prompt_len:
            raise RequestError(
                400,
                f"the prompt has {len(branch.prompt)} tokens, more than data.prompt_len={limits.prompt_len}",
                param="messages",
                code="context_length_exceeded",
            )
        left = base.max_tokens - branch.length
        if left < 1:
            if parent is not None:
                parent.stop_reason = "length"
            raise RequestError(
                400,
                f"the conversation has {branch.length} tokens after its first prompt, and "
                f"rollout.response_len={base.max_tokens}: none is left for an answer",
                param="messages",
                code="context_length_exceeded",
            )
        limit = min(left, limits.turn_len or left, call.max_tokens or left)
        if self.held + len(branch.tokens) + limit * call.choices > limits.held_tokens:
            raise RequestError(
                400, f"the session holds {self.held} tokens, near its limit; begin another", code="session_too_long"
            )
        sampling = replace(
            base,
            max_tokens=limit,
            min_tokens=min(base.min_tokens, limit),
            stop=tuple(dict.fromkeys((*base.stop, *call.stop))),
        )
        if limits.fixed:
            return sampling
        return replace(
            sampling,
            temperature=base.temperature if call.temperature is None else call.temperature,
            top_p=base.top_p if call.top_p is None else call.top_p,
        )

    def _keys(self, call: Call, name: str, order: int, prompt: tuple[int, ...], sampling: Sampling) -> list[int]:
        """Return the noise key of each choice; a client's seed gives the same answers in any session."""
        if call.seed is not None and not self.limits.fixed:
            return [noise_key("seed", call.seed, at) for at in range(call.choices)]
        keys = [noise_key(self.key, "call", name, order + at) for at in range(call.choices)]
        if order == 0 and prompt == self._own_prompt and sampling == self.limits.sampling:
            keys[0] = self.key
        return keys

    # ---- answers ----

    def _add(self, pending: Pending, at: int, row: Finished) -> Choice:
        call, parent, renderer = pending.call, pending.parent, pending.renderer
        message = renderer.message_of(row.tokens)
        branch = _whole(pending.conversation)
        branch.sample(row, message)
        tool_format = self._renderers.tool_format
        parsed = tool_format.parse(message["content"], tools=call.tools) if call.reads_tool_calls else None
        calls = [] if parsed is None else [each for each in parsed.calls if isinstance(each, ToolCall)]
        errors = 0 if parsed is None else sum(isinstance(each, BadCall) for each in parsed.calls)
        order = pending.order + at
        tokenizer = self._renderers.tokenizer
        text = answer_text(tokenizer, row.tokens)
        shown: Message = {"role": "assistant", "content": _before_stop(text, row, pending.requests[at].sampling.stop)}
        if calls and call.messages is not None:  # a completion is the text as it is
            assert parsed is not None
            shown["content"] = parsed.content.strip() or None
            shown["tool_calls"] = [
                {
                    "id": _call_id(pending.digest, order, number),
                    "type": "function",
                    "function": {"name": each.name, "arguments": json.dumps(each.arguments)},
                }
                for number, each in enumerate(calls)
            ]
        answer = Answer(
            conversation=branch,
            request=row.id,
            digest=_digest(pending.digest, _written(read_message(shown))),
            order=order,
            ended=row.reason == "end",
            stop_reason="length" if row.reason == "length" else "end",
            tool_calls=(0 if parent is None else parent.tool_calls) + len(calls) + errors,
            tool_errors=(0 if parent is None else parent.tool_errors) + errors,
        )
        self._keep(answer, pending, text)
        return Choice(
            message=shown,
            reason="tool_calls" if calls else "length" if row.reason == "length" else "stop",
            token_ids=tuple(row.tokens),
            tokens=[]
            if not call.log_probs
            else [
                (str(tokenizer.decode([token])), value) for token, value in zip(row.tokens, row.log_probs, strict=True)
            ],
        )

    def _keep(self, answer: Answer, pending: Pending, text: str) -> None:
        new = answer.conversation.length - (0 if pending.parent is None else pending.parent.conversation.length)
        self.held += new + (len(pending.prompt) if pending.parent is None else 0)
        self._answers.append(answer)
        if pending.call.messages is None:
            answer.tokens = answer.conversation.tokens
            self.held += len(answer.tokens)
            if not answer.ended and isinstance(pending.call.prompt, str):  # its text does not show an end token
                answer.text = pending.call.prompt + text
            return
        # Of equal answers to one prompt the first is continued, whichever came first.
        known = self._known.get(answer.digest)
        if known is None or answer.order < known.order:
            self._known[answer.digest] = answer


def _whole(conversation: Conversation) -> Conversation:
    return conversation.fork(len(conversation.spans), len(conversation.messages))


def _written(message: Message) -> str:
    """Return the text by which equal messages are known: without ids, and without the order of an object's keys.

    Whitespace around an assistant's text does not count: clients strip it.
    """
    content, role = message["content"], message["role"]
    calls = [[each["function"]["name"], each["function"]["arguments"]] for each in message.get("tool_calls", ())]
    name = None if role == "tool" else message.get("name")
    return json.dumps([role, content.strip() if role == "assistant" else content, calls, name], sort_keys=True)


def _digest(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def _call_id(digest: bytes, order: int, number: int) -> str:
    """Return a tool call's id: 9 letters and digits, as Mistral's chat templates want them."""
    return hashlib.blake2b(b"%b %d %d" % (digest, order, number), digest_size=8).hexdigest()[:9]


def _before_stop(text: str, row: Finished, stop: Sequence[str]) -> str:
    """Return the text without the stop string that ended it."""
    if row.reason != "stop":
        return text
    return text[: min((at for each in stop if (at := text.find(each)) >= 0), default=len(text))]
