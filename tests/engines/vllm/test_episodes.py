"""Episodes on vLLM: the rows of several turns, with its prefix cache in place of kept rows."""

from dataclasses import replace
from pathlib import Path

import torch

from rlcore.config import ModelConfig
from rlcore.config.environment import EnvConfig
from rlcore.data.chat import OfferedTools, PromptEncoder, load_tokenizer
from rlcore.engine.rollout import Sampling
from rlcore.episodes.environments import EnvironmentEpisodes
from rlcore.episodes.processes import load_from_file, pack
from rlcore.episodes.setup import EpisodeSetup
from rlcore.episodes.tool_calls import FORMATS
from rlcore.protocol import DataProto, Ragged

WORLDS = Path(__file__).parents[2] / "episodes" / "worlds.py"


def test_masks_and_log_probs_are_those_of_one_forward(make_pair):
    pair = make_pair("qwen2", tied=True)
    pair.sync(1)
    engine, model = pair.rollout, ModelConfig(path=str(pair.folder))
    encoder = PromptEncoder(load_tokenizer(model))
    texts = [f"{number}+{number}=" for number in range(4) for _ in range(2)]
    batch = DataProto.from_dict(
        {
            "prompts": Ragged.from_list(encoder.token_ids([encoder.render(text) for text in texts])),
            "sample_index": torch.arange(2).repeat(4),
            "episode_row": torch.arange(8),
        },
        {"uid": [f"0:{number}" for number in range(4) for _ in range(2)], "prompt_text": texts},
    )
    env = EnvConfig(name="file", memory_mb=0, turn_len=6)
    packed = pack("file", load_from_file(f"{WORLDS}:Rounds")[0])
    setup = EpisodeSetup(env, model, packed, (), FORMATS["hermes"], OfferedTools(), EnvironmentEpisodes)
    played = []
    for concurrency in (8, 2):
        source = replace(setup, env=replace(env, concurrency=concurrency)).open(engine)
        played.append(source.play(batch, Sampling(max_tokens=120, seed=3)))
        source.close()
    out, other = played
    assert [row.tolist() for row in out["responses"].to_list()] == [r.tolist() for r in other["responses"].to_list()]
    assert out["turns"].tolist() == [3] * 8
    for row in range(8):
        prompt, response, mask = out["prompts"][row], out["responses"][row], out["response_mask"][row].bool()
        want = pair.log_probs(prompt, response, 1.0).gather(-1, response[:, None])[:, 0]
        torch.testing.assert_close(out["rollout_log_probs"][row][mask], want[mask], atol=2e-3, rtol=0)
