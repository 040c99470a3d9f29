"""Tokenizers with the chat templates of model families, written for these tests (templates/), and servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlcore.config.schema import ModelConfig
from rlcore.data.chat import load_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin|>", "<|python_tag|>"],
    "markers": ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"],
    "mistral": ["</s>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def family_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tiny model's tokenizer with a family's special tokens and template; `tiny`: as it is shipped.

    `markers`: ChatML, with special tokens around calls and reasoning too.
    """
    tokenizer = load_tokenizer(ModelConfig())
    if name == "tiny":
        return tokenizer
    if name == "mistral":
        tokenizer = metaspace_tokenizer()
    else:
        special = SPECIAL.get(name, SPECIAL["chatml"])
        tokenizer.add_special_tokens({"additional_special_tokens": special})
        tokenizer.eos_token = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
        tokenizer.bos_token = "<|begin|>" if name == "llama3" else None
    template = (TEMPLATES / f"{'chatml' if name == 'markers' else name}.jinja").read_text()
    tokenizer.chat_template = template + "{# <think> #}" * (name == "markers")
    return tokenizer


def metaspace_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer that, like Mistral's, writes a space before the start of a text, and drops it when decoding."""
    model = Tokenizer(models.BPE(unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    model.decoder = decoders.Metaspace(prepend_scheme="first")
    characters = [chr(code) for code in range(33, 127)] + ["\n", "▁"]
    special = ["<unk>", *SPECIAL["mistral"]]
    trainer = trainers.BpeTrainer(
        special_tokens=special, initial_alphabet=characters, vocab_size=200, show_progress=False
    )
    model.train_from_iterator(
        ["What is one plus two? And plus three? Let me add: result one, two. 3 3 6 6\n\n"] * 5, trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[[str], Any]:
    return family_tokenizer


@pytest.fixture
def add_schema() -> dict[str, Any]:
    return ADD


# ---- servers ----


class Serving:
    """A server over the tiny model, whose engine decodes in a thread of its own."""

    def __init__(
        self, engine: Any, *, config: ModelConfig, env: dict[str, Any] | None = None, limits: Any, **options: Any
    ):
        from rlcore.config.environment import EnvConfig
        from rlcore.data.chat import OfferedTools
        from rlcore.engine.rollout import Sampling
        from rlcore.episodes.call_queue import CallQueue
        from rlcore.episodes.server import Server, ServerOptions
        from rlcore.episodes.sessions import Limits, Renderers
        from rlcore.episodes.setup import EpisodeSetup
        from rlcore.episodes.tool_calls import FORMATS

        keys = EnvConfig(**(env or {}))
        setup = EpisodeSetup(keys, config, None, (), FORMATS["hermes"], OfferedTools(), play=None)
        self.engine, self.calls = engine, CallQueue(engine)
        sampling = Sampling(**{"max_tokens": 120, "seed": 3, **limits.pop("sampling", {})})
        given = Limits(**{"sampling": sampling, "prompt_len": 1000, "fixed": False, **limits})
        self.server = Server(ServerOptions(**{"model": "tiny", **options}), self.calls, Renderers(setup), given, seed=3)
        self.failure: BaseException | None = None
        self.clients: list[Any] = []

    def __enter__(self) -> Serving:
        self.server.start()
        self.thread = threading.Thread(target=self._decode)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for client in self.clients:
            client.close()
        self.server.close()
        self.thread.join(30)
        assert not self.engine.in_flight
        assert self.failure is None

    def _decode(self) -> None:
        from rlcore.episodes.source import answer_requests

        try:
            answer_requests(self.engine, self.calls)
        except BaseException as error:
            self.failure = error

    @property
    def url(self) -> str:
        return self.server.url

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def session(self, **body: Any) -> str:
        return str(self.post("/sessions", body).json()["session_id"])

    def rows(self, session: str) -> list[dict[str, Any]]:
        return list(self.get(f"/sessions/{session}").json()["rows"])

    def base(self, session: str = "") -> str:
        return f"{self.url}/sessions/{session}/v1" if session else f"{self.url}/v1"

    def client(self, session: str = "", **options: Any) -> Any:
        import openai

        client = openai.OpenAI(base_url=self.base(session), api_key="none", max_retries=0, timeout=60, **options)
        self.clients.append(client)
        return client


@pytest.fixture(scope="session")
def tiny_engine() -> Iterator[Any]:
    """The rollout engine hf with the tiny model, on one thread's worth of rows."""
    from rlcore.engines.hf.rollout import HFRollout

    engine = HFRollout(ModelConfig(), batch_size=32, device=torch.device("cpu"), shared=None)
    engine.version = 0
    yield engine
    engine.close()


@pytest.fixture
def serving(tiny_engine: Any) -> Iterator[Callable[..., Serving]]:
    """A function that starts a server; keywords are those of ServerOptions, `limits`, `env` and `config`."""
    with ExitStack() as stack:
        yield lambda limits=None, config=None, **options: stack.enter_context(
            Serving(tiny_engine, config=config or ModelConfig(), limits=limits or {}, **options)
        )
    tiny_engine.forget(list(tiny_engine._kept))  # the next user of the engine finds it as it was
