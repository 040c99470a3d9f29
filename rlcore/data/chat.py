"""Encoding of prompts with the model's own tokenizer and chat template, and checks of model folders before a run."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.adapter_folder import is_adapter
from rlcore.config.schema import ModelConfig
from rlcore.data.template_kwargs import check_template_kwargs
from rlcore.end_tokens import EndTokens, special_tokens
from rlcore.errors import ConfigError, DataError
from rlcore.hub import is_pinned, split_name
from rlcore.model_folder import model_path, read_tokenizer
from rlcore.plain_text import PlainText
from rlcore.plugins import Role, RoleKind
from rlcore.protocol import DataProto, Ragged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")

Messages = list[dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]


def check_role_folder(setting: str, role: Role, model: ModelConfig) -> None:
    """Raise ConfigError when a role's own folder (`role.model`) does not fit the role; loads no weights.

    A policy needs a causal language model. A frozen critic or reward model needs a sequence-classification model with
    one label; one that trains, or follows another role, takes either. All roles but a frozen reward model read the
    actor's token ids, so they need its vocabulary. `setting`, such as `reward.model=`, starts each message.
    """
    assert role.model is not None
    theirs = replace(model, path=role.model)
    is_language_model = role.kind.is_language_model
    takes_causal = is_language_model or role.may_start_headless
    wanted = ["causal language model"] if takes_causal else []
    wanted += [] if is_language_model else ["sequence-classification model with one label"]
    folder = _existing_folder(theirs, setting, ", or of a ".join(wanted))
    settings = _read_json(folder / "config.json", theirs.path)
    architectures: list[str] = settings.get("architectures") or []
    if not is_language_model and any("ForSequenceClassification" in each for each in architectures):
        _check_one_label(settings, f"{setting}{role.model}", role.kind)
    elif takes_causal:
        _check_causal(settings, theirs, setting)
    else:
        raise ConfigError(
            f"{setting}{role.model} is not a trained {role.kind}: its config.json names the architecture "
            f"{', '.join(architectures) or 'nothing'}; give a folder saved as AutoModelForSequenceClassification "
            "with one label (docs/roles.md says which algorithm trains one)"
        )
    same = same_tokenizer(theirs, model, setting)  # also for a role that reads texts, which needs some tokenizer
    if not same and (role.trains or not role.kind.reads_text):
        raise ConfigError(
            f"{setting}{theirs.path}: this role reads the actor's token ids, but its tokenizer differs from that of "
            f"model.path={model.path}; give it a model with the same tokenizer"
        )


def _check_one_label(settings: dict[str, Any], shown: str, kind: RoleKind) -> None:
    default = 2  # transformers leaves its default out of config.json
    labels = len(settings.get("id2label") or range(settings.get("num_labels", default)))
    if labels != 1:
        raise ConfigError(
            f"{shown} has {labels} labels; a {kind} needs a model with exactly one, whose logit is the score: "
            "save it with num_labels=1"
        )


def same_tokenizer(one: ModelConfig, other: ModelConfig, setting: str = "model.path=") -> bool:
    """Return whether two model folders' tokenizers give every token the same id; `setting` named the first folder."""
    if one.path == other.path or model_path(one.path, "tokenizer") == model_path(other.path, "tokenizer"):
        return True
    return load_any_tokenizer(one, setting).get_vocab() == load_any_tokenizer(other).get_vocab()


def load_any_tokenizer(model: ModelConfig, setting: str = "model.path=") -> PreTrainedTokenizerBase:
    """Return a model folder's tokenizer unchanged; ConfigError when it is missing or does not load.

    `setting`, which named the folder, starts the message.
    """
    folder = model_path(model.path, "tokenizer")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"{setting}{model.path} holds no tokenizer; looked for {', '.join(TOKENIZER_FILES)}")
    try:
        return read_tokenizer(model)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"{setting}{model.path}: its tokenizer cannot be loaded: {error}") from error


def check_model_folder(model: ModelConfig) -> Path:
    """Return the model's folder after checking its config.json; loads no weights.

    Raises ConfigError when the folder, its config or its weights are missing, when it holds something other than a
    causal language model, and when it needs `model.trust_remote_code`.
    """
    folder = _existing_folder(model, "model.path=", "causal language model, or `tiny`")
    _check_causal(_read_json(folder / "config.json", model.path), model, "model.path=")
    return folder


def _existing_folder(model: ModelConfig, setting: str, wanted: str) -> Path:
    """Return the folder; ConfigError when its config or weights are missing, and for quantised weights."""
    folder = model_path(model.path, "tokenizer")
    if not folder.is_dir():
        fault = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(
            f"{setting}{model.path} {fault}; give the folder of a Hugging Face {wanted}, or a name on the hub as "
            f"ORG/NAME.{_why_not_asked(model.path)}"
        )
    if not (folder / "config.json").is_file():
        hint = ""
        if is_adapter(folder):
            hint = f" It is an adapter: give its base model here, and model.lora.path={model.path}"
        if any(folder.glob("*.gguf")):
            hint = " It holds GGUF files: give the model that they were made from, in safetensors."
        raise ConfigError(f"{setting}{model.path} has no config.json, so it is not a Hugging Face model folder.{hint}")
    # The weights of a name on the hub are fetched later, and the list of its files is checked already.
    if not is_pinned(model.path) and not any((folder / name).is_file() for name in WEIGHT_FILES):
        raise ConfigError(f"{setting}{model.path} holds no weights; looked for {', '.join(WEIGHT_FILES)}")
    settings = _read_json(folder / "config.json", model.path)
    if quantised := settings.get("quantization_config") or settings.get("compression_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise ConfigError(
            f"{setting}{model.path} holds quantised weights (quantization_config: {method}), which rlcore neither "
            "trains nor samples with; give the folder of the model in bf16, fp16 or fp32"
        )
    return folder


def _why_not_asked(path: str) -> str:
    """Return a sentence on why a path that does not exist was not looked up on the hub; "" where it is plain."""
    if path.endswith(".gguf"):
        return " Of a GGUF file, give the model that it was made from, in safetensors."
    if split_name(path) is not None:
        return ' Only keys declared with option(..., hub="model") are looked up there.'
    if not path.startswith(("/", ".", "~")) and path.count("/") == 1:
        first = path.partition("/")[0]
        return f" The hub was not asked, as {first}/ is a folder here; `hf download {path} --local-dir {path}` fills it"
    return ""


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model's folder; `model.chat_template`, if set, replaces its chat template.

    Where the tokenizer names no pad token, the one of the model's config.json is used, unless it is also the
    end-of-text token. Raises ConfigError when the tokenizer, the chat template, the end-of-text token or the pad token
    is missing, and when `model.trust_remote_code` is needed but not set.
    """
    folder = check_model_folder(model)
    if (folder / "tokenizer_config.json").is_file():
        settings = _read_json(folder / "tokenizer_config.json", model.path)
        if "AutoTokenizer" in settings.get("auto_map", {}) and not model.trust_remote_code:
            raise ConfigError(_remote_code(model, "tokenizer"))
    tokenizer = load_any_tokenizer(model)
    if model.chat_template is not None:
        tokenizer.chat_template = _read_template(model.chat_template)
    _check_tokens(tokenizer, folder, model)
    _check_template(tokenizer, model)
    return tokenizer


@dataclass(frozen=True)
class OfferedTools:
    """The tools that a prompt offers: `schemas` (OpenAI function JSON) for the chat template, as its `tools`.

    `instructions`: a text about them, added to the system message, for a template that ignores `tools`; else "".
    """

    schemas: Tools = ()
    instructions: str = ""


NO_TOOLS = OfferedTools()


@dataclass(frozen=True)
class PromptEncoder:
    """Turns prompts into text and token ids: a string becomes a user message, a list of messages stays as it is.

    `system_prompt`, if set, precedes every string prompt. `rendered`: a string prompt is the model's input already, and
    special tokens in it, and in the assistant's messages of other prompts, are tokens. Elsewhere only the chat template
    writes special tokens: those that a message, a tool's schema or a row's template argument spells out are text.
    """

    tokenizer: PreTrainedTokenizerBase
    system_prompt: str | None = None
    tools: OfferedTools = NO_TOOLS
    rendered: bool = False

    @cached_property
    def plain(self) -> PlainText:
        """What marks the special tokens that prompts spell out."""
        return PlainText(self.tokenizer)

    def render(
        self, prompt: str | Messages, tools: Tools = (), template_kwargs: Mapping[str, Any] | None = None
    ) -> str:
        """Return the prompt as the model reads it, up to the start of the answer.

        Special tokens that the prompt spells out are marked in it: `token_ids` takes it so, and `plain.text` gives it
        without marks. A last message of the assistant is the answer's beginning, which the model continues. `tools`:
        those of the prompt's own row, besides the encoder's. `template_kwargs`: the row's arguments for the chat
        template, which override `model.chat_template_kwargs`. Raises DataError for a prompt that is neither a string
        nor messages, or on which the chat template fails.
        """
        if self.rendered and isinstance(prompt, str):
            return prompt
        messages = self.messages(prompt)
        continues = messages[-1]["role"] == "assistant"
        answers = [message for message in messages if message["role"] == "assistant"]
        try:
            return self.plain.render(
                self.tokenizer.apply_chat_template,
                messages,
                sampled=answers if self.rendered else (),
                tools=[*self.tools.schemas, *tools] or None,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                tokenize=False,
                **(template_kwargs or {}),
            )
        except DataError as error:
            if not answers or self.rendered:
                raise
            raise DataError(
                f"{error}. Where it is the assistant's, name the prompts' column in data.rendered: special tokens in "
                "the assistant's messages are tokens then"
            ) from error
        except Exception as error:  # a template may raise any
            # transformers raises ValueError where the template changes the text that is to be continued.
            does = "continue the last message of" if continues and isinstance(error, ValueError) else "render"
            hint = " Does it allow a system message? data.system_prompt adds one." if self.system_prompt else ""
            cause = f"{type(error).__name__}{_template_line(error)}: {error}"
            raise DataError(f"the chat template cannot {does} {str(messages)[:300]}: {cause}.{hint}") from error

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of what `render` returned. Adds no special tokens: the template has written them."""
        return self.plain.token_ids(texts)

    def messages(self, prompt: str | Messages) -> Messages:
        """Return the prompt as chat messages, with the system prompt and the tools' instructions."""
        given = self._given(prompt)
        if not self.tools.instructions:
            return given
        if given[0]["role"] != "system":
            return [{"role": "system", "content": self.tools.instructions}, *given]
        return [{**given[0], "content": f"{given[0]['content']}\n\n{self.tools.instructions}"}, *given[1:]]

    def _given(self, prompt: str | Messages) -> Messages:
        if isinstance(prompt, str):
            system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
            return [*system, {"role": "user", "content": prompt}]
        if not isinstance(prompt, list) or not prompt or not all(_is_message(message) for message in prompt):
            raise DataError(
                "a prompt is a string, or a list of messages with string `role` and `content`, "
                f"got {type(prompt).__name__}: {str(prompt)[:200]}"
            )
        return prompt


@dataclass(frozen=True)
class ResponseEncoder:
    """Turns a data set's responses into token ids, as if the policy had sampled them.

    Each response ends with one end token of the model, and is then cut to `max_tokens` tokens. Its text is text: only
    an end token at its very end is a token. In the columns `rendered` all special tokens are tokens.
    """

    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    ends: EndTokens
    rendered: Sequence[str] = ()

    def encode(self, batch: DataProto, column: str) -> DataProto:
        """Return the texts of an object column as `responses` and `response_mask` (all 1), both ragged int64.

        Raises DataError, naming the row, for a value that is not text.
        """
        import torch

        texts = batch.non_tensor_batch[column].tolist()
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                which = batch.view("uid")[row] if "uid" in batch else row
                raise DataError(
                    f"row {which}: column {column!r} holds {text!r:.80}, not the text of a response; "
                    "every row of the data set needs one"
                )
        # A response that is cut has no end token, as one that sampling cuts.
        rows = [
            torch.tensor(row[: self.max_tokens], dtype=torch.int64)
            for row in self._token_ids(texts, column in self.rendered)
        ]
        responses = Ragged.from_list(rows, dtype=torch.int64)
        mask = responses.with_values(torch.ones_like(responses.values))
        return DataProto.from_dict({"responses": responses, "response_mask": mask})

    def _token_ids(self, texts: Sequence[str], rendered: bool) -> list[list[int]]:
        """Return the token ids of the texts, each with an end token."""
        if not texts:
            return []
        special = special_tokens(self.tokenizer)
        written = {special[end]: end for end in self.ends.ids if end in special}
        ending = [next((end for end in written if text.rstrip().endswith(end)), "") for text in texts]
        # Templates write white space behind an end token, which sampling never reaches.
        plain = [text.rstrip().removesuffix(end) if end else text for text, end in zip(texts, ending, strict=True)]
        ids = self.tokenizer(plain, add_special_tokens=False, split_special_tokens=not rendered)["input_ids"]
        check_tokens(self.ends.vocab_size, self.tokenizer, (max(row, default=0) for row in ids), "responses")
        return [[*row, written.get(end, self.ends.answer)] for row, end in zip(ids, ending, strict=True)]


def check_tokens(size: int, tokenizer: PreTrainedTokenizerBase, ids: Iterable[int], where: str) -> None:
    """Raise DataError for an id that a model of `size` tokens does not have; `where`: "prompts" or "responses"."""
    if (largest := max(ids, default=0)) >= size:
        raise DataError(
            f"the {where} hold the token {tokenizer.convert_ids_to_tokens(largest)!r} with id {largest}, but the model "
            f"has {size} tokens (vocab_size): tokens were added to the tokenizer. Resize the model to them "
            "(resize_token_embeddings) and save it, or take its own tokenizer and chat template"
        )


def _template_line(error: Exception) -> str:
    """Return ` in line N` for the line of a template that raised an error; "" where none did."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    line = lines[-1] if lines else getattr(error, "lineno", None)  # a syntax error has its own
    return "" if line is None else f" in line {line}"


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _read_json(path: Path, shown: str) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.path={shown}: {path.name} is not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"model.path={shown}: {path.name} must hold a JSON object")
    return settings


def _check_causal(settings: dict[str, Any], model: ModelConfig, setting: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    kind, architectures = settings.get("model_type"), settings.get("architectures") or []
    remote = settings.get("auto_map", {})
    if kind not in CAUSAL and "AutoModelForCausalLM" in remote:
        if not model.trust_remote_code:
            raise ConfigError(_remote_code(model, "model"))
        return
    known: set[str] = set()
    for names in CAUSAL.values():  # a class's name, or several
        known.update([names] if isinstance(names, str) else names)
    if kind in CAUSAL and (not architectures or known.intersection(architectures)):
        return
    found = f"architecture {', '.join(architectures)}" if architectures else f"model_type {kind!r}"
    raise ConfigError(
        f"{setting}{model.path} is not a causal language model that this version of transformers knows: its "
        f"config.json says {found}. Give a model whose architecture is like Qwen2ForCausalLM, or update transformers."
    )


def _remote_code(model: ModelConfig, part: str) -> str:
    return (
        f"model.path={model.path}: its {part} needs Python code that comes with the folder, and "
        "model.trust_remote_code is false. Read that code, then set model.trust_remote_code=true."
    )


def _read_template(path: str) -> str:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"model.chat_template={path}: there is no such file; give a file with a Jinja chat template")
    return file.read_text(encoding="utf-8")


def _check_tokens(tokenizer: PreTrainedTokenizerBase, folder: Path, model: ModelConfig) -> None:
    remedy = f"in {folder / 'tokenizer_config.json'}"
    if is_pinned(model.path):
        repo = model.path.partition("@")[0]
        remedy = f"in the tokenizer_config.json of a folder of your own (`hf download {repo} --local-dir FOLDER`)"
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.path={model.path}: its tokenizer has no end-of-text token, so responses would never end. "
            f'Set "eos_token" {remedy} to the token that ends an answer.'
        )
    settings = _read_json(folder / "config.json", model.path)
    if tokenizer.pad_token_id is None:
        from_config = settings.get("pad_token_id")
        safe = isinstance(from_config, int) and 0 <= from_config < len(tokenizer)
        if not safe or from_config == tokenizer.eos_token_id:
            raise ConfigError(
                f"model.path={model.path}: its tokenizer has no pad token, and config.json names none besides the "
                f'end-of-text token. Set "pad_token" {remedy} to a token that never occurs in text.'
            )
        tokenizer.pad_token_id = from_config
    size = settings.get("vocab_size", len(tokenizer))
    for name in ("eos_token", "pad_token"):
        # transformers adds its tokenizer class's default token where the folder names none.
        if getattr(tokenizer, f"{name}_id") >= size:
            raise ConfigError(
                f"model.path={model.path}: the tokenizer's {name} {getattr(tokenizer, name)!r} is not one of the "
                f"model's {size} tokens. "
                f'Set "{name}" {remedy} to a token of the model.'
            )


def _check_template(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> None:
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model.path={model.path}: its tokenizer has no chat template. Set model.chat_template=FILE to a Jinja "
            "template, or use a model tuned for chat."
        )
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        names = ", ".join(sorted(tokenizer.chat_template))
        raise ConfigError(
            f"model.path={model.path}: its tokenizer has the chat templates {names} and none with the name default. "
            "Set model.chat_template=FILE to the one to use"
        )
    source = f"model.chat_template={model.chat_template}" if model.chat_template else f"model.path={model.path}"
    code = "\n".join(re.findall(r"\{[{%].*?[%}]\}", str(tokenizer.chat_template), re.DOTALL))
    if by_chance := re.search(r"\|\s*random\b|\blipsum\b", code):
        raise ConfigError(
            f"{source}: the chat template uses {by_chance.group()!r}, which differs at each rendering, so that no run "
            "could be resumed; take it out"
        )
    check_template_kwargs(tokenizer, model.chat_template_kwargs, f"{source}: model.chat_template_kwargs")
    try:
        PromptEncoder(tokenizer).render("Hello")
    except DataError as error:
        raise ConfigError(f"{source}: {error}") from error
