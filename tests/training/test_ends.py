"""Where responses end: stale generation configs, special tokens as stop texts, and positions. About 12 s."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from rlcore.assets import TINY
from rlcore.errors import ConfigError

SPECIAL = 9
TEXT = "<|reserved_3|>"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    return folder


def set_json(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    "algo", [["algo=sft", "data.max_rows=128", "data.eval_size=6"], ["algo=grpo", "algo.group_size=2"]]
)
def test_a_generation_config_with_another_end_token_changes_nothing(train_small, metrics_of, model, tmp_path, algo):
    """The tokenizer's end token, which training teaches, ends a response too."""
    set_json(model / "generation_config.json", eos_token_id=63)
    options = [*algo, "trainer.total_steps=2", "trainer.eval_every=2"]
    train_small(tmp_path / "plain", *options)
    train_small(tmp_path / "stale", *options, f"model.path={model}")
    assert metrics_of(tmp_path / "stale") == metrics_of(tmp_path / "plain")
    assert metrics_of(tmp_path / "stale")[0]["eval/truncated"] < 1
    log = (tmp_path / "stale" / "rlcore.log").read_text()
    assert (
        log.count("end tokens: the chat template names '<|end|>', the tokenizer names '<|end|>', generation_con") == 1
    )
    assert "end tokens:" not in (tmp_path / "plain" / "rlcore.log").read_text()


SEES = """
def score(prompt, response, answer):
    return float("<|reserved_3|>" in response)
"""


@pytest.mark.parametrize("sees", [False, True])
def test_a_special_token_stops_and_a_reward_may_see_it(train_small, samples_of, model, tmp_path, sees):
    """The model writes the special token where it wrote a 7."""
    weights = load_file(model / "model.safetensors")
    table = next(weight for name, weight in weights.items() if "embed_tokens" in name)
    seven = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]["7"]
    table[[seven, SPECIAL]] = table[[SPECIAL, seven]].clone()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "sees.py").write_text(SEES)
    train_small(
        tmp_path / "run",
        *(f"model.path={model}", "algo.group_size=4", "data.batch_size=8", "trainer.total_steps=1"),
        *(f"rollout.stop=['{TEXT}']", f"reward.special_tokens={sees}", "~reward", "reward.functions={}"),
        f"reward.path={tmp_path}/sees.py:score",
    )
    rows = samples_of(tmp_path / "run")[1]
    # Some end right away; with the end token, too.
    at_once = [row for row in rows if row["response_text"] == "" and row["response_length"] == 1 and row["finished"]]
    assert max(row["scores"] for row in at_once) == float(sees)
    assert max(row["scores"] for row in rows) == float(sees)


def test_more_tokens_than_the_model_has_positions_are_refused_before_the_run(train_small, model, tmp_path):
    set_json(model / "config.json", max_position_embeddings=16)
    with pytest.raises(
        ConfigError, match=r"has 16 positions, but the longest prompt has 8 tokens \(data\.prompt_len=512"
    ):
        train_small(tmp_path / "run", f"model.path={model}", "rollout.response_len=9")
    assert not (tmp_path / "run").exists()
    train_small(tmp_path / "run", f"model.path={model}", "rollout.response_len=8", "trainer.total_steps=1")


def test_so_are_more_than_a_role_with_a_folder_of_its_own_has(train_small, model, tmp_path):
    set_json(model / "config.json", max_position_embeddings=16)
    with pytest.raises(ConfigError, match=r"^role 'ref': model\.path=.* has 16 positions, but the longest prompt"):
        train_small(tmp_path / "run", f"roles.ref.model={model}", "rollout.response_len=9")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("scaling", "most"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}, 64),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, 32),
        ({"rope_type": "default", "rope_theta": 1e4}, 16),
    ],
)
def test_scaled_positions_count_as_scaled(model, scaling, most):
    from rlcore.config import ModelConfig
    from rlcore.model_folder import positions

    set_json(model / "config.json", max_position_embeddings=16, rope_parameters=scaling)
    assert positions(ModelConfig(path=str(model))) == most
