"""Tiny random models of the families that people train, and what the engines do with each: the table of docs/models.md.

`python tests/model_families.py > docs/models.md` measures all and writes the page (about two minutes).
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlcore.config import ModelConfig
from rlcore.engine.parallel.model_shape import ModelShape
from rlcore.engine.rollout import Request, Sampling
from rlcore.engines.hf.rollout import HFRollout
from rlcore.errors import ConfigError
from rlcore.model_folder import load_model_config
from rlcore.protocol import DataProto, Ragged

_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 12,
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
_CAPPED = {"head_dim": 12, "query_pre_attn_scalar": 12}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusConfig", {}),
    "arcee": ("ArceeConfig", {}),
    "bitnet": ("BitNetConfig", {}),
    "bloom": ("BloomConfig", {"n_head": 4, "n_layer": 2}),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", {}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_LATENT,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 12}),
    "exaone4": ("Exaone4Config", {}),
    "falcon": ("FalconConfig", {}),
    "falcon_h1": ("FalconH1Config", {}),
    "flex_olmo": ("FlexOlmoConfig", {}),
    "gemma": ("GemmaConfig", {"head_dim": 12}),
    "gemma2": ("Gemma2Config", _CAPPED),
    "gemma3_text": ("Gemma3TextConfig", _CAPPED),
    "glm": ("GlmConfig", {"head_dim": 12}),
    "glm4": ("Glm4Config", {"head_dim": 12}),
    "gpt2": ("GPT2Config", {}),
    "gpt_bigcode": ("GPTBigCodeConfig", {}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gptj": ("GPTJConfig", {"n_embd": 48, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 256}),
    "granite": ("GraniteConfig", {}),
    "granitemoe": ("GraniteMoeConfig", {}),
    "jais2": ("Jais2Config", {}),
    "jetmoe": ("JetMoeConfig", {}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "llama": ("LlamaConfig", {}),
    "llama4_text": ("Llama4TextConfig", {"head_dim": 12}),
    "mamba": ("MambaConfig", {}),
    "minimax_m2": ("MiniMaxM2Config", {"head_dim": 12}),
    "ministral3": ("Ministral3Config", {"head_dim": 12}),
    "mistral": ("MistralConfig", {"head_dim": 12, "sliding_window": None}),
    "mistral-window": ("MistralConfig", {"head_dim": 12, "sliding_window": 4}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "mpt": ("MptConfig", {}),
    "nemotron": ("NemotronConfig", {}),
    "olmo": ("OlmoConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {}),
    "olmo_hybrid": ("OlmoHybridConfig", {}),
    "olmoe": ("OlmoeConfig", {}),
    "opt": ("OPTConfig", {}),
    "persimmon": ("PersimmonConfig", {}),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {}),
    "phimoe": ("PhimoeConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_5_text": ("Qwen3_5TextConfig", _LINEAR),
    "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "head_dim": 12}),
    "qwen3_next": ("Qwen3NextConfig", {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "seed_oss": ("SeedOssConfig", {}),
    "smollm3": ("SmolLM3Config", {}),
    "stablelm": ("StableLmConfig", {"partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2Config", {}),
    "vaultgemma": ("VaultGemmaConfig", _CAPPED),
    "xglm": ("XGLMConfig", {}),
}
ALWAYS = ("qwen3", "mixtral", "gemma2", "lfm2")
"""The families of every `make test`; the others are slow tests."""
PROMPTS = [(5, 6, 7), (9,), (10, 11, 12, 13, 14)]


@dataclass(frozen=True)
class Row:
    """One family's row of the table. `gap`: the largest difference of sampler and trainer, in nats."""

    family: str
    sampled: str
    trained: str = ""
    gap: float = 0.0
    tp: str = ""
    pp: str = ""

    def __str__(self) -> str:
        gap = (
            "" if not self.trained else "1e-5" if self.gap < 1e-5 else "1e-4" if self.gap < 1e-4 else f"{self.gap:.1g}"
        )
        return f"| {self.family} | {self.sampled} | {self.trained} | {gap} | {self.tp} | {self.pp} |"


def measure(family: str, folder: Path) -> Row:
    """Sample with a tiny model of the family, read its samples with the train engine, and update it once."""
    engine_models = _engine_models()
    import transformers

    config, options = FAMILIES[family]
    engine_models.write_random(getattr(transformers, config), options, folder)
    try:
        rollout = HFRollout(ModelConfig(path=str(folder)), batch_size=2, device=torch.device("cpu"), shared=None)
    except ConfigError as error:
        return Row(family, f"refused: {str(error).partition('whose layers are ')[2].partition(';')[0]}")
    rollout.version = 0
    rollout.add([Request(str(i), prompt, i, Sampling(max_tokens=4 + i)) for i, prompt in enumerate(PROMPTS)])
    done = []
    while rollout.in_flight:
        done += rollout.step()
    done.sort(key=lambda row: row.id)
    engine = engine_models.torch_engine(folder, lr=1e-2)
    responses = Ragged.from_list([torch.tensor(row.tokens) for row in done])
    batch = DataProto.from_single_dict(
        {"prompts": Ragged.from_list(list(map(torch.tensor, PROMPTS))), "responses": responses}
    )
    read = engine.compute(batch, ["log_probs"])["log_probs"].to_list()
    gap = max((torch.tensor(row.log_probs) - own).abs().max().item() for row, own in zip(done, read, strict=True))
    engine.zero_grad()
    engine.forward_backward([batch], ["log_probs"], _likelihood, last=True)
    engine.step(1e-2, lambda norm: 1.0)
    moved = engine.compute(batch, ["log_probs"])["log_probs"].values
    assert sum(moved) > sum(torch.cat(read)), "an update must make its own responses likelier"
    shape = ModelShape.of(load_model_config(str(folder), False))
    decoder = "fused" if "few kernels" in rollout.description else "module"
    attention, _, rows = engine.description.removeprefix("attention ").partition(", rows ")
    tp, pp = ("yes" if able else "" for able in (shape.divided, shape.layers > 1))
    return Row(family, decoder, f"{attention}, {rows}", gap, tp, pp)


def _likelihood(part: DataProto | None, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return -outputs["log_probs"].mean()


def _engine_models() -> Any:
    spec = importlib.util.spec_from_file_location("engine_models", Path(__file__).with_name("engine_models.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HEAD = """# Models

Each row is measured on a tiny random model of the family, in fp32 on a CPU, by `tests/model_families.py`; a family that
stops working is a failing test. Families that are not listed may work too: the engines check at the start that their
forms of the forward agree with transformers' own.

- sampled: by `rollout=hf` with the fused decode step (and, on a GPU, slots), or with the module's own forward; or
  refused, with its layers: take `rollout=vllm`.
- trained: the attention of `engine=torch`, and whether rows are packed or padded.
- gap: the bound in nats below which the largest difference of sampler and trainer stays.
- tp, pp: whether [`engine.tp` and `engine.pp`](scaling.md) can divide the model.

| family | sampled | trained | gap | tp | pp |
|---|---|---|---|---|---|
"""


def main() -> None:
    """Write the page to standard output."""
    sys.stdout.write(HEAD)
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            print(measure(family, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
