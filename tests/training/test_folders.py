"""Model folders as they come: what a run cannot take is said before it starts, what it can is kept. About 15 s."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcore.assets import TINY
from rlcore.config import ModelConfig
from rlcore.data.chat import load_tokenizer
from rlcore.engine.rollout import Request, Sampling
from rlcore.engines.hf.rollout import HFRollout
from rlcore.errors import ConfigError, DataError


@pytest.fixture
def model(tmp_path):
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def set_json(file: Path, **values) -> None:
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **values}))


@pytest.mark.parametrize(
    "given", [{"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"early_stopping": True, "length_penalty": 2.0}]
)
def test_a_run_ends_with_the_folders_own_generation_config(train_small, model, tmp_path, given):
    """transformers refuses to save these, at the end of the run."""
    set_json(model / "generation_config.json", **given)
    set_json(model / "config.json", temperature=0.6, top_p=0.9, do_sample=False)
    train_small(tmp_path / "run", f"model.path={model}", "trainer.total_steps=1")
    saved = tmp_path / "run" / "checkpoints" / "step_00000001" / "actor" / "model"
    assert (saved / "generation_config.json").read_bytes() == (model / "generation_config.json").read_bytes()
    train_small(tmp_path / "next", f"model.path={saved}", "trainer.total_steps=1")


def test_a_folder_that_cannot_be_written_again_is_refused_before_the_first_step(
    train_small, model, tmp_path, monkeypatch
):
    from transformers import PreTrainedTokenizerBase

    def refuse(tokenizer, folder, **options):
        raise NotImplementedError("no way to write it")

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", refuse)
    with pytest.raises(ConfigError, match="so that a checkpoint would fail: NotImplementedError: no way"):
        train_small(tmp_path / "run", f"model.path={model}")
    assert (tmp_path / "run" / "metrics.jsonl").exists() is False


def quantise(model):
    set_json(model / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})


def break_weights(model):
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def make_shallower(model):
    settings = json.loads((model / "config.json").read_text())
    layers = settings["num_hidden_layers"]
    set_json(model / "config.json", num_hidden_layers=layers - 1, layer_types=["full_attention"] * (layers - 1))


def name_templates(model):
    for file in model.glob("*.jinja"):
        file.unlink()
    set_json(
        model / "tokenizer_config.json",
        chat_template=[{"name": "rag", "template": "x"}, {"name": "b", "template": "y"}],
    )


def scale_by_length(model):
    set_json(
        model / "config.json",
        max_position_embeddings=12,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    )


REFUSED = {
    quantise: r"holds quantised weights \(quantization_config: gptq\)",
    break_weights: r"weights that are NaN or infinite: model\.norm\.weight$",
    make_shallower: r"weights of more layers than its config\.json names: model\.layers\.\d+\.",
    name_templates: "the chat templates b, rag and none with the name default",
    scale_by_length: r"another rotary scaling \(dynamic\) for rows of more than 12 tokens; the longest prompt has 8",
}


@pytest.mark.parametrize("damage", REFUSED)
def test_a_folder_that_would_train_wrongly_is_refused(train_small, model, tmp_path, damage):
    damage(model)
    with pytest.raises(ConfigError, match=REFUSED[damage]):
        train_small(tmp_path / "run", f"model.path={model}")
    assert (tmp_path / "run" / "metrics.jsonl").exists() is False


def test_weights_that_the_model_does_not_use_are_named(train_small, model, tmp_path):
    weights = load_file(model / "model.safetensors")
    save_file({**weights, "vision.tower.weight": torch.ones(2)}, model / "model.safetensors", metadata={"format": "pt"})
    train_small(tmp_path / "run", f"model.path={model}", "trainer.total_steps=1")
    log = (tmp_path / "run" / "rlcore.log").read_text()
    assert "has weights that a causal language model does not use: vision.tower.weight" in log


def test_rows_below_the_change_of_a_rotary_scaling_are_taken(train_small, model, tmp_path):
    scale_by_length(model)
    train_small(tmp_path / "run", f"model.path={model}", "rollout.response_len=4", "trainer.total_steps=1")


@pytest.mark.parametrize(
    ("algo", "where"), [(["algo=grpo", "algo.group_size=2"], "prompts"), (["algo=sft"], "responses")]
)
def test_tokens_that_the_model_does_not_have_are_named(train_small, model, tmp_path, algo, where):
    """A chat token was added to the tokenizer; a response holds a letter of a larger alphabet."""
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer = load_tokenizer(ModelConfig(path=str(model)))
    assert tokenizer.add_special_tokens({"additional_special_tokens": [f"<new{n}>" for n in range(size)]})
    if where == "prompts":
        tokenizer.chat_template = f"<new{size - 1}>" + tokenizer.chat_template
    tokenizer.save_pretrained(model)
    options = [*algo, f"model.path={model}", "trainer.total_steps=1"]
    if where == "responses":
        rows = [{"prompt": f"{n}+1=", "answer": f"<new{99 - n}>"} for n in range(8)]
        for name in ("train", "test"):
            (tmp_path / f"{name}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows[:: 1 if name == "train" else 7])
            )
        options += [f"data.path={tmp_path}", "data.rendered=[answer]"]
    with pytest.raises(
        DataError, match=rf"the {where} hold the token '<new\d+>' with id \d+, but the model has {size} "
    ):
        train_small(tmp_path / "run", *options)


def test_a_hybrid_family_trains_and_samples_with_the_same_numbers(train_small, metrics_of, engine_models, tmp_path):
    from transformers import Lfm2Config

    options = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    folder = engine_models.write_random(Lfm2Config, options, tmp_path / "lfm2")
    (tmp_path / "long.py").write_text("def score(prompt, response, answer): return len(response)")
    reward = ["~reward", f"reward.path={tmp_path}/long.py:score"]
    train_small(tmp_path / "run", f"model.path={folder}", "trainer.total_steps=2", "rollout.hf.batch_size=3", *reward)
    for step in metrics_of(tmp_path / "run"):
        assert step["rollout/train_rollout_logprob_diff"] < 1e-4
        assert step["train/grad_norm"] > 0


def test_a_mixture_that_returns_its_routers_logits_samples(engine_models, tmp_path):
    import transformers

    options = {"num_local_experts": 4, "output_router_logits": True, "tie_word_embeddings": False}
    folder = engine_models.write_random(transformers.MixtralConfig, options, tmp_path / "mixtral")
    rollout = HFRollout(ModelConfig(path=str(folder)), batch_size=4, device=torch.device("cpu"), shared=None)
    rollout.version = 0
    prompts = [(5, 6, 7), (8, 9, 10, 11, 12)]
    rollout.add([Request(str(i), prompt, i, Sampling(max_tokens=3)) for i, prompt in enumerate(prompts)])
    done = []
    while rollout.in_flight:
        done += rollout.step()
    assert len(done) == 2
