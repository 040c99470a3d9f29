"""The tokens that end a response, and responses of a data set with them. Under 2 s."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.schema import ModelConfig
from rlcore.data.chat import ResponseEncoder, load_tokenizer
from rlcore.end_tokens import end_tokens, find_end_tokens
from rlcore.engine import ends_with_stop
from rlcore.protocol import DataProto

EditJson = Callable[..., None]
END, RESERVED = 1, 11  # <|end|> and <|reserved_5|>


def ends_of(folder: Path, **options: Any) -> Any:
    model = ModelConfig(str(folder), **options)
    return find_end_tokens(model, load_tokenizer(model))


def phi(folder: Path) -> None:
    """Let the template end a turn with another token than the tokenizer's end-of-text token, as Phi's does."""
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace("'<|end|>'", "'<|reserved_5|>'"))


def test_the_shipped_model_names_one_token_everywhere() -> None:
    tokenizer = load_tokenizer(ModelConfig())
    found = find_end_tokens(ModelConfig(), tokenizer)
    assert (found.ids, found.answer, found.disagreement(tokenizer)) == ([END], END, None)


def test_all_places_count(model_folder: Path, edit_json: EditJson) -> None:
    edit_json(model_folder / "generation_config.json", eos_token_id=[63, 64])
    edit_json(model_folder / "config.json", eos_token_id=[65, 320, 151_643])  # it has 320 tokens
    phi(model_folder)
    found = ends_of(model_folder)
    assert found.places == {
        "the chat template": (RESERVED,),
        "the tokenizer": (END,),
        "generation_config.json": (63, 64),
        "config.json": (65,),
    }
    assert (found.ids, found.answer) == ([RESERVED, END, 63, 64, 65], RESERVED)
    model = ModelConfig(str(model_folder))
    tokenizer = load_tokenizer(model)
    assert end_tokens(model, tokenizer) == found.ids
    line = found.disagreement(tokenizer)
    assert line.startswith("end tokens: the chat template names '<|reserved_5|>', the tokenizer names '<|end|>', gener")
    assert line.endswith("responses end at any of them, and those of a data set get '<|reserved_5|>'")


def test_a_place_that_names_none_is_left_out(model_folder: Path, edit_json: EditJson) -> None:
    """The class of the config has a default for the end token, which the folder does not name."""
    (model_folder / "generation_config.json").unlink()
    edit_json(model_folder / "config.json", eos_token_id=None)
    assert list(ends_of(model_folder).places) == ["the chat template", "the tokenizer"]


def test_a_tokenizer_with_several_templates_uses_its_default(model_folder: Path) -> None:
    model = ModelConfig(str(model_folder))
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ messages }}"}
    assert find_end_tokens(model, tokenizer).places["the chat template"] == (END,)


def test_an_end_token_that_is_ordinary_text_ends_no_written_response(model_folder: Path, edit_json: EditJson) -> None:
    tokenizer = load_tokenizer(ModelConfig())
    seven = tokenizer.convert_tokens_to_ids("7")
    edit_json(model_folder / "generation_config.json", eos_token_id=[seven])
    assert encode(["17"], ModelConfig(str(model_folder))) == [["1", "7", "<|end|>"]]


def test_a_template_of_the_config_counts_in_place_of_the_folders(model_folder: Path, tmp_path: Path) -> None:
    phi(model_folder)
    plain = tmp_path / "plain.jinja"
    plain.write_text("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}")
    found = ends_of(model_folder, chat_template=str(plain))
    assert "the chat template" not in found.places  # a line's end is text
    assert found.answer == END


def encode(texts: list[str], model: ModelConfig | None = None, **options: Any) -> list[list[str]]:
    model = model or ModelConfig()
    tokenizer = load_tokenizer(model)
    encoder = ResponseEncoder(tokenizer, 16, find_end_tokens(model, tokenizer), **options)
    rows = encoder.encode(DataProto.from_dict({}, {"t": texts}), "t")["responses"].to_list()
    return [tokenizer.convert_ids_to_tokens(row.tolist()) for row in rows]


def test_a_response_has_one_end_token_and_its_text_is_text() -> None:
    assert encode(["7<|end|>\n"]) == [["7", "<|end|>"]], "as templates of Qwen write it"
    assert encode(["7\n"]) == [["7", "Ċ", "<|end|>"]]
    rows = encode(["7", "7<|end|>", "a<|end|>b", "<|end|>", "", "7<|end|><|end|>"])
    assert rows[0] == rows[1] == ["7", "<|end|>"]
    assert rows[2] == [*"a<|end|>b", "<|end|>"]
    assert rows[3] == rows[4] == ["<|end|>"]
    assert rows[5] == [*"7<|end|>", "<|end|>"]


def test_a_rendered_column_has_special_tokens() -> None:
    assert encode(["7<|end|>\n"], rendered=["t"]) == [["7", "<|end|>"]]
    rows = encode(["7", "7<|end|>", "a<|end|>b", "7<|end|><|user|>"], rendered=["t"])
    assert rows[0] == rows[1] == ["7", "<|end|>"]
    assert rows[2] == ["a", "<|end|>", "b", "<|end|>"]
    assert rows[3] == ["7", "<|end|>", "<|user|>", "<|end|>"]


def test_a_response_gets_the_end_that_the_template_writes_or_keeps_its_own(model_folder: Path) -> None:
    phi(model_folder)
    rows = encode(["7", "7<|end|>", "7<|reserved_5|>"], ModelConfig(str(model_folder)))
    assert rows == [["7", "<|reserved_5|>"], ["7", "<|end|>"], ["7", "<|reserved_5|>"]]


@pytest.mark.parametrize(
    ("tokens", "stop", "stops"),
    [
        (["7", "<|reserved_5|>"], ("<|reserved_5|>",), True),
        (["<|reserved_5|>", "Ċ"], ("<|reserved_5|>\n",), True),
        (["<|reserved_5|>", "7"], ("<|reserved_5|>\n",), False),
        (["7", "<|reserved_5|>", "b"], ("7b",), True),
        (["<|reserved_5|>"], ("x", "<|reserved_4|>"), False),
        (["a", "b"], ("ab",), True),
        (["a", "<|reserved_5|>", "b"], ("a<",), False),
        (["7", "<|reserved_5|>"], (), False),
    ],
)
def test_a_stop_text_that_is_a_special_token_stops(tokens: list[str], stop: tuple[str, ...], stops: bool) -> None:
    tokenizer = load_tokenizer(ModelConfig())
    assert ends_with_stop(tokenizer.convert_tokens_to_ids(tokens), stop, tokenizer) is stops
