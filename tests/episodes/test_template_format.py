"""Forms of tool calls that are learned from a chat template: templates of the known forms, in words of these tests."""

from __future__ import annotations

import copy
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.config.schema import ModelConfig
from rlcore.data.chat import load_tokenizer
from rlcore.episodes.template_format import format_for
from rlcore.episodes.tool_calls import FORMATS, BadCall, ToolCall
from rlcore.errors import ConfigError

TEMPLATES = {path.stem: path.read_text().rstrip("\n") for path in Path(__file__).with_name("call_templates").iterdir()}
TOKENIZER = load_tokenizer(ModelConfig())
WRITTEN = {"gpt_oss": 10}
"""Calls that are read with a template that writes one call a turn; of the others fifteen."""


def with_template(template: str) -> Any:
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = template
    return tokenizer


FORMS = {name: format_for(with_template(template), ["<|e|>"]) for name, template in TEMPLATES.items()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_read_as_the_template_writes_them(name: str, written_calls: Any) -> None:
    assert FORMS[name] not in FORMATS.values()
    assert written_calls.check_round_trips(with_template(TEMPLATES[name]), FORMS[name]) == WRITTEN.get(name, 15)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_around_calls_is_content(name: str, written_calls: Any) -> None:
    calls = [("add", {"a": 1, "b": "x"}), ("now", {"zone": "</think>"})][: 1 if name == "gpt_oss" else 2]
    text = (
        written_calls.written(with_template(TEMPLATES[name]), calls).removeprefix("<|a|>").removesuffix("<|e|>").strip()
    )
    thought = text.replace("</think>", "utc")
    for lead in ("", "I look.\n", f"<think>{thought}</think>", f"I see: {thought}</think>\n"):
        answer = FORMS[name].parse(lead + text)
        assert [(call.name, call.arguments) for call in answer.calls if isinstance(call, ToolCall)] == calls
        assert answer.content == lead.strip()
    for other in (
        "The sum is 3.",
        f"<think>{thought}</think>3",
        f"<think>{thought}",
        '{"name": "add", "arguments": {}}',
    ):
        answer = FORMS[name].parse(other)
        assert (answer.calls, answer.content) == ([], other)
    assert pickle.loads(pickle.dumps(FORMS[name])) == FORMS[name]


pieces = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<function=add>",
            "<parameter=a>",
            "</parameter>",
            "</function>",
            "\n",
            "[",
            "(",
        ),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "add", "```json\n", "{", "}", "]", ")"),
        *("<|tool_call_start|>[", "a=", "'", "\\", "<|tool_call_end|>", '<|"|>', "call:add{", "<|tool_call>", ","),
        *("<arg_key>", "a</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "1e999", "[" * 3000),
        *(" to=functions.add", "<|message|>", '{"a": "\\ud800"}', "NaN", "<think>", "</think>", "9" * 5000, '"'),
    ]
)


@settings(max_examples=150, deadline=None)
@given(text=st.lists(pieces | st.text(max_size=5), max_size=14).map("".join), name=st.sampled_from(sorted(FORMS)))
def test_no_answer_raises(text: str, name: str) -> None:
    answer = FORMS[name].parse(text, 2)
    assert len({call.id for call in answer.calls}) == len(answer.calls)
    for call in answer.calls:
        if isinstance(call, BadCall):
            assert call.error.startswith("Error: the tool call ")
            assert call.text in text


@pytest.mark.parametrize("name", ["qwen3_coder", "deepseek31", "lfm2", "gpt_oss", "recipient", "phi"])
def test_a_model_that_repeats_itself_costs_no_time(name: str, written_calls: Any) -> None:
    """Eight times the text costs about eight times as much; reading each rest of it again would cost 64 times."""
    text = written_calls.written(with_template(TEMPLATES[name]), [("add", {"a": "x"})]).strip()

    def seconds(text: str) -> float:
        began = time.process_time()
        FORMS[name].parse(text)
        return time.process_time() - began

    for part in ("<think>", "</think>", "it's (\n\n", text[: len(text) // 2], text[:-3]):
        few, many = (min(seconds(part * times) for _ in range(3)) for times in (250, 2_000))
        assert many < 24 * few + 0.1, (few, many)  # 0.1: a short time is mostly noise


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n",
            "is not closed with </parameter>",
        ),
        ("qwen3_coder", '<tool_call>{"name": "add"}</tool_call>', "has no name behind its start"),
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n1\n</function>\n</tool_call>",
            "has no ><parameter= after the name",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=add><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
            "has the argument 'a' twice",
        ),
        ("glm47", "<tool_call>add<arg_key>a</arg_key>1</tool_call>", "has an argument without its key"),
        ("deepseek31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{a: 1}", "is not valid JSON"),
        (
            "deepseek31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}",
            "is not closed with <｜tool▁call▁end｜>",
        ),
        (
            "deepseek31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add{}",
            "has no <｜tool▁sep｜> after the name 'add'",
        ),
        ("mistral_new", "[TOOL_CALLS]add[ARGS][1]", "has arguments that are not a JSON object"),
        ("lfm2", "<|tool_call_start|>[add(a=1, b=x)]<|tool_call_end|>", "has 'x', which is neither a text in quotes"),
        ("lfm2", "<|tool_call_start|>[add(a='x)]<|tool_call_end|>", "has a text that is not closed with '"),
        ("lfm2", "<|tool_call_start|>[add(1)]<|tool_call_end|>", "has no = after '1'"),
        ("lfm2", f"<|tool_call_start|>[add(a={'[' * 99})]", "is nested deeper than 50 levels"),
        ("gemma4", '<|tool_call>call:add{a:<|"|>x}<tool_call|>', 'has a text that is not closed with <|"|>'),
        ("gpt_oss", " to=functions.add<|channel|>commentary json<|message|>{a<|call|>", "is not valid JSON"),
        ("granite", '<|tool_call|>[{"name": "add"', "is not valid JSON"),
    ],
)
def test_a_bad_call(name: str, text: str, fault: str) -> None:
    (call,) = FORMS[name].parse(text).calls
    assert isinstance(call, BadCall)
    assert fault in call.error
    assert call.error.endswith(f"Write {FORMS[name].example}")  # type: ignore[attr-defined]
    assert call.text == text.strip()


def test_a_bad_call_ends_where_the_next_begins() -> None:
    good = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    answer = FORMS["qwen3_coder"].parse(f"{good[:-30]}{good} and {good}")
    assert [type(call) for call in answer.calls] == [BadCall, ToolCall, ToolCall]
    assert answer.content == "and"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string", "nullable": True}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "1", "1"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"type": "string"}, '"x"', '"x"'),
        ({}, "1", 1),
        (None, "[1, 2", "[1, 2"),
    ],
)
def test_a_value_without_quotes_has_the_type_of_its_schema(schema: Any, text: str, value: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    written = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (call,) = FORMS["qwen3_coder"].parse(written, 0, [tool]).calls
    assert isinstance(call, ToolCall)
    assert call.arguments == {"a": value}
    assert type(call.arguments["a"]) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.add<|message|>{}",
        "<|channel|>analysis<|message|>Go<|end|><|start|>assistant<|channel|>commentary to=functions.add<|message|>{}",
        " to=functions.add<|channel|>commentary json<|message|>{}<|call|>",
    ],
)
def test_gpt_oss_writes_other_headers_than_its_template(text: str) -> None:
    """The forms of OpenAI's description of harmony, which puts the recipient before or behind the channel."""
    (call,) = FORMS["gpt_oss"].parse(text).calls
    assert call == ToolCall("add", {}, "call00000")


def test_a_form_that_cannot_be_read_is_named_in_one_line() -> None:
    template = Path(__file__).with_name("templates") / "calls_in_prose.jinja"
    with pytest.raises(ConfigError) as error:
        format_for(with_template(template.read_text().rstrip("\n")), ["<|e|>"])
    assert str(error.value).startswith("the chat template writes a tool call as '<call> VALUE to NAME', a form that")
    assert "\n" not in str(error.value)


def test_instructions_show_the_form(add_schema: dict[str, Any]) -> None:
    text = FORMS["glm47"].instructions([add_schema])
    assert "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>" in text
