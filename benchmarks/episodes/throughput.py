"""Speed of episodes: several turns against the same tokens in one turn, and an environment that takes its time.

The model has random weights and about 25 M parameters, so that decoding and not Python decides. No end token ends a
turn, so every turn has its full length.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.report import Figure
from rlcore.assets import TINY
from rlcore.config import ModelConfig
from rlcore.config.environment import EnvConfig
from rlcore.data.chat import OfferedTools, PromptEncoder, load_tokenizer
from rlcore.engine.rollout import Sampling
from rlcore.engines.hf.rollout import HFRollout
from rlcore.episodes.environments import EnvironmentEpisodes
from rlcore.episodes.processes import load_from_file, pack
from rlcore.episodes.setup import EpisodeSetup
from rlcore.episodes.tool_calls import FORMATS
from rlcore.protocol import DataProto, Ragged

TURNS, TURN_TOKENS, ROWS = 4, 32, 64
RUNS = 3


class AtOnce:
    """An environment that answers at once."""

    def step(self, messages: list) -> str:
        return "go on"


class AfterAWhile:
    """An environment whose answer takes 200 ms."""

    def step(self, messages: list) -> str:
        time.sleep(0.2)
        return "go on"


def make_model(folder: Path) -> ModelConfig:
    """Write a model with random weights and the tiny model's tokenizer."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return ModelConfig(path=str(folder))


def make_batch(model: ModelConfig) -> DataProto:
    """Return ROWS rows, four of each prompt."""
    encoder = PromptEncoder(load_tokenizer(model))
    texts = [f"{number}+{number}=" for number in range(ROWS // 4) for _ in range(4)]
    return DataProto.from_dict(
        {
            "prompts": Ragged.from_list(encoder.token_ids([encoder.render(text) for text in texts])),
            "sample_index": torch.arange(4).repeat(ROWS // 4),
            "episode_row": torch.arange(ROWS),
        },
        {"uid": [f"0:{number}" for number in range(ROWS // 4) for _ in range(4)], "prompt_text": texts},
    )


def sampled(out: DataProto) -> int:
    """Return the number of tokens that the policy sampled."""
    return int(out["response_mask"].values.sum())


def measure() -> tuple[list[Figure], float, float, str]:
    """Return the figures, tokens/s of several turns by those of one, the share of the time that decodes, and a note."""
    torch.set_num_threads(2)
    one_turn, several, ratios, busy = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        engine = HFRollout(model, batch_size=ROWS, device=torch.device("cpu"), shared=None)
        engine.version, engine.end_ids = 0, engine.end_ids[:0]
        batch, whole = make_batch(model), Sampling(max_tokens=TURNS * TURN_TOKENS)
        env = EnvConfig(name="file", max_turns=TURNS, turn_len=TURN_TOKENS, memory_mb=0)

        def source_of(world: type) -> EnvironmentEpisodes:
            packed = pack("file", load_from_file(f"{__file__}:{world.__name__}")[0])
            setup = EpisodeSetup(
                env, model, packed, (), FORMATS["hermes"], OfferedTools(), EnvironmentEpisodes, resets=False
            )
            return EnvironmentEpisodes(setup, engine)

        quick, slow = source_of(AtOnce), source_of(AfterAWhile)
        long = Sampling(max_tokens=1024)
        quick.play(batch, long)  # starts the processes
        slow.play(batch, long)
        for _ in range(RUNS):
            began = time.perf_counter()
            one_turn.append(sampled(engine.generate(batch, whole)) / (time.perf_counter() - began))
            began = time.perf_counter()
            several.append(sampled(quick.play(batch, long)) / (time.perf_counter() - began))
            ratios.append(several[-1] / one_turn[-1])
            slow.waited()
            began = time.perf_counter()
            slow.play(batch, long)
            busy.append(1 - slow.waited() / (time.perf_counter() - began))
        quick.close()
        slow.close()
    figures = [
        Figure("one turn", "tokens", "tokens/s", one_turn),
        Figure(f"{TURNS} turns", "tokens", "tokens/s", several),
        Figure("answers after 200 ms", "decoding", "share of the time", busy),
    ]
    note = f"{ROWS} episodes, {TURNS} turns of {TURN_TOKENS} tokens, 20 M parameters in fp32, two threads"
    return figures, statistics.median(ratios), statistics.median(busy), note
