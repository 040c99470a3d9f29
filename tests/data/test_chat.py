from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rlcore.config.schema import ModelConfig
from rlcore.data.chat import PromptEncoder, check_model_folder, load_tokenizer
from rlcore.data.template_kwargs import check_template_kwargs
from rlcore.end_tokens import find_end_tokens
from rlcore.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EditJson = Callable[..., None]


def test_a_string_is_a_user_message(tokenizer: PreTrainedTokenizerBase) -> None:
    encoder = PromptEncoder(tokenizer, "Calculate.")
    chat = encoder.render("1+2=")
    assert chat == "<|system|>Calculate.<|end|><|user|>1+2=<|end|><|assistant|>"
    token_ids = encoder.token_ids([chat])[0]
    assert len(token_ids) == 2 + len("Calculate.") + 2 + len("1+2=") + 1
    assert tokenizer.decode(token_ids) == chat


def test_messages_stay_as_they_are(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "?"},
    ]
    expected = "<|user|>hi<|end|><|assistant|>ho<|end|><|user|>?<|end|><|assistant|>"
    assert PromptEncoder(tokenizer, "not added").render(messages) == expected


def test_a_last_message_of_the_assistant_is_continued(tokenizer: PreTrainedTokenizerBase) -> None:
    begun = [{"role": "user", "content": "3+4="}, {"role": "assistant", "content": "The sum is "}]
    rendered = PromptEncoder(tokenizer).render(begun)
    assert rendered == "<|user|>3+4=<|end|><|assistant|>The sum is "
    assert rendered == tokenizer.apply_chat_template(begun, tokenize=False, continue_final_message=True)


def test_a_rendered_prompt_is_what_the_model_reads(tokenizer: PreTrainedTokenizerBase) -> None:
    encoder = PromptEncoder(tokenizer, "not added", rendered=True)
    assert encoder.render("<|user|>hi<|end|><|assistant|>") == "<|user|>hi<|end|><|assistant|>"
    assert encoder.render([{"role": "user", "content": "hi"}]) == "<|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize("prompt", [3, [], ["text"], [{"role": "user"}], {"role": "user", "content": "x"}])
def test_neither_string_nor_messages(tokenizer: PreTrainedTokenizerBase, prompt: object) -> None:
    with pytest.raises(DataError, match="a prompt is a string, or a list of messages"):
        PromptEncoder(tokenizer).render(prompt)  # type: ignore[arg-type]


def test_the_template_refuses_a_role(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"template cannot render .*TemplateError in line \d+: unknown role tool"):
        PromptEncoder(tokenizer).render([{"role": "tool", "content": "x"}])


def test_the_folder_itself_is_checked_first(tmp_path: Path, model_folder: Path, edit_json: EditJson) -> None:
    with pytest.raises(ConfigError, match=r"model\.path=.*absent does not exist; .* or a name on the hub as ORG/NAME"):
        check_model_folder(ModelConfig(str(tmp_path / "absent")))
    with pytest.raises(ConfigError, match="is a file"):
        check_model_folder(ModelConfig(str(model_folder / "config.json")))
    assert check_model_folder(ModelConfig(str(model_folder))) == model_folder
    (model_folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        check_model_folder(ModelConfig(str(model_folder)))
    (model_folder / "config.json").unlink()
    (model_folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no config\.json.*is an adapter"):
        check_model_folder(ModelConfig(str(model_folder)))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "architecture LlamaForSequenceClassification"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"model_type": "unheard_of", "architectures": None}, "model_type 'unheard_of'"),
    ],
)
def test_not_a_causal_language_model(
    model_folder: Path, edit_json: EditJson, changes: dict[str, object], found: str
) -> None:
    edit_json(model_folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=f"is not a causal language model.*{found}"):
        check_model_folder(ModelConfig(str(model_folder)))


def test_remote_code_has_to_be_allowed(model_folder: Path, edit_json: EditJson) -> None:
    edit_json(
        model_folder / "config.json",
        model_type="own",
        architectures=["OwnForCausalLM"],
        auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    )
    with pytest.raises(ConfigError, match=r"its model needs Python code.*set model\.trust_remote_code=true"):
        check_model_folder(ModelConfig(str(model_folder)))
    assert check_model_folder(ModelConfig(str(model_folder), trust_remote_code=True)) == model_folder


def test_remote_code_of_the_tokenizer(model_folder: Path, edit_json: EditJson) -> None:
    edit_json(model_folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_own.Own", None]})
    with pytest.raises(ConfigError, match="its tokenizer needs Python code"):
        load_tokenizer(ModelConfig(str(model_folder)))


def test_no_chat_template(model_folder: Path, tmp_path: Path) -> None:
    (model_folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"no chat template\. Set model\.chat_template=FILE"):
        load_tokenizer(ModelConfig(str(model_folder)))
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}Q: {{ m['content'] }}\nA: {% endfor %}")
    tokenizer = load_tokenizer(ModelConfig(str(model_folder), chat_template=str(template)))
    assert PromptEncoder(tokenizer).render("1+1=") == "Q: 1+1=\nA: "


def test_bad_chat_template_files(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template=.*there is no such file"):
        load_tokenizer(ModelConfig(str(model_folder), chat_template=str(tmp_path / "absent")))
    template = tmp_path / "template.jinja"
    template.write_text("Q\n{% for m in messages %}")
    with pytest.raises(ConfigError, match=r"template\.jinja: the chat template cannot .*TemplateSyntaxError in line 2"):
        load_tokenizer(ModelConfig(str(model_folder), chat_template=str(template)))


THINKS = (
    "{% set thinks = enable_thinking if enable_thinking is defined else true %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if effort is defined %}{{ effort }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' if thinks else '<|assistant|><think></think>' }}{% endif %}"
)


@pytest.fixture
def thinks(tmp_path: Path) -> str:
    (tmp_path / "thinks.jinja").write_text(THINKS)
    return str(tmp_path / "thinks.jinja")


def test_arguments_of_the_config_reach_the_template(thinks: str, tokenizer: PreTrainedTokenizerBase) -> None:
    asked = [{"role": "user", "content": "1+1="}]

    def want(**given: object) -> str:
        options = {"chat_template": THINKS, "tokenize": False, "add_generation_prompt": True}
        return str(tokenizer.apply_chat_template(asked, **options, **given))

    model = ModelConfig(chat_template=thinks, chat_template_kwargs={"enable_thinking": False})
    encoder = PromptEncoder(load_tokenizer(model))
    assert encoder.render("1+1=") == want(enable_thinking=False) != want()
    assert encoder.render("1+1=", (), {"enable_thinking": True}) == want(enable_thinking=True) == want()
    assert encoder.render("1+1=", (), {"effort": 3}) == want(enable_thinking=False, effort=3)
    assert PromptEncoder(load_tokenizer(replace(model, chat_template_kwargs={}))).render("1+1=") == want()


def test_arguments_and_the_date_reach_the_template_together(tmp_path: Path) -> None:
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%Y') }}{{ place }}{{ messages[0].content }}")
    given = ModelConfig(
        chat_template=str(tmp_path / "dated.jinja"), date="2001-02-03", chat_template_kwargs={"place": "X"}
    )
    assert PromptEncoder(load_tokenizer(given)).render("1") == "2001X1"


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (
            {"enable_thinkin": False},
            r"has 'enable_thinkin': the chat template never reads it; it reads effort, "
            r"enable_thinking\. Leave it out\. Did you mean 'enable_thinking'\?",
        ),
        ({"effort": 1, "thinks": False}, "has 'thinks': the chat template never reads it"),  # it sets it itself
        ({"messages": []}, "has 'messages': rlcore sets this name itself; it reads effort, enable_thinking"),
        ({"tools": []}, "has 'tools': rlcore sets"),
        ({"add_generation_prompt": True}, "has 'add_generation_prompt': rlcore sets"),
        ({"chat_template": "x"}, "has 'chat_template': rlcore sets"),
        ({"tokenize": True}, "has 'tokenize': rlcore sets"),
        ({"bos_token": "x"}, "has 'bos_token': rlcore sets"),
    ],
)
def test_arguments_that_the_template_does_not_read(thinks: str, given: dict[str, object], fault: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.chat_template={thinks}: model\.chat_template_kwargs {fault}"):
        load_tokenizer(ModelConfig(chat_template=thinks, chat_template_kwargs=given))


def test_arguments_for_a_template_without_any_and_for_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 'x': the chat template never reads it; it reads no arguments"):
        load_tokenizer(ModelConfig(chat_template_kwargs={"x": 1}))
    (tmp_path / "broken.jinja").write_text("{{ messages[0].content }}\n{% if %}")
    with pytest.raises(ConfigError, match="the chat template has a syntax error in line 2"):
        load_tokenizer(ModelConfig(chat_template=str(tmp_path / "broken.jinja"), chat_template_kwargs={"x": 1}))


def test_what_a_template_reads(tokenizer: PreTrainedTokenizerBase) -> None:
    """`c` is its own, and set before it is read; `range` and `namespace` are Jinja's."""
    both = copy.deepcopy(tokenizer)
    both.chat_template = {
        "default": "{% if not a is defined %}{% set a = 1 %}{% endif %}{{ a }}{{ eos_token }}{{ namespace(x=1).x }}",
        "tool_use": "{% set b = b | default(2) %}{% if tools %}{% set c = b %}{% endif %}{{ c, range(b) }}",
    }
    check_template_kwargs(both, {"a": 1, "b": 2}, "they")
    for name in ("c", "range", "x"):
        with pytest.raises(
            ConfigError, match=rf"^they has '{name}': the chat template never reads it; it reads a, b\. "
        ):
            check_template_kwargs(both, {"a": 1, name: 2}, "they")


def test_a_turn_may_end_by_an_argument(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "ends.jinja").write_text(
        "{% for m in messages %}{{ m.content + end | default('<|end|>') }}{% endfor %}"
    )
    model = ModelConfig(chat_template=str(tmp_path / "ends.jinja"), chat_template_kwargs={"end": "<|reserved_5|>"})
    found = find_end_tokens(model, load_tokenizer(model))
    assert found.answer == tokenizer.convert_tokens_to_ids("<|reserved_5|>")
    plain = replace(model, chat_template_kwargs={})
    assert find_end_tokens(plain, load_tokenizer(plain)).answer == tokenizer.eos_token_id


def test_no_end_of_text_token(model_folder: Path, edit_json: EditJson) -> None:
    edit_json(model_folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ConfigError, match=r'no end-of-text token.*Set "eos_token" in .*tokenizer_config\.json'):
        load_tokenizer(ModelConfig(str(model_folder)))


def test_the_pad_token_may_come_from_the_models_config(model_folder: Path, edit_json: EditJson) -> None:
    edit_json(model_folder / "tokenizer_config.json", pad_token=None)
    assert load_tokenizer(ModelConfig(str(model_folder))).pad_token == "<|pad|>"
    for unsafe in (None, 1, 320):  # not named, the end-of-text token, outside the vocabulary
        edit_json(model_folder / "config.json", pad_token_id=unsafe)
        with pytest.raises(ConfigError, match=r'no pad token.*Set "pad_token" in .*tokenizer_config\.json'):
            load_tokenizer(ModelConfig(str(model_folder)))


def test_a_token_outside_the_models_vocabulary(model_folder: Path, edit_json: EditJson) -> None:
    edit_json(model_folder / "tokenizer_config.json", eos_token="<|new|>")
    with pytest.raises(ConfigError, match=r"eos_token '<\|new\|>' is not one of the model's 320 tokens"):
        load_tokenizer(ModelConfig(str(model_folder)))


def test_no_tokenizer_and_a_broken_one(model_folder: Path) -> None:
    (model_folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(ModelConfig(str(model_folder)))
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (model_folder / name).unlink()
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        load_tokenizer(ModelConfig(str(model_folder)))
