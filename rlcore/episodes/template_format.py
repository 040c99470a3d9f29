"""The form in which a chat template writes tool calls, learned from its renderings of probe calls (decision 0053)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlcore.episodes.call_readers import (
    JSONArguments,
    JSONCall,
    LiteralArguments,
    Parameters,
    Read,
    Reader,
    TaggedArguments,
    parameters_of,
)
from rlcore.episodes.tool_calls import (
    FORMATS,
    REASONING,
    SHOWN,
    Found,
    ToolCall,
    ToolFormat,
    Turn,
    listed,
    read_json,
    tool_instructions,
    turn_of,
)
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANY_NAME = r"[\w.\-/]{1,128}"
NAME = f"(?P<name>{ANY_NAME})"
TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
"""A tag by which a call begins."""
BRACKETS = {"(": ")", "{": "}"}
USER = {"role": "user", "content": "?"}
ANSWER = "~answer-7c1d9b~"


@dataclass(frozen=True)
class TemplateFormat:
    """Calls as a chat template writes them.

    `start` begins calls; `opening` matches from there through the first call's name, `chained` from a call's end
    through the name of the next one (None: it begins as the first). `reader` reads the arguments and the call's
    closing; `ending` matches the text that ends a series of calls, which an answer may leave out. `example` is the
    template's own text, with NAME, KEY and VALUE.
    """

    start: re.Pattern[str]
    opening: re.Pattern[str]
    chained: re.Pattern[str] | None
    reader: Reader
    ending: re.Pattern[str]
    example: str
    _mark: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        mark = re.compile(f"(?P<reasoning>{REASONING.pattern})|(?:{self.start.pattern})", re.DOTALL)
        object.__setattr__(self, "_mark", mark)

    def parse(self, text: str, turn: int = 0, tools: Sequence[dict[str, Any]] = ()) -> Turn:
        """See ToolFormat. A call that is not closed is a BadCall, and so is a start without a name."""
        return turn_of(text, self._found(text, parameters_of(tools)), self.example, turn)

    def instructions(self, tools: Sequence[dict[str, Any]]) -> str:
        """See ToolFormat."""
        return tool_instructions(tools, self.example, "Nothing else stands in a call")

    def _found(self, text: str, parameters: Parameters) -> Iterator[Found]:
        place = self._reasoning_end(text, parameters)
        while mark := self._mark.search(text, place):
            place = mark.end()
            if mark["reasoning"] is None:
                for (start, end), calls in self._series(text, mark.start(), parameters):
                    yield from (((start, end), each) for each in calls)
                    place = end

    def _series(self, text: str, place: int, parameters: Parameters) -> Iterator[tuple[tuple[int, int], list[Any]]]:
        """Yield calls that follow one another, with their spans; the last has an error where one is broken."""
        opened = self.opening.match(text, place)
        if opened is None:
            yield (place, self._limit(text, place)), [ValueError("has no name behind its start")]
            return
        while opened is not None:
            name = opened.groupdict().get("name")
            limit = self._limit(text, opened.end() - 1)
            try:
                calls, end = self.reader.read(Read(text, opened.end(), limit, name, parameters))
            except ValueError as error:
                yield (place, limit), [error]
                return
            opened = self.chained.match(text, end) if self.chained else None
            ending = None if opened else self.ending.match(text, end)
            yield (place, ending.end() if ending else end), calls
            place = end

    def _limit(self, text: str, place: int) -> int:
        """Return where the next call begins behind a place, or the text's end."""
        following = self.start.search(text, place + 1)
        return following.start() if following else len(text)

    def _reasoning_end(self, text: str, parameters: Parameters) -> int:
        """Return the end of reasoning that the prompt opened, or 0; a </think> in a call's argument is none."""
        mark = re.search("</?think>", text)
        if mark is None or mark[0] == "<think>":
            return 0
        call = self.start.search(text, 0, mark.start())
        if call is not None:
            spans = list(self._series(text, call.start(), parameters))
            if any(end > mark.start() and not isinstance(calls[0], ValueError) for (_, end), calls in spans if calls):
                return 0
        return mark.end()


def _harmony() -> TemplateFormat:
    """Return gpt-oss's form, whose template writes another order of the header than the model does."""
    channel = r"(?:<\|channel\|>commentary)?\s?"
    to = rf"(?:<\|start\|>assistant)?\s?{channel}to=functions\."
    opening = re.compile(rf"{to}{NAME}\s?{channel}(?:<\|constrain\|>)?\s?(?:json)?\s?<\|message\|>")
    start = re.compile(opening.pattern.replace("?P<name>", "?:"))
    nothing, close = re.compile(""), re.compile(r"(?:<\|call\|>)?")
    example = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>"
    return TemplateFormat(start, opening, None, JSONArguments(nothing, close), nothing, example)


HARMONY = _harmony()


# ---- probes ----


@dataclass(frozen=True)
class _Probe:
    """A call to render, with names that stand in no template."""

    name: str
    arguments: Mapping[str, Any]


ONE = _Probe("probe_tool", {"probe_key": "probe value"})
TWO_ARGUMENTS = _Probe("probe_tool", {"probe_key": "probe value", "second_key": "second value"})
NO_ARGUMENTS = _Probe("probe_tool", {})
OTHER = _Probe("other_tool", {"probe_key": "probe value"})
QUOTE = "it's"
QUOTED = _Probe("probe_tool", {"probe_key": QUOTE})
READ_BACK = [[ONE], [TWO_ARGUMENTS], [NO_ARGUMENTS], [ONE, OTHER]]


class _Template:
    """A chat template's renderings of calls, without the turn around them.

    `content` and `as_text` (arguments as JSON text) are the form of messages that this template takes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[str]) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self.prompt = self.head = self.tail = ""
        self.numbered = self.as_text = False
        self.content: str | None = ""

    def takes_calls(self) -> bool:
        """Choose the form of messages in which the template writes calls; False if it writes none."""
        self.prompt = self._render([USER], prompt=True) or ""
        plain = self._render([USER, {"role": "assistant", "content": ANSWER}])
        self.head, _, self.tail = (plain or "").partition(ANSWER)
        for self.numbered in (False, True):
            for self.as_text in (False, True):
                for self.content in ("", None):
                    if ONE.name in (written := self.calls(ONE)) and "probe value" in written:
                        return True
        return False

    def calls(self, *probes: _Probe) -> str:
        """Return the calls of one answer as the template writes them; "" if it refuses them."""
        calls = [
            {
                "id": f"functions.{probe.name}:{number}" if self.numbered else f"call0000{number}",
                "type": "function",
                "function": {
                    "name": probe.name,
                    "arguments": json.dumps(probe.arguments) if self.as_text else dict(probe.arguments),
                },
            }
            for number, probe in enumerate(probes)
        ]
        text = self._render([USER, {"role": "assistant", "content": self.content, "tool_calls": calls}])
        if text is None:
            return ""
        # Where the generation prompt is not the header, that ends at a tag or white space: two tags can begin alike.
        is_prompt = bool(self.prompt) and text.startswith(self.prompt)
        header = self.prompt if is_prompt else _cut_back(_shared_start(self.head, text))
        text = text[len(header) :]
        reasoning_end = text.rfind("</think>", 0, max(0, text.find(probes[0].name)))
        text = text[reasoning_end + len("</think>") :] if reasoning_end >= 0 else text
        text = text.removesuffix(self.tail) if self.tail else text
        for end in self._ends:
            text = text.partition(end)[0] if end else text
        return text.strip()

    def _render(self, messages: list[dict[str, Any]], *, prompt: bool = False) -> str | None:
        import jinja2

        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
        except (jinja2.TemplateError, TypeError, ValueError):
            return None


def format_for(tokenizer: PreTrainedTokenizerBase, ends: Sequence[str] = ()) -> ToolFormat:
    """Return the form in which a tokenizer's chat template writes calls; `hermes` if it writes none.

    `ends` are the texts of the tokens that end an answer. Raises ConfigError when the template writes calls in a form
    that cannot be learned from its renderings.
    """
    template = _Template(tokenizer, ends)
    if not template.takes_calls():
        return FORMATS["hermes"]  # the instructions show the format
    written = template.calls(ONE)
    if "<|channel|>" in written and f"to=functions.{ONE.name}" in written:
        return HARMONY
    for each in (*FORMATS.values(), _learned(template)):
        if each is not None and all(_reads(each, template.calls(*probes), probes) for probes in READ_BACK):
            return each
    form = " ".join(_example(written).split())
    raise ConfigError(
        f"the chat template writes a tool call as {form[:SHOWN]!r}, a form that cannot be read back; name one with "
        f"env.tool_format ({', '.join(FORMATS)}), whose instructions then stand in the system prompt, or load a plugin "
        "that brings one"
    )


def _reads(tool_format: ToolFormat, text: str, probes: Sequence[_Probe]) -> bool:
    """Return whether a format reads the probes back; of several, a template may refuse all but the first."""
    calls = tool_format.parse(text).calls
    found = [(call.name, call.arguments) for call in calls if isinstance(call, ToolCall)]
    wanted = [(probe.name, probe.arguments) for probe in probes if not text or probe.name in text]
    return not text or (found == wanted and len(found) == len(calls))


# ---- learning ----


@dataclass(frozen=True)
class _Frame:
    """The texts around a call: before its name, behind its last value, and from there to the next call's name."""

    before: str
    after: str
    after_last: str
    to_next: str | None

    @property
    def close(self) -> str:
        """The end of a call, which both a further call and the answer's end follow."""
        if self.to_next is None:
            return self.after
        return _cut_back(_shared_start(self.after, self.to_next)) or self.after

    @property
    def ending(self) -> str:
        """The text behind the last call."""
        return self.after_last[len(self.close) :]

    def start(self) -> re.Pattern[str] | None:
        """Return a pattern for the tag or text by which calls begin; None where that could begin any answer."""
        tag = TAG.match(self.before.strip())
        if tag is not None:
            return re.compile(re.escape(tag[0]))
        return flexible(self.before.strip(), start="") if len(self.before.strip()) > 2 else None

    def chained(self, name: str) -> re.Pattern[str] | None:
        """Return a pattern from a call's close through the next one's name; `name` is the pattern for that."""
        chain = (self.to_next or "")[len(self.close) :]
        pattern = flexible(chain).pattern.replace(re.escape(OTHER.name), ANY_NAME)
        return re.compile(pattern + name) if chain.strip() else None


def _learned(template: _Template) -> TemplateFormat | None:
    """Return the form that the template's renderings have in common; None if it is none of those with a reader."""
    written = template.calls(ONE)
    return _with_json(template, written) or _with_name(template, written)


def _with_json(template: _Template, written: str) -> TemplateFormat | None:
    """Return the form of calls that are JSON as a whole."""
    for place, end, value in _json_values(written):
        call = next((each for each in listed(value) if isinstance(each, dict) and ONE.name in each.values()), None)
        if call is None:
            continue
        keys = {name for name, given in call.items() if given in (ONE.arguments, json.dumps(ONE.arguments))}
        two = template.calls(ONE, OTHER)
        is_list = isinstance(value, list) or not two.startswith(written[:end]) or "{" not in two[end:]
        to_next = None if is_list else two[end : two.find("{", end)]
        after_last = written[end:] if to_next is None else two[two.rfind("}") + 1 :]
        frame = _Frame(written[:place], written[end:], after_last, to_next)
        start = frame.start()
        if not keys or start is None:
            return None
        name_key = next(key for key, given in call.items() if given == ONE.name)
        reader = JSONCall(flexible(frame.close), name_key, keys.pop())
        opening = flexible(frame.before.strip())
        return TemplateFormat(start, opening, frame.chained(""), reader, optional(frame.ending), _example(written))
    return None


def _with_name(template: _Template, written: str) -> TemplateFormat | None:
    """Return the form of calls whose arguments follow the name."""
    key, value = written.find("probe_key"), written.find("probe value")
    name = written.rfind(ONE.name, 0, key)
    if name < 0 or value < key:
        return None
    behind = name + len(ONE.name)
    body = next(((start, end) for start, end, given in _json_values(written, behind) if given == ONE.arguments), None)
    value_end = value + len("probe value") if body is None else body[1]
    before, recipient = _without_recipient(written[:name], template.head)
    frame = _frame(template, written, before, (key, value_end))
    if (start := frame.start()) is None:
        return None
    if body is not None:
        first = flexible(written[behind : body[0]])
        reader: Reader | None = JSONArguments(_any_number(first) if template.numbered else first, flexible(frame.close))
    else:
        reader = _of_pairs(template, frame, written[behind:key], written[key + len("probe_key") : value])
    if reader is None:
        return None
    start = re.compile(recipient + start.pattern)
    opening = re.compile(recipient + flexible(before).pattern + NAME)
    return TemplateFormat(start, opening, frame.chained(NAME), reader, optional(frame.ending), _example(written))


def _frame(template: _Template, written: str, before: str, arguments: tuple[int, int]) -> _Frame:
    """Return the frame of a call; `arguments` is where the first key begins and where the last value ends."""
    key, end = arguments
    two = template.calls(ONE, OTHER)
    if not two.startswith(written[:end]) or OTHER.name not in two:
        return _Frame(before, written[end:], written[end:], None)
    rest = two[end:]
    last = two.rfind(written[key:end]) + end - key
    return _Frame(before, written[end:], two[last:], rest[: rest.rfind(OTHER.name, 0, rest.find("probe_key"))])


def _of_pairs(template: _Template, frame: _Frame, first: str, assign: str) -> Reader | None:
    """Return the reader of arguments that are written one by one."""
    close = frame.close
    bracket, mark = first.strip(), assign.strip()
    if bracket in BRACKETS and mark.startswith(("=", ":")):
        quote = mark[1:].strip()
        end = close.removeprefix(quote).strip()
        if not quote or not end.startswith(BRACKETS[bracket]):
            return None
        raw = QUOTE in template.calls(QUOTED)
        return LiteralArguments(flexible(first), BRACKETS[bracket], mark[0], quote, raw, flexible(end[1:]))
    two = template.calls(TWO_ARGUMENTS)
    between = two[two.find("probe value") + len("probe value") : two.find("second_key")]
    none = template.calls(NO_ARGUMENTS)
    behind = none.rfind(ONE.name) + len(ONE.name)
    empty = none[behind:].removesuffix(frame.after[len(close) :])
    if not assign.strip() or not between.strip() or not empty.strip() or "second value" not in two:
        return None
    return TaggedArguments(
        flexible(first),
        flexible(assign, end=_white_end(assign)),
        flexible(between, start=_white_start(between)),
        flexible(close, start=_white_start(close)),
        flexible(empty),
    )


def _without_recipient(before: str, head: str) -> tuple[str, str]:
    """Return the text before a name without an earlier header that names the tool too, and a pattern for that header.

    `head` is the text before a plain answer: it ends as such a header does.
    """
    first, named, rest = before.rpartition(ONE.name)
    if not named:
        return before, ""
    sizes = range(min(len(head), len(rest)), -1, -1)
    shared = next(head[len(head) - size :] for size in sizes if rest.startswith(head[len(head) - size :]))
    return rest.removeprefix(shared), f"(?:{re.escape(first)}{ANY_NAME}{re.escape(shared)})?"


def _any_number(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Return a pattern that takes any number of a call where the template writes one, as in Kimi's ids."""
    return re.compile(re.sub(r"^(\\s\*)?:0", r"\1:\\d+", pattern.pattern))


def _json_values(text: str, place: int = 0) -> Iterator[tuple[int, int, Any]]:
    """Yield JSON objects and lists of a text from a place on, outermost first, with start and end."""
    while opened := re.compile(r"[{\[]").search(text, place):
        value, end = read_json(text, opened.start())
        is_value = not isinstance(value, ValueError)
        if is_value:
            yield opened.start(), end, value
        place = end if is_value else opened.end()


def _example(written: str) -> str:
    """Return the template's text of the first probe, with NAME, KEY and VALUE."""
    return written.replace(ONE.name, "NAME").replace("probe_key", "KEY").replace("probe value", "VALUE")


def _shared_start(one: str, other: str) -> str:
    """Return the longest text with which both begin."""
    size = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:size]


def _cut_back(text: str) -> str:
    """Return a text up to its last tag, bracket or white space."""
    return re.sub(r"[^>\])}`\s]*\Z", "", text)


def _white_start(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _white_end(text: str) -> str:
    return text[len(text.rstrip()) :]


def flexible(literal: str, *, start: str | None = None, end: str | None = None) -> re.Pattern[str]:
    r"""Return a pattern for a literal, with any white space where it has some.

    `start` and `end`: white space beside a value, of which only this much belongs to the literal (None: any).
    """
    inner = r"\s*".join(re.escape(each) for each in literal.split())
    before = r"\s*" if start is None else _optional(start)
    after = (r"\s*" if literal[-1:].isspace() else "") if end is None else _optional(end)
    return re.compile(f"{before}{inner}{after}")


def _optional(white: str) -> str:
    return f"(?:{re.escape(white)})?" if white else ""


def optional(literal: str) -> re.Pattern[str]:
    """Return a pattern for a literal that may be missing."""
    return re.compile(f"(?:{flexible(literal).pattern})?" if literal.strip() else "")
