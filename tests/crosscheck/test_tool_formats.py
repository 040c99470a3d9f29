"""The chat templates in TRL's package: every form of tool calls is read back, and every conversation continued.

Templates of vision models whose messages are lists of parts are left out: they refuse a text.
"""

import copy
from pathlib import Path

import pytest

from rlcore.config.schema import ModelConfig
from rlcore.data.chat import load_tokenizer
from rlcore.episodes.rendering import TurnRenderer
from rlcore.episodes.template_format import format_for
from rlcore.episodes.tool_calls import FORMATS
from rlcore.errors import ConfigError

PARTS = ("idefics3", "llava_next", "smolvlm")
ENDS = [
    *("<|im_end|>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "<end_of_turn>", "<turn|>", "<|eot_id|>"),
    *("<|eot|>", "<|end|>", "<|return|>", "<|call|>", "<|user|>", "<|observation|>"),
]
"""End tokens of these families, as their generation_config.json name them."""


@pytest.fixture(scope="module")
def templates(request):
    """Return the tokenizer and the end tokens' texts for each template, with the tiny model's vocabulary."""
    venv = request.config.getoption("--trl")
    if venv is None:
        pytest.skip("reads TRL's templates: make crosscheck")
    (folder,) = Path(venv).glob("lib/*/site-packages/trl/chat_templates")
    files = [path for path in sorted(folder.glob("*.jinja")) if not path.stem.startswith(PARTS)]
    tiny = load_tokenizer(ModelConfig())
    by_name = {}
    for path in files:
        tokenizer = copy.deepcopy(tiny)
        tokenizer.chat_template = path.read_text()
        ends = [end for end in ENDS if end in tokenizer.chat_template]
        tokenizer.add_special_tokens({"bos_token": "<bos>", "additional_special_tokens": ends})
        by_name[path.stem] = tokenizer, ends
    return by_name


def test_the_forms_of_calls(templates, written_calls):
    """48 of the 66 write calls; the others get instructions for Hermes's form."""
    read, silent = {}, set()
    for name, (tokenizer, ends) in templates.items():
        tool_format = format_for(tokenizer, ends)
        if count := written_calls.check_round_trips(tokenizer, tool_format):
            read[name] = count
        else:
            assert tool_format is FORMATS["hermes"], name
            assert not written_calls.written(tokenizer, [("probe_tool", {"key": "value"})]), name
            silent.add(name.removesuffix("_training"))
    assert len(templates) == 66
    assert len(read) == 48
    assert set(read.values()) == {5, 10, 15}  # Llama's templates refuse two calls, gpt-oss's write the first
    assert silent == {"cohere", "cohere2", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl"}


def test_conversations_continue(templates):
    """All 66 with `env.template=exact` or, where they change earlier turns, `incremental`."""
    exact, incremental = [], []
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}}
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": parameters}}
    for tokenizer, ends in templates.values():
        given = {"tools": [tool], "end_ids": tokenizer.convert_tokens_to_ids(ends)}
        try:
            TurnRenderer(tokenizer, template="exact", **given).check()
            exact.append(tokenizer)
        except ConfigError:
            TurnRenderer(tokenizer, template="incremental", **given).check()
            incremental.append(tokenizer)
    assert (len(exact), len(incremental)) == (36, 30)
