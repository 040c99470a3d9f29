"""Small random models of several architectures, and batches to train them on."""

import importlib
import sys
from pathlib import Path

import torch

from rlcore.config import EngineConfig, ModelConfig, RolloutConfig
from rlcore.engine.collectives import Ranks
from rlcore.engine.train import TrainEngine, TrainSetup
from rlcore.engine.worker import RoleSetup
from rlcore.engines.hf.config import HFConfig
from rlcore.engines.hf.plugin import rlcore_rollout_engines
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.engine import TorchEngine
from rlcore.engines.torch.plugin import rlcore_train_engines
from rlcore.plugins import Role
from rlcore.protocol import DataProto, Ragged

PLAIN = Path(__file__).parent / "fixtures" / "engines" / "rlcore-plugin-plain"
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def make_model(kind: str, folder: Path) -> Path:
    """Write a random model of an architecture with the tiny model's tokenizer files beside it."""
    import transformers

    configs = {
        "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
        "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
        "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": False, "head_dim": 16}),
        "mistral-window": (transformers.MistralConfig, {"sliding_window": 4, "head_dim": 12}),
        "gpt2": (transformers.GPT2Config, {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2}),
        "gemma2": (transformers.Gemma2Config, {"head_dim": 12, "sliding_window": 8, "query_pre_attn_scalar": 12}),
    }
    return write_random(*configs[kind], folder)


def write_random(config: type, options: dict, folder: Path) -> Path:
    """Write a random model of a transformers config with the tiny model's tokenizer files beside it."""
    import shutil

    import transformers

    from rlcore.assets import TINY

    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config(**{**SIZES, **options}))
    model.save_pretrained(folder)
    for file in TINY.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder / file.name)
    return folder


def setup_of(
    folder: Path,
    config_class: type,
    *,
    trains: bool = True,
    temperature: float = 1.0,
    dtype: str = "fp32",
    **options,
) -> TrainSetup:
    """Return the setup of an engine in this process.

    `options` are keys of `engine` and of its own section; lr and clip_grad are 0 unless given.
    """
    options = {"lr": 0.0, "clip_grad": 0.0, **options}
    own = {name: value for name, value in options.items() if name in config_class.__dataclass_fields__}
    return TrainSetup(
        ModelConfig(path=str(folder), dtype=dtype),
        EngineConfig(**{name: value for name, value in options.items() if name not in own}),
        config_class(**own),
        ranks=Ranks(),
        trains=trains,
        temperature=temperature,
        total_steps=10,
    )


def torch_engine(folder: Path, **options) -> TorchEngine:
    """Create the torch engine; see `setup_of`."""
    return TorchEngine(setup_of(folder, TorchConfig, **options))


def plain_engine(folder: Path, **options) -> TrainEngine:
    """Create the engine of tests/fixtures/engines/rlcore-plugin-plain; see `setup_of`."""
    if str(PLAIN) not in sys.path:
        sys.path.insert(0, str(PLAIN))
    plugin = importlib.import_module("rlcore_plugin_plain")
    return plugin.create(setup_of(folder, plugin.PlainConfig, **options))


TRAIN_ENGINES = {"torch": torch_engine, "plain": plain_engine}
"""Functions that create each train engine there is, by its name."""


def role_setup(role: Role, model: ModelConfig, engine: EngineConfig, rollout: RolloutConfig) -> RoleSetup:
    """Return the setup of a role's workers on engine=torch and rollout=hf, with the defaults of both."""
    engines = rlcore_train_engines(), rlcore_rollout_engines()
    return RoleSetup(role, model, engine, rollout, *engines, TorchConfig(), HFConfig(), seed=0, total_steps=10)


def random_batch(groups: int = 4, size: int = 3, seed: int = 0) -> DataProto:
    """Groups of responses of different lengths, with masked tokens inside some, and what GRPO's loss reads."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    prompts, responses, uid = [], [], []
    for group in range(groups):
        prompt = torch.randint(3, 97, (draw(1, 7),), generator=generator)
        for _ in range(size):
            prompts.append(prompt)
            responses.append(torch.randint(3, 97, (draw(1, 12),), generator=generator))
            uid.append(f"0:{group}")
    ragged = Ragged.from_list(responses)
    mask = (torch.rand(len(ragged.values), generator=generator) > 0.2).long()
    return DataProto.from_single_dict(
        {
            "prompts": Ragged.from_list(prompts),
            "responses": ragged,
            "response_mask": ragged.with_values(mask),
            "old_log_probs": ragged.with_values(-4 - torch.rand(len(mask), generator=generator)),
            "ref_log_probs": ragged.with_values(-4 - torch.rand(len(mask), generator=generator)),
            "advantages": torch.randn(len(ragged), generator=generator),
            "uid": uid,
            "sample_index": torch.arange(size).repeat(groups),
        }
    )


def gradients(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Return each parameter's gradient after an update, by any of TRAIN_ENGINES."""
    module = engine.model.hf if isinstance(engine, TorchEngine) else engine.model
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Compare tensor by tensor, relative by norm."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert tensor.norm() > 0, f"{name} has no gradient, so the comparison would show nothing"
        off = ((got[name] - tensor).norm() / tensor.norm()).item()
        assert off < tolerance, f"{name} is off by {off:.2e}"
