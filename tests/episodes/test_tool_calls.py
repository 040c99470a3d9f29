from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.episodes.template_format import format_for
from rlcore.episodes.tool_calls import FORMATS, BadCall, ToolCall, check_call

HERMES, LLAMA, JSON = FORMATS["hermes"], FORMATS["llama"], FORMATS["json"]
ADD = ToolCall("add", {"a": 1, "b": 2}, "call00000")
ADD_JSON = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
ADD_LLAMA = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
ADD_TAG = f"<tool_call>{ADD_JSON}</tool_call>"

TokenizerOf = Callable[[str], Any]

words = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
calls = st.builds(
    lambda name, arguments: {"name": name, "arguments": arguments},
    words.filter(bool),
    st.dictionaries(words, values, max_size=4),
)
pieces = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "```json\n", "```", "\n", " ", ";"),
        *(
            '{"name": ',
            '"add"',
            ', "arguments": ',
            ', "parameters": ',
            "{}",
            "{",
            "}",
            "[",
            "]",
            '{"tool_calls": ',
            '"',
        ),
        *("NaN", "1e999", "9" * 5000, "[" * 3000, '"\\ud800"', "null", ADD_JSON, ADD_LLAMA, '{"function": '),
    ]
)
answers = st.lists(pieces | st.text(max_size=5), max_size=12).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=400, deadline=None)
@given(text=answers, turn=st.integers(0, 2000))
def test_no_answer_raises(name: str, text: str, turn: int) -> None:
    answer = FORMATS[name].parse(text, turn)
    ids = [call.id for call in answer.calls]
    assert len(set(ids)) == len(ids)
    if not answer.calls:
        assert answer.content == text
    for call in answer.calls:
        if isinstance(call, ToolCall):
            assert call.name
            json.dumps(call.arguments, allow_nan=False, ensure_ascii=False).encode()
        else:
            assert call.error.startswith("Error: the tool call ")
            assert call.text in text
    assert FORMATS[name].parse(text, turn) == answer


def written(name: str, wanted: list[dict[str, Any]], ascii_only: bool) -> str:
    texts = [json.dumps(each, ensure_ascii=ascii_only) for each in wanted]
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in texts)
    if name == "llama":
        return "<|python_tag|>" + "; ".join(texts)
    return "\n".join(f"```json\n{each}\n```" for each in texts)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=200, deadline=None)
@given(wanted=st.lists(calls, min_size=1, max_size=3), ascii_only=st.booleans(), thought=st.booleans())
def test_written_calls_are_read(name: str, wanted: list[dict[str, Any]], ascii_only: bool, thought: bool) -> None:
    lead = f"<think>\nI write {ADD_TAG} or {ADD_JSON}.\n</think>\n\n" if thought else ""
    answer = FORMATS[name].parse(lead + written(name, wanted, ascii_only), turn=12)
    assert [vars(call) for call in answer.calls] == [
        {**each, "id": f"call0120{number}"} for number, each in enumerate(wanted)
    ]
    assert answer.content == lead.strip()


@pytest.mark.parametrize(
    ("tool_format", "text", "content"),
    [
        (HERMES, ADD_TAG, ""),
        (HERMES, f"I add.\n{ADD_TAG}\n", "I add."),
        (HERMES, f"I see, a </think>now{ADD_TAG}", "I see, a </think>now"),
        (LLAMA, ADD_LLAMA, ""),
        (LLAMA, f"Wait.<|python_tag|>{ADD_LLAMA}", "Wait."),
        (LLAMA, f" {ADD_JSON} ", ""),
        (JSON, ADD_JSON, ""),
        (JSON, f"[{ADD_JSON}]", ""),
        (JSON, f"So:\n```json\n{ADD_JSON}\n```\nDone.", "So:\n\nDone."),
        (JSON, f"```python\nx = 1\n```\n```\n{ADD_LLAMA}\n```", "```python\nx = 1\n```"),
        (JSON, '{"tool_calls": [{"id": "x", "type": "function", "function": ' + ADD_JSON + "}]}", ""),
        (JSON, '{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}}', ""),
    ],
)
def test_a_call(tool_format: Any, text: str, content: str) -> None:
    answer = tool_format.parse(text)
    assert answer.calls == [ADD]
    assert answer.content == content


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (HERMES, "The sum is 3."),
        (HERMES, f"<think>{ADD_TAG}</think>3"),
        (HERMES, f"{ADD_TAG}</think>3"),
        (HERMES, f"<think>{ADD_TAG}"),
        (HERMES, ADD_JSON),
        (LLAMA, f"<think>\n<|python_tag|>{ADD_LLAMA}</think>3"),
        (LLAMA, f"The call is {ADD_LLAMA}"),
        (LLAMA, '{"result": 3}'),
        (LLAMA, '{"name": "Ada"}'),
        (LLAMA, "{3}"),
        (JSON, '{"name": "Ada", "born": 1815}'),
        (JSON, "[1, 2]"),
        (JSON, f"<think>{ADD_JSON}</think>3"),
        (JSON, f"{ADD_JSON}</think>3"),
        (JSON, f"<think>```json\n{ADD_JSON}\n```"),
        (JSON, '```json\n{"result": 3}\n```'),
        (JSON, '```python\nd = {"a"\n```'),
    ],
)
def test_no_call(tool_format: Any, text: str) -> None:
    answer = tool_format.parse(text)
    assert answer.calls == []
    assert answer.content == text


@pytest.mark.parametrize(
    ("tool_format", "text", "fault"),
    [
        (HERMES, f"<tool_call>{ADD_JSON}", "is not closed with </tool_call>"),
        (HERMES, '<tool_call>{"name": "add", ', "is not valid JSON: Expecting property name enclosed in double quotes"),
        (HERMES, "<tool_call></tool_call>", "is not valid JSON: no { at its start"),
        (HERMES, "<tool_call>[1]</tool_call>", "is not a JSON object"),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', 'has no text as "name"'),
        (HERMES, '<tool_call>{"name": "x", "arguments": [1]}</tool_call>', "has arguments that are not a JSON object"),
        (HERMES, '<tool_call>{"name": "x", "arguments": "1, 2"}</tool_call>', "has arguments that are not a JSON ob"),
        (HERMES, f"<tool_call>{ADD_JSON} now</tool_call>", "is followed by text"),
        (HERMES, '<tool_call>{"name": "x", "arguments": {"a": NaN}}</tool_call>', "a number that is not finite"),
        (HERMES, '<tool_call>{"name": "x", "arguments": {"a": "\\ud800"}}</tool_call>', "half of a surrogate pair"),
        (
            HERMES,
            f'<tool_call>{{"name": "x", "arguments": {{"a": {"[" * 60 + "]" * 60}}}}}</tool_call>',
            "deeper than 50",
        ),
        (HERMES, f'<tool_call>{{"name": "x", "arguments": {{"a": {"[" * 9999}', "is not valid JSON"),
        (HERMES, f'<tool_call>{{"name": "x", "arguments": {{"a": {"9" * 9999}}}}}</tool_call>', "is not valid JSON"),
        (LLAMA, '<|python_tag|>search(query="x")', "is not valid JSON"),
        (LLAMA, "<|python_tag|>", "is not valid JSON"),
        (LLAMA, '{"name": "add", "parameters": {"a": 1', "is not valid JSON"),
        (JSON, '{"name": "add", "arguments": {"a": 1', "is not valid JSON"),
        (JSON, '```json\n{"name": "add", "arguments": {"a" 1}}\n```', "is not valid JSON"),
        (JSON, f"```json\n{ADD_JSON}", "is not closed with ```"),
    ],
)
def test_a_bad_call(tool_format: Any, text: str, fault: str) -> None:
    (call,) = tool_format.parse(text, turn=3).calls
    assert isinstance(call, BadCall)
    assert call.error.startswith("Error: the tool call ")
    assert fault in call.error
    assert call.error.endswith(f"Write {tool_format.example}")
    assert len(call.error) < 400
    assert call.id == "call00300"


def test_a_bad_call_stands_between_good_ones() -> None:
    answer = HERMES.parse(f"{ADD_TAG}<tool_call>{{oh<tool_call>{ADD_JSON}</tool_call> and {ADD_TAG}")
    assert [type(call) for call in answer.calls] == [ToolCall, BadCall, ToolCall, ToolCall]
    assert [call.id for call in answer.calls] == ["call00000", "call00001", "call00002", "call00003"]
    assert answer.calls[1].text == "<tool_call>{oh"  # type: ignore[union-attr]
    assert answer.content == "and"


def test_text_after_a_bare_call() -> None:
    good, bad = LLAMA.parse(f"{ADD_LLAMA} is it").calls
    assert good == ADD
    assert isinstance(bad, BadCall)


@pytest.mark.parametrize(
    ("tool_format", "pattern"),
    [
        (HERMES, "<tool_call>{}</tool_call>"),
        (LLAMA, "{}"),
        (LLAMA, "<|python_tag|>{}"),
        (JSON, "{}"),
        (HERMES, "<think>Hm.</think><tool_call>{}</tool_call>"),
        (JSON, "<think>Hm.</think>```json\n{}\n```"),
    ],
)
@pytest.mark.parametrize("value", ["</think>", "<think>", "<think></think>", "</tool_call>", "<tool_call>", "```"])
def test_a_tag_in_an_argument(tool_format: Any, pattern: str, value: str) -> None:
    wanted = {"name": "write", "arguments": {"text": f"a {value} b"}}
    (call,) = tool_format.parse(pattern.replace("{}", json.dumps(wanted))).calls
    assert isinstance(call, ToolCall)
    assert call.arguments == wanted["arguments"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["<tool_call>", "<think>", "</think>", "```a ", "\n", "{", "<|python_tag|>", "]; "])
def test_a_model_that_repeats_itself_costs_no_time(name: str, text: str) -> None:
    """Twenty thousand times in far less than the seconds that reading each rest of the answer again would take."""
    start = time.process_time()
    FORMATS[name].parse(text * 20_000)
    assert time.process_time() - start < 0.5


SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "integer", "nullable": True},
                    "way": {"type": "string", "enum": ["up", "down"]},
                    "list": {"type": "array", "items": {"type": "number"}},
                },
                "required": ["a"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@pytest.mark.parametrize("arguments", [{"a": 1}, {"a": 1, "b": None}, {"a": -1, "way": "up", "list": [1, 2.5]}])
def test_a_call_that_fits(arguments: dict[str, Any]) -> None:
    assert check_call(ToolCall("add", arguments, "x"), SCHEMAS) is None
    assert check_call(ToolCall("now", {}, "x"), SCHEMAS) is None


@pytest.mark.parametrize(
    ("name", "arguments", "fault"),
    [
        ("ad", {}, "unknown tool 'ad'. Did you mean 'add'? Tools: add, now"),
        ("add", {}, 'wrong arguments for add: \'a\' is a required property. It takes {"a": {"type": "integer"}'),
        ("add", {"a": None}, "'a' None is not of type 'integer'"),
        ("add", {"a": "1"}, "'a' '1' is not of type 'integer'"),
        ("add", {"a": True}, "'a' True is not of type 'integer'"),
        ("add", {"a": 1, "way": "left"}, "'way' 'left' is not one of ['up', 'down']"),
        ("add", {"a": 1, "list": [1, "x" * 999]}, "'list' 1 'xxx"),
        ("add", {"a": 1, "c": 2}, "Additional properties are not allowed ('c' was unexpected)"),
        ("now", {"c": 2}, "Additional properties are not allowed"),
    ],
)
def test_a_call_that_does_not_fit(name: str, arguments: dict[str, Any], fault: str) -> None:
    bad = check_call(ToolCall(name, arguments, "call00102"), SCHEMAS)
    assert bad is not None
    assert bad.error.startswith("Error: ")
    assert fault in bad.error
    assert len(bad.error) < 800
    assert bad.id == "call00102"
    assert json.loads(bad.text) == {"name": name, "arguments": arguments}


def test_a_property_called_nullable() -> None:
    parameters = {"type": "object", "properties": {"nullable": {"type": "integer"}}, "required": ["nullable"]}
    schemas = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert check_call(ToolCall("f", {"nullable": 1}, "x"), schemas) is None
    assert check_call(ToolCall("f", {"nullable": "1"}, "x"), schemas) is not None


CALLS = {
    "hermes": "'<tool_call>\\n' ~ (call.function | tojson) ~ '\\n</tool_call>'",
    "llama": "'{\"name\": \"' ~ call.function.name ~ '\", \"parameters\": ' ~ (call.function.arguments | tojson) ~ '}'",
    "python_tag": "('<|python_tag|>' if loop.first else '; ') ~ (call.function | tojson)",
    "json": "{'tool_calls': [call]} | tojson",
}


def with_calls(tokenizer_of: TokenizerOf, written: str) -> Any:
    tokenizer = tokenizer_of("chatml")
    expression = f"{{% for call in message.tool_calls or [] %}}{{{{ {CALLS[written]} }}}}{{% endfor %}}"
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ message.content }}", "{{ message.content }}" + expression
    )
    return tokenizer


@pytest.mark.parametrize(
    ("written", "name"), [("hermes", "hermes"), ("llama", "llama"), ("python_tag", "llama"), ("json", "json")]
)
def test_the_format_that_a_template_writes(tokenizer_of: TokenizerOf, written: str, name: str) -> None:
    assert format_for(with_calls(tokenizer_of, written)) is FORMATS[name]


@pytest.mark.parametrize("family", ["tiny", "chatml", "mistral"])
def test_a_template_that_writes_no_calls(tokenizer_of: TokenizerOf, family: str) -> None:
    assert format_for(tokenizer_of(family)) is HERMES


@pytest.mark.parametrize("name", FORMATS)
def test_instructions_show_the_tools_and_the_format(name: str, add_schema: dict[str, Any]) -> None:
    text = FORMATS[name].instructions([add_schema])
    assert json.dumps(add_schema["function"]) in text
    assert FORMATS[name].example in text  # type: ignore[attr-defined]
    example = FORMATS[name].example.replace("NAME", '"add"').replace("{...}", '{"a": 1, "b": 2}')  # type: ignore[attr-defined]
    assert FORMATS[name].parse(example).calls == [ADD]
