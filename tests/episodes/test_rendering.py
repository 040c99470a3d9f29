from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import ModelConfig
from rlcore.data.chat import load_tokenizer
from rlcore.episodes.rendering import VARIANTS, TurnRenderer
from rlcore.errors import ConfigError, DataError

TEMPLATES = Path(__file__).parent / "templates"
FAMILIES = ["tiny", "chatml", "markers", "qwen2_5", "llama3", "mistral"]
USER = {"role": "user", "content": "Add 1 and 2."}
MORE = {"role": "user", "content": "And 4?"}

TokenizerOf = Callable[[str], Any]


def result(text: str) -> dict[str, str]:
    return {"role": "tool", "name": "add", "content": text, "tool_call_id": "call-0-0"}


def sampled(tokenizer: Any, text: str) -> list[int]:
    """The tokens of an answer as a model samples it: behind its prompt, with its end token."""
    lead = f"{tokenizer.eos_token} " if tokenizer.eos_token == "</s>" else tokenizer.eos_token
    return tokenizer(lead + text + tokenizer.eos_token, add_special_tokens=False)["input_ids"][1:]


def play(renderer: TurnRenderer, turns: list[tuple[str, list[dict[str, str]]]]) -> tuple[list[int], list]:
    """The row of a conversation and its messages: each turn is an answer and the messages that follow it."""
    messages: list[dict[str, Any]] = [USER]
    row = renderer.prompt(messages)
    for answer, new in turns:
        tokens = sampled(renderer.tokenizer, answer)
        row = row + tokens
        messages = [*messages, renderer.message_of(tokens)]
        assert messages[-1] == {"role": "assistant", "content": answer}
        if new:
            row = row + renderer.continuation(messages, new, ended=True)
            messages = [*messages, *new]
    return row, messages


@pytest.mark.parametrize("with_tools", [False, True], ids=["plain", "tools"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_a_fresh_rendering(
    tokenizer_of: TokenizerOf, add_schema: dict[str, Any], family: str, with_tools: bool
) -> None:
    if family == "mistral" and with_tools:
        pytest.skip("its template moves the tools: refused below")
    renderer = TurnRenderer(tokenizer_of(family), tools=[add_schema] if with_tools else [])
    renderer.check()
    turns = [
        ("I add.\n<tool_call>{}</tool_call>", [result("3")]),
        ("<tool_call>{}</tool_call>", [result("{3}"), result("4 5")]),
        ("3", [MORE]),
        ("<tool_call>{}</tool_call>", [result("7"), result("8"), MORE]),
        ("7", [USER]),
    ]
    row, messages = play(renderer, turns)
    assert row == renderer.fresh(messages)
    unfinished, messages = play(renderer, [*turns, ("9", [])])
    assert renderer.fresh(messages)[: len(unfinished)] == unfinished


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stop_string_leaves_the_end_of_the_turn_to_the_template(tokenizer_of: TokenizerOf, family: str) -> None:
    renderer = TurnRenderer(tokenizer_of(family))
    tokens = sampled(renderer.tokenizer, "<tool_call>{}</tool_call>")
    messages = [USER, renderer.message_of(tokens)]
    ended = renderer.continuation(messages, [result("3")], ended=True)
    stopped = renderer.continuation(messages, [result("3")], ended=False)
    assert stopped == [tokens[-1], *ended]
    assert renderer.message_of(tokens[:-1]) == renderer.message_of(tokens)
    assert renderer.prompt([USER]) + tokens[:-1] + stopped == renderer.fresh([*messages, result("3")])


def test_the_rest_of_the_turn_follows_the_sampled_end(tokenizer_of: TokenizerOf) -> None:
    renderer = TurnRenderer(tokenizer_of("qwen2_5"))
    ids = renderer.continuation([USER, {"role": "assistant", "content": "x"}], [result("3"), result("4")], ended=True)
    assert renderer.raw_text(ids) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_qwen3_is_refused_in_exact_mode(tokenizer_of: TokenizerOf) -> None:
    with pytest.raises(ConfigError) as caught:
        TurnRenderer(tokenizer_of("qwen3")).check()
    message = str(caught.value)
    assert "the turns (user, assistant) differently when (user) follow" in message
    assert "'<' becomes '3'" in message
    assert r"then '<think>\nOne plus two.\n</think>\n\n3<|im_en' becomes '3<|im_end|>" in message
    assert "env.template=incremental" in message
    assert "model.chat_template=FILE" in message


def thinking(**given: Any) -> Any:
    """The tiny model's tokenizer with a template that drops reasoning from earlier turns."""
    return load_tokenizer(ModelConfig(chat_template=str(TEMPLATES / "thinking.jinja"), chat_template_kwargs=given))


def test_with_thinking_off_a_template_that_drops_reasoning_is_exact() -> None:
    renderer, plain = TurnRenderer(thinking(enable_thinking=False)), thinking()
    renderer.check()
    row, messages = play(renderer, [("3", [MORE]), ("7", [result("8")]), ("9", [USER])])
    want = plain.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, enable_thinking=False)
    assert plain.decode(row) == want
    assert want.count("<think></think>") == 4
    by_row = TurnRenderer(plain).with_kwargs({"enable_thinking": False})
    by_row.check()
    assert play(by_row, [("3", [MORE]), ("7", [result("8")]), ("9", [USER])]) == (row, messages)


def test_with_thinking_on_it_is_refused() -> None:
    for given in ({}, {"enable_thinking": True}):
        with pytest.raises(
            ConfigError, match=r"the chat template is not prefix-preserving(.|\n)*env.template=incremental"
        ):
            TurnRenderer(thinking(**given)).check()
        TurnRenderer(thinking(**given), template="incremental").check()


def test_renderers_with_other_arguments_are_made_once() -> None:
    renderer = TurnRenderer(thinking(enable_thinking=False))
    assert renderer.with_kwargs({}) is renderer is renderer.with_kwargs(None)
    on = renderer.with_kwargs({"enable_thinking": True})
    assert on is renderer.with_kwargs({"enable_thinking": True})
    assert renderer.raw_text(on.prompt([USER])).endswith("<think>\n")
    assert renderer.raw_text(renderer.prompt([USER])).endswith("<think></think>")
    for number in range(VARIANTS):
        renderer.with_kwargs({"enable_thinking": number})
    assert len(renderer._variants) <= VARIANTS
    assert on is not renderer.with_kwargs({"enable_thinking": True})


@pytest.mark.parametrize("with_tools", [False, True], ids=["plain", "tools"])
def test_qwen3_works_incrementally(tokenizer_of: TokenizerOf, add_schema: dict[str, Any], with_tools: bool) -> None:
    renderer = TurnRenderer(tokenizer_of("qwen3"), template="incremental", tools=[add_schema] if with_tools else [])
    renderer.check()
    row, _ = play(renderer, [("<think>\na\n</think>\n\n3", [MORE]), ("<think>\nb\n</think>\n\n7", [result("8")])])
    text = renderer.raw_text(row)
    assert text.endswith(
        "<|im_start|>user\nAdd 1 and 2.<|im_end|>\n<|im_start|>assistant\n<think>\na\n</think>\n\n3<|im_end|>\n"
        "<|im_start|>user\nAnd 4?<|im_end|>\n<|im_start|>assistant\n<think>\nb\n</think>\n\n7<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n8\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.count("<tools>") == with_tools


def test_mistral_moves_its_tools(tokenizer_of: TokenizerOf, add_schema: dict[str, Any]) -> None:
    tokenizer = tokenizer_of("mistral")
    with pytest.raises(ConfigError, match=r"not prefix-preserving.*'\[AVAILABLE_TOOLS\]' becomes '\[INST\]'"):
        TurnRenderer(tokenizer, tools=[add_schema]).check()
    renderer = TurnRenderer(tokenizer, tools=[add_schema], template="incremental")
    row, _ = play(renderer, [("3", [MORE]), ("7", [result("8")])])
    assert renderer.raw_text(row).count("[AVAILABLE_TOOLS]") == 1


def test_a_template_without_a_tool_role_gets_user_messages(tokenizer_of: TokenizerOf) -> None:
    renderer = TurnRenderer(tokenizer_of("tiny"))
    assert not renderer.has_tool_role
    ids = renderer.continuation(
        [USER, {"role": "assistant", "content": "x"}], [result("3"), result("4"), MORE], ended=True
    )
    assert renderer.raw_text(ids) == (
        "<|user|><tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>\nAnd 4?<|end|><|assistant|>"
    )


def test_a_template_that_leaves_tool_messages_out_gets_user_messages(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "in messages -%}", "in messages if message.role in ['system', 'user', 'assistant'] -%}"
    )
    renderer = TurnRenderer(tokenizer)
    ids = renderer.continuation([USER, {"role": "assistant", "content": "x"}], [result("3")], ended=True)
    assert "user\n<tool_response>\n3\n</tool_response><|im_end|>" in renderer.raw_text(ids)


def test_llama_trims_answers_and_any_end_token_ends(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("llama3")
    eot, eom, python = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|eom_id|>", "<|python_tag|>"])
    renderer = TurnRenderer(tokenizer, end_ids=[eom, eot])
    renderer.check()
    assert renderer.trims_answers
    tokens = [python, *tokenizer.encode('{"name": "add"}', add_special_tokens=False), eom]
    message = renderer.message_of(tokens)
    assert message["content"] == '<|python_tag|>{"name": "add"}'
    assert renderer.raw_text(tokens).endswith("<|eom_id|>")
    ids = renderer.continuation([USER, message], [result("3")], ended=True)
    assert renderer.raw_text(ids) == (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    )


@pytest.mark.parametrize("family", ["tiny", "chatml", "qwen2_5", "mistral"])
def test_others_keep_whitespace(tokenizer_of: TokenizerOf, family: str) -> None:
    renderer = TurnRenderer(tokenizer_of(family))
    renderer.check()
    assert not renderer.trims_answers


@pytest.mark.parametrize(
    ("family", "writes"), [("tiny", False), ("chatml", False), ("qwen2_5", True), ("llama3", True)]
)
def test_whether_tools_are_written(
    tokenizer_of: TokenizerOf, add_schema: dict[str, Any], family: str, writes: bool
) -> None:
    renderer = TurnRenderer(tokenizer_of(family), tools=[add_schema])
    assert renderer.writes_tools is writes
    assert ('"Add two numbers."' in renderer.raw_text(renderer.prompt([USER]))) is writes


def broken(tokenizer_of: TokenizerOf, old: str, new: str) -> Any:
    tokenizer = tokenizer_of("chatml")
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    return tokenizer


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        pytest.param(
            "<|im_start|>{{ message.role }}",
            "<|im_start|>{{ loop.length }}{{ message.role }}",
            r"number 1, '2' becomes '4'",
            id="counts",
        ),
        pytest.param(
            "{{ message.content }}",
            "{{ message.content if loop.last or message.role != 'assistant' else message.content[:24] }}",
            r"the turns \(system, user, assistant\) differently when \(tool\) follow",
            id="cuts-earlier-answers",
        ),
        pytest.param(
            "{{ message.content }}",
            "{{ message.content[:24] }}",
            r"'Ċ' becomes '<|im_end|>'",
            id="cuts-answers",
        ),
        pytest.param(
            "{{ message.content }}",
            "{{ '()' if loop.last and message.role == 'assistant' }}{{ message.content }}",
            r"'\(' becomes '3'",
            id="marks-the-last-answer",
        ),
        pytest.param("assistant\n{% endif", "assistant\n<think>\n{% endif", "'<' becomes '3'", id="opens-thought"),
        pytest.param(
            "{{ message.content }}", "{{ message.content | upper }}", "leaves out or changes an answer", id="upper-case"
        ),
    ],
)
def test_templates_that_change_earlier_turns(tokenizer_of: TokenizerOf, old: str, new: str, fault: str) -> None:
    tokenizer = broken(tokenizer_of, old, new)
    with pytest.raises(ConfigError, match=fault):
        TurnRenderer(tokenizer).check()


def test_a_continuation_that_needs_the_whole_conversation(tokenizer_of: TokenizerOf) -> None:
    """The role's line holds the place of its turn, so no shorter conversation gives it."""
    tokenizer = broken(tokenizer_of, "<|im_start|>{{ message.role }}", "<|im_start|>{{ loop.index }}{{ message.role }}")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<|im_start|>assistant", "<|im_start|>{{ messages | length + 1 }}assistant"
    )
    renderer = TurnRenderer(tokenizer)
    row, messages = play(renderer, [("3", [MORE]), ("7", [MORE]), ("11", [result("3"), result("4")])])
    assert row == renderer.fresh(messages)
    assert "9assistant" in renderer.raw_text(row)


def test_tokens_that_merge_over_a_prompts_end(tokenizer_of: TokenizerOf) -> None:
    """As text the longer rendering starts with the shorter one; in tokens it does not."""
    tokenizer = tokenizer_of("mistral")
    tokenizer.chat_template = tokenizer.chat_template.replace("'[/INST]'", "'[/INST] '").replace(
        "' ' ~ message.content", "message.content"
    )
    with pytest.raises(ConfigError, match="'▁' becomes '▁3'"):
        TurnRenderer(tokenizer).check()


def test_an_end_token_that_merges_with_what_follows(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("mistral")
    assert len(tokenizer.encode("\n\n", add_special_tokens=False)) == 2  # a space, and one token
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '\n' ~ message.role ~ ':' ~ message.content ~ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\nassistant:' }}{% endif %}"
    )
    with pytest.raises(ConfigError, match=r"First differing token: .*'\\n' becomes '\\n\\n'"):
        TurnRenderer(tokenizer, end_ids=[tokenizer.convert_tokens_to_ids("\n")]).check()


def test_a_template_that_ends_turns_otherwise(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.eos_token = "<|end|>"
    with pytest.raises(ConfigError, match=r"ends at \['<\|end\|>'\].*writes '<\|im_end\|>\\n.*eos_token_id"):
        TurnRenderer(tokenizer).check()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    TurnRenderer(tokenizer, end_ids=[end, tokenizer.eos_token_id]).check()


def test_what_a_template_refuses(tokenizer_of: TokenizerOf) -> None:
    renderer = TurnRenderer(tokenizer_of("mistral"))
    system = {"role": "system", "content": "x"}
    with pytest.raises(DataError, match=r"roles system, user.*Only user and assistant roles"):
        renderer.prompt([system, USER])
    with pytest.raises(DataError, match="Only user and assistant roles"):
        renderer.continuation([USER, {"role": "assistant", "content": "3"}], [system, USER], ended=True)
    with pytest.raises(DataError, match="follows an assistant message, but the conversation's last role is 'user'"):
        renderer.continuation([USER], [USER], ended=True)
    with pytest.raises(ConfigError, match="No answers"):
        TurnRenderer(broken(tokenizer_of, "{%- if add", "{{ raise_exception('No answers') }}{%- if add"))


def test_a_continuation_is_the_callers_own(tokenizer_of: TokenizerOf) -> None:
    renderer = TurnRenderer(tokenizer_of("tiny"))
    messages = [USER, {"role": "assistant", "content": "3"}]
    first = renderer.continuation(messages, [MORE], ended=True)
    kept = list(first)
    first.append(-1)
    assert renderer.continuation(messages, [MORE], ended=True) == kept


def test_an_uncached_continuation_is_fast(tokenizer_of: TokenizerOf) -> None:
    """Below 0.3 ms; 35 us measured. The fastest of three hundred, since others share the cores."""
    renderer = TurnRenderer(tokenizer_of("tiny"))
    renderer.check()
    messages = [USER, {"role": "assistant", "content": "3"}] * 20
    times = []
    for number in range(300):
        start = time.perf_counter()
        renderer.continuation(messages, [result(str(number))], ended=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3e-3
