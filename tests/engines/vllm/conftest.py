"""Real vLLM on the CPU: `make test-vllm` runs these, in a venv of its own; where vLLM is absent they are skipped."""

import contextlib
import importlib.util
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcore.config import ModelConfig, compose
from rlcore.engine.rollout import Sampling
from rlcore.engines.vllm.config import VLLMConfig
from rlcore.plugins import PluginManager
from rlcore.protocol import DataProto, Ragged

HERE = Path(__file__).parent
WARNINGS = (
    "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning:vllm",
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning:torch",
)
"""What vLLM's own modules do, and have torch's do, when they are imported."""


def pytest_collection_modifyitems(items):
    absent = importlib.util.find_spec("vllm") is None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(300))  # vLLM starts slowly; a mark of the test's own goes first
            for warning in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
            if absent:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed; make test-vllm installs it"))


def make_model(folder: Path, family: str, *, tied: bool, kv_heads: int = 2) -> Path:
    """Write a random model whose heads have a size that vLLM supports, with the tiny model's tokenizer."""
    import transformers

    from rlcore.assets import TINY

    cls = {"qwen2": transformers.Qwen2Config, "llama": transformers.LlamaConfig}[family]
    config = cls(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(7)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in TINY.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder / file.name)
    return folder


def process_state() -> tuple:
    """Return what an engine has to leave as it is: the random states, and how many threads torch has."""
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()), torch.get_num_threads()


class Pair:
    """A vLLM engine, and transformers' own model with the weights that the engine was given last.

    `before` and `after` the engine was made: process_state.
    """

    def __init__(self, folder: Path, config: VLLMConfig, **options) -> None:
        from transformers import AutoModelForCausalLM

        from rlcore.engines.vllm.rollout import VLLMRollout

        self.folder = folder
        self.hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.before = process_state()
        model, device = ModelConfig(path=str(folder)), torch.device("cpu")
        self.rollout = VLLMRollout(model, config=config, device=device, **options)
        self.after = process_state()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.hf.named_parameters()}

    def draw(self, seed: int) -> None:
        """Give transformers' model other weights, all of them."""
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.weights().items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.1 * noise if "norm" in name else 0.1 * noise)

    def sync(self, version: int) -> None:
        weights = self.weights()
        self.rollout.sync(iter(weights.items()), version, {name: tuple(t.shape) for name, t in weights.items()})

    def log_probs(self, prompt: torch.Tensor, response: torch.Tensor, temperature: float) -> torch.Tensor:
        """Return fp32 [tokens, vocab]: the distribution of each token of the response, by transformers' model."""
        with torch.no_grad():
            logits = self.hf(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1)


def make_prompts(lengths: list[int], size: int, seed: int = 11) -> DataProto:
    """Return `size` rows of one random prompt of each length."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(5, 300, (length,), generator=generator) for length in lengths]
    return DataProto.from_single_dict(
        {
            "prompts": Ragged.from_list([prompt for prompt in made for _ in range(size)]),
            "uid": [f"0:{i}" for i in range(len(lengths)) for _ in range(size)],
            "sample_index": torch.arange(size).repeat(len(lengths)),
        }
    )


@pytest.fixture(scope="session", name="make_model")
def make_model_fixture():
    return make_model


@pytest.fixture(scope="session")
def prompts():
    return make_prompts


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory):
    """Make one pair after another: vLLM's engines share process groups, which go with the first that is closed."""
    with contextlib.ExitStack() as stack:

        def make(family: str, tied: bool, config: VLLMConfig | None = None, **options) -> Pair:
            stack.close()
            pair = Pair(
                make_model(tmp_path_factory.mktemp(family), family, tied=tied),
                config or VLLMConfig(memory=64),
                **options,
            )
            stack.callback(pair.rollout.close)
            return pair

        yield make


@pytest.fixture(name="process_state", scope="session")
def process_state_fixture():
    return process_state


@pytest.fixture(scope="session")
def greedy() -> Sampling:
    return Sampling(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="session")
def train_here():
    """Train from the quickstart, in this process or in the test session's Ray; return the summary and the metrics."""
    from rlcore.training.trainer import train

    def run(folder: Path, *overrides: str) -> tuple[dict, list[dict]]:
        plugins = PluginManager.load()
        settings = ["experiment=quickstart", "rollout=vllm", "rollout.vllm.memory=64", "tracker=none"]
        train(compose([*settings, f"run.dir={folder}", *overrides], plugins), plugins)
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return json.loads((folder / "summary.json").read_text()), metrics

    return run
