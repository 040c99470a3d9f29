"""Rendering of turns by the model's chat template, once each, in tokens."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rlcore.data.chat import Messages
from rlcore.errors import ConfigError, DataError
from rlcore.plain_text import PlainText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER = "~answer-7c1d9b~"
"""The stand-in for an answer in renderings that are cut after it."""
CACHED = 4096
"""Continuations kept; the cache is emptied when it is full."""
VARIANTS = 32
"""Renderers with other template arguments kept; they are dropped when there are more."""
AROUND = 40
"""Characters shown before and after a difference."""

USER = {"role": "user", "content": "What is 1 plus 2?"}
SYSTEM = {"role": "system", "content": "Be brief."}
NEXT = {"role": "user", "content": "And plus 3?"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
LLAMA_CALL = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
RESULTS = [
    {"role": "tool", "name": "add", "content": text, "tool_call_id": f"probe0000{number}"}
    for number, text in enumerate(("result one", "result two"))
]
OTHER = "Give another template with model.chat_template=FILE"
REMEDY = (
    "Set env.template=incremental (earlier turns then stay as they were sampled), or give another template with "
    "model.chat_template=FILE"
)
THOUGHT = "<think>\nOne plus two.\n</think>\n\n"

_Context = tuple[Messages, Any]
"""The messages before an answer, and the tools' schemas or None."""


@dataclass(frozen=True)
class _Step:
    """A probe's answer: the messages before it, and the new ones before the next answer."""

    before: Messages
    answer: str
    new: Messages


def _answers(messages: Messages) -> Messages:
    return [each for each in messages if each.get("role") == "assistant"]


def _answer(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


class TurnRenderer:
    """Renders the turns of a conversation as token ids. Sampled tokens are never decoded and encoded again.

    `tools` are the schemas given to the template. `end_ids` are the tokens that end generation (default: the
    tokenizer's end-of-text token); use `rlcore.end_tokens.end_tokens`. With `template="exact"`, `check` proves
    that every rendering of a conversation starts with the rendering of its earlier turns. With `"incremental"`, new
    messages are rendered after a short stand-in conversation, and earlier turns stay as they were sampled even where
    the template would change them, as Qwen3's does by removing reasoning from earlier turns.

    A template without a tool role (it refuses tool messages or leaves them out) gets tool results as user messages:
    each result as "<tool_response>\\n...\\n</tool_response>"; consecutive results and a user message after them are
    joined by newlines into one user message.

    `template_kwargs` are arguments for the template, which override `model.chat_template_kwargs`; `with_kwargs` adds a
    row's or a request's. `plain_text` is another renderer's of the same tokenizer, since it may hold a copy of that.

    Only the template writes special tokens: those that a message, a tool's schema or a template argument spells out,
    such as <|im_end|> in a tool's result, are text. A message could otherwise end its turn and write the next one.

    Attributes: `plain_text`; `has_tool_role`; `writes_tools`, whether the template writes the schemas of `tools` (if
    not, put `ToolFormat.instructions` into the system prompt); `trims_answers`, set by `check`: whether the template
    strips whitespace around answers, so that a fresh rendering may differ from the sampled tokens in it.

    Raises ConfigError when the template refuses a conversation of user, assistant and user.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tools: Sequence[dict[str, Any]] = (),
        template: Literal["exact", "incremental"] = "exact",
        end_ids: Collection[int] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        plain_text: PlainText | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = list(tools) or None
        self.template = template
        self.end_ids = frozenset([tokenizer.eos_token_id] if end_ids is None else end_ids)
        self.template_kwargs = dict(template_kwargs or {})
        self.plain_text = plain_text or PlainText(tokenizer)
        self._variants: dict[str, TurnRenderer] = {}
        self.trims_answers = False
        self.has_tool_role = True
        self.has_tool_role = self._reads_tool_messages()
        self._turn_end, self._end_token, self._end_id = self._find_turn_end()
        prompt = self._render([USER], prompt=True)
        self.writes_tools = all(tool["function"]["name"] in prompt for tool in tools)
        self._checked = False
        self._context: _Context | None = None  # None: each continuation needs the whole conversation
        self._cache: dict[tuple[str, bool], list[int]] = {}

    def with_kwargs(self, given: Mapping[str, Any] | None) -> TurnRenderer:
        """Return the renderer with these template arguments besides its own; itself if there are none."""
        if not given:
            return self
        name = json.dumps(given, sort_keys=True, default=repr)
        if name not in self._variants:
            if len(self._variants) >= VARIANTS:
                self._variants.clear()
            self._variants[name] = TurnRenderer(
                self.tokenizer,
                tools=self.tools or (),
                template=self.template,
                end_ids=self.end_ids,
                template_kwargs={**self.template_kwargs, **given},
                plain_text=self.plain_text,
            )
        return self._variants[name]

    def prompt(self, messages: Messages) -> list[int]:
        """Return the ids of the first prompt with the tools' schemas, up to the start of the answer.

        Raises DataError when the chat template refuses the messages.
        """
        return self._ids(self._render(messages, prompt=True))

    def continuation(self, messages: Messages, new: Messages, *, ended: bool) -> list[int]:
        """Return the ids between the last sampled token of messages[-1], an answer, and the next generation.

        These are the rest of the answer's turn, the `new` messages, and the generation prompt. `ended` says whether
        the sampled tokens end with an end token; if not, the end of the turn is included. Runs `check` if it has not
        run. Raises DataError when the last message is not an assistant's, or the chat template refuses the messages.
        """
        if not self._checked:
            self.check()
        if not messages or messages[-1].get("role") != "assistant":
            raise DataError(
                "a continuation follows an assistant message, but the conversation's last role is "
                f"{messages[-1].get('role') if messages else None!r}"
            )
        if self._context is None:
            return self._ids_of_tail(self._tail(messages[:-1], self.tools, new), ended)
        key = (repr(new), ended)
        if key not in self._cache:
            if len(self._cache) >= CACHED:
                self._cache.clear()
            self._cache[key] = self._ids_of_tail(self._tail(*self._context, new), ended)
        return list(self._cache[key])

    def message_of(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the assistant message of sampled tokens: their text without the end token.

        Special tokens within the answer, such as Llama's <|python_tag|>, stay in the text: parsers need them, and a
        fresh rendering of the message gives them back. The message has no `tool_calls`; calls stay in `content`.
        """
        body = tokens[:-1] if tokens and tokens[-1] in self.end_ids else tokens
        return _answer(self.raw_text(body))

    def raw_text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens with every special token, the end token included."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def fresh(self, messages: Messages) -> list[int]:
        """Return the ids of the whole conversation, with the generation prompt unless it ends with an answer.

        The policy sampled the answers, so that their special tokens are tokens.
        """
        prompt = messages[-1].get("role") != "assistant"
        return self._ids(self._render(messages, prompt=prompt, sampled=_answers(messages)))

    def check(self) -> None:
        """Raise ConfigError unless the template keeps earlier turns as they were; call it before a run.

        Renders probe conversations: with and without a system message, tool calls, one and two tool results, a user
        message after tool results, and reasoning if the template mentions <think> and its generation prompt does not
        end it, as with thinking turned off. In exact mode every prompt must be the earlier prompt, the answer, and the
        continuation, as text and in tokens. In incremental mode the continuations must hold the new messages. What the
        template refuses (a system role, a user message after tool results) is not probed; it is a DataError where a
        conversation has it.
        """
        try:
            self._context = self._incremental_context() if self.template == "incremental" else self._exact_context()
            self.trims_answers = self._trims_answers()
        except DataError as error:
            raise ConfigError(f"{error}. {REMEDY}") from error
        self._checked = True

    # ---- renderings ----

    def _render(self, messages: Messages, *, prompt: bool, tools: Any = ..., sampled: Sequence[Any] = ()) -> str:
        """Return the conversation's text, with the special tokens marked that its messages spell out."""
        import jinja2

        tools = self.tools if tools is ... else tools
        readable = messages if self.has_tool_role else _tool_results_as_user(messages)
        try:
            return self.plain_text.render(
                self.tokenizer.apply_chat_template,
                readable,
                sampled=sampled,
                tools=tools,
                add_generation_prompt=prompt,
                tokenize=False,
                **self.template_kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            shown = f"roles {_roles(messages)}, last message {messages[-1:]!r:.200}"
            raise DataError(f"the chat template refuses a conversation with {shown}: {error}") from error

    def _ids(self, text: str) -> list[int]:
        return self.plain_text.token_ids([text])[0]

    def _tail(self, before: Messages, tools: Any, new: Messages) -> str:
        """Return the text after an answer that follows `before`, up to the generation after `new`."""
        # The policy sampled the answers in `before`; one in `new` is a client's text.
        text = self._render([*before, _answer(ANSWER), *new], prompt=True, tools=tools, sampled=_answers(before))
        _, found, tail = text.partition(ANSWER)
        if not found:
            raise DataError(
                f"the chat template leaves out or changes an answer in a conversation of {_roles([*before, *new])}"
            )
        return tail

    def _ids_of_tail(self, tail: str, ended: bool) -> list[int]:
        if ended and self._turn_end is not None:
            if not tail.startswith(self._turn_end):
                raise DataError(
                    f"the chat template ends one answer with {self._turn_end!r}, another with {tail[:AROUND]!r}"
                )
            tail = tail[len(self._turn_end) :]
        # Encoded behind the end token, since some tokenizers write a space before, or strip one from, a text's start.
        ids = self._ids(self._end_token + tail)
        start = ids.index(self._end_id) + 1 if self._end_id in ids[:2] else None
        return self._ids(tail) if start is None else ids[start:]

    # ---- the template's form ----

    def _reads_tool_messages(self) -> bool:
        try:
            text = self._render([USER, _answer(CALL), *RESULTS, _answer("3"), NEXT], prompt=True)
        except DataError:
            return False
        return _in_order(text, RESULTS)

    def _find_turn_end(self) -> tuple[str | None, str, int]:
        """Return the text from an answer's end through its end token (None: it has none), that token, and its id."""
        try:
            turn = self._tail([USER], self.tools, [NEXT]).partition(NEXT["content"])[0]
        except DataError as error:
            raise ConfigError(f"{error}. {OTHER}") from error
        texts = {each: self.raw_text([each]) for each in sorted(self.end_ids)}
        written = [each for each, text in texts.items() if text in turn]
        if not written:
            end = min(texts)
            return None, texts[end], end
        end = min(written, key=lambda each: turn.index(texts[each]))
        return turn[: turn.index(texts[end]) + len(texts[end])], texts[end], end

    def _trims_answers(self) -> bool:
        padded = "  3 \n"
        return f"{padded}{self._turn_end or ''}" not in self._render([USER, _answer(padded), NEXT], prompt=True)

    def _incremental_context(self) -> _Context:
        """Return the first stand-in conversation after which new messages are rendered whole."""
        refused: DataError | None = None
        for context in self._contexts():
            try:
                tails = {_roles(new): self._tail(*context, new) for new in ([NEXT], RESULTS[:1], RESULTS)}
            except DataError as error:
                refused = error
                continue
            if _in_order(tails["user"], [NEXT]) and _in_order(tails["tool, tool"], RESULTS):
                return context
        cause = refused or "the rendering leaves out a user message or a tool result after an answer"
        raise ConfigError(f"env.template=incremental: the chat template cannot render new messages: {cause}. {OTHER}")

    def _exact_context(self) -> _Context | None:
        """Return the shortest conversation that gives the probes' continuations (None: only the whole one does)."""
        if self._turn_end is None:
            raise ConfigError(
                f"generation ends at {[self.raw_text([each]) for each in sorted(self.end_ids)]}, but the chat template "
                f"writes {self._tail([USER], self.tools, [NEXT])[:AROUND]!r} after an answer, without any of them. Set "
                f"eos_token_id in the model's generation_config.json to the token that ends a turn. {REMEDY}"
            )
        steps = [step for conversation in self._probes() for step in _steps(conversation)]
        for step in steps:
            self._check_step(step)
        return next((each for each in self._contexts() if all(self._same_tail(each, step) for step in steps)), None)

    def _contexts(self) -> list[_Context]:
        without_tools = ([USER], None)
        return [without_tools, ([USER], self.tools)] if self.tools else [without_tools]

    def _same_tail(self, context: _Context, step: _Step) -> bool:
        try:
            return self._tail(*context, step.new) == self._tail(step.before, self.tools, step.new)
        except DataError:  # refused without the tools' schemas, for example
            return False

    def _probes(self) -> Iterator[Messages]:
        system = [SYSTEM] if self._takes([SYSTEM, USER]) else []
        yield [*system, USER, _answer("3"), NEXT, _answer("6"), USER]
        yield [*system, USER, _answer(CALL), RESULTS[0], _answer("3"), NEXT]
        yield [USER, _answer(f"I add.\n{CALL}"), *RESULTS, _answer(LLAMA_CALL), RESULTS[0], _answer("3"), NEXT]
        if self._takes([USER, _answer(CALL), *RESULTS, NEXT]):
            yield [USER, _answer(CALL), *RESULTS, NEXT, _answer("6"), USER]
        is_off = self._render([USER], prompt=True).rstrip().endswith("</think>")
        if "think" in self.tokenizer.get_chat_template(tools=self.tools) and not is_off:
            yield [USER, _answer(f"{THOUGHT}3"), NEXT, _answer(f"{THOUGHT}6"), USER]
            yield [USER, _answer(THOUGHT + CALL), *RESULTS, _answer(f"{THOUGHT}3"), NEXT]

    def _takes(self, messages: Messages) -> bool:
        try:
            self._render(messages, prompt=True)
        except DataError:
            return False
        return True

    # ---- exactness ----

    def _check_step(self, step: _Step) -> None:
        """Raise ConfigError unless the prompt after a step is the earlier prompt, the answer and the continuation."""
        assert self._turn_end is not None
        answered = [*step.before, _answer(step.answer)]
        sampled = _answers(answered)
        prompt = self._render(step.before, prompt=True, sampled=sampled)
        tail = self._tail(step.before, self.tools, step.new)
        later = self._render([*answered, *step.new], prompt=True, sampled=sampled)
        prompt_ids, later_ids, tail_ids = self._ids(prompt), self._ids(later), self._ids_of_tail(tail, ended=True)
        if later_ids[: len(prompt_ids)] != prompt_ids:
            raise self._difference(step, prompt_ids, later_ids)
        if later != prompt + step.answer + tail and not self._absorbs(step, prompt_ids, later, tail):
            raise self._difference(step, self._ids(prompt + step.answer + tail), later_ids)
        row = later[: len(later) - len(tail) + len(self._turn_end)]
        joined = [*self._ids(row.removesuffix(self._end_token)), self._end_id, *tail_ids]
        if joined != later_ids:
            raise self._difference(step, joined, later_ids)
        last = self._render(answered, prompt=False, sampled=sampled)
        if not last.startswith(row):
            raise self._difference(step, self._ids(last), later_ids)

    def _absorbs(self, step: _Step, prompt_ids: list[int], later: str, tail: str) -> bool:
        """Return whether the template only adds whitespace to an answer, and none to one sampled with it."""
        if not later.endswith(tail):
            return False
        answer_ids = self._ids(later[: len(later) - len(tail)])[len(prompt_ids) :]
        sampled = self.raw_text(answer_ids)
        messages = [*step.before, _answer(sampled), *step.new]
        again = self._render(messages, prompt=True, sampled=_answers(messages))
        return sampled.strip() == step.answer.strip() and again == later

    def _difference(self, step: _Step, kept: list[int], later: list[int]) -> ConfigError:
        first = next(
            (i for i, (a, b) in enumerate(zip(kept, later, strict=False)) if a != b), min(len(kept), len(later))
        )
        before, was, becomes = (
            self.raw_text(ids) for ids in (kept[max(0, first - AROUND) : first], kept[first:], later[first:])
        )
        tokens = [self._shown(ids[first : first + 1]) for ids in (kept, later)]
        return ConfigError(
            "the chat template is not prefix-preserving: it renders the turns "
            f"({_roles([*step.before, _answer('')])}) differently when ({_roles(step.new)}) follow. First differing "
            f"token: number {first}, {tokens[0]} becomes {tokens[1]}. Text: {before[-AROUND:]!r}, then "
            f"{was[:AROUND]!r} becomes {becomes[:AROUND]!r}. {REMEDY}"
        )

    def _shown(self, ids: list[int]) -> str:
        return repr(self.tokenizer.convert_ids_to_tokens(ids)[0]) if ids else "the end of the text"


def _steps(conversation: Messages) -> Iterator[_Step]:
    answers = [place for place, message in enumerate(conversation) if message["role"] == "assistant"]
    for place, following in zip(answers, [*answers[1:], len(conversation)], strict=True):
        yield _Step(conversation[:place], conversation[place]["content"], conversation[place + 1 : following])


def _roles(messages: Messages) -> str:
    return ", ".join(str(message.get("role")) for message in messages)


def _in_order(text: str, messages: Messages) -> bool:
    """Return whether a text holds the messages' contents one after another."""
    for message in messages:
        _, found, text = text.partition(message["content"])
        if not found:
            return False
    return True


def _tool_results_as_user(messages: Messages) -> Messages:
    """Return the conversation with tool results as user messages, for a template without a tool role."""
    readable: Messages = []
    follows_result = False
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "tool":
            message = {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        if follows_result and message.get("role") == "user":
            readable[-1] = {"role": "user", "content": f"{readable[-1]['content']}\n{message['content']}"}
        else:
            readable.append(message)
        follows_result = role == "tool" or (follows_result and role == "user")
    return readable
