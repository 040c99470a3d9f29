"""Critics and reward models: their numbers against transformers' own, gradients, folders, followers."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig

from rlcore.assets import TINY
from rlcore.config import EngineConfig, ModelConfig
from rlcore.engine.collectives import Ranks
from rlcore.engine.train import TrainSetup
from rlcore.engine.update.items import UpdateItem
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.engine import TorchEngine
from rlcore.engines.torch.model import load_scalar_model
from rlcore.errors import ConfigError, DataError
from rlcore.ops import masked_sum, needs, objective
from rlcore.plugins import CRITIC, POLICY, REWARD
from rlcore.protocol import Ragged

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def scored_folder(model_folder, tmp_path_factory):
    """Return the folder of a sequence-classification model with a random head, by architecture."""
    made = {}

    def get(kind="qwen2"):
        if kind not in made:
            folder = tmp_path_factory.mktemp(f"scored-{kind}")
            shutil.copytree(model_folder(kind), folder, dirs_exist_ok=True)
            hf = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
            torch.manual_seed(3)
            torch.nn.init.normal_(hf.score.weight)
            hf.save_pretrained(folder)
            made[kind] = folder
        return made[kind]

    return get


def make(folder, kind, *, trains=True, padding_free=True, **options):
    return TorchEngine(
        TrainSetup(
            ModelConfig(path=str(folder)),
            EngineConfig(**{"lr": 1e-2, "clip_grad": 0.0, **options}),
            TorchConfig(padding_free=padding_free),
            ranks=Ranks(),
            trains=trains,
            kind=kind,
            total_steps=10,
        )
    )


def with_an_empty_response(batch):
    rows = batch["responses"].to_list()
    rows[1] = rows[1][:0]
    batch = batch.select(["prompts"], ["uid"])
    batch["responses"] = Ragged.from_list(rows)
    batch["response_mask"] = batch["responses"].with_values(torch.ones_like(batch["responses"].values))
    return batch


def sequences(batch):
    prompts, responses = batch["prompts"].to_list(), batch["responses"].to_list()
    return [(p, torch.cat([p, r])) for p, r in zip(prompts, responses, strict=True)]


@needs("values")
def value_loss(out, batch, config):
    error = (out.values - batch["advantages"][:, None]) ** 2
    return {"value": objective(masked_sum(error, batch["response_mask"]), batch["response_mask"].sum())}


@needs("scores")
def score_loss(out, batch, config):
    return {"score": objective(((out.scores - batch["advantages"]) ** 2).sum(), len(out.scores))}


def step(engine, batch, loss, number=0, together=None):
    return engine.update([UpdateItem(batch, [len(batch)], loss, None, 1.0, together)], epochs=1, step=number)


@pytest.mark.parametrize(
    ("kind", "padding_free", "packed"),
    [
        ("qwen2", True, True),
        ("qwen2", False, False),
        ("llama", True, True),
        ("gpt2", True, True),
        ("mistral-window", True, False),
    ],
)
def test_numbers_are_those_of_transformers(scored_folder, random_batch, kind, padding_free, packed):
    """A critic: the head at the position that chooses the token. A reward model: the logit of a right-padded batch."""
    folder = scored_folder(kind)
    hf = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    batch = with_an_empty_response(random_batch(groups=3))
    values = make(folder, CRITIC, padding_free=padding_free).compute(batch, ["values"])["values"]
    assert values.lengths.equal(batch["responses"].lengths)
    with torch.no_grad():
        for (prompt, whole), got in zip(sequences(batch), values.to_list(), strict=True):
            hidden = getattr(hf, hf.base_model_prefix)(input_ids=whole[None]).last_hidden_state
            by_hand = hf.score(hidden)[0, :, 0]
            torch.testing.assert_close(got, by_hand[len(prompt) - 1 : len(whole) - 1], rtol=1e-4, atol=1e-4)
        ids = torch.nn.utils.rnn.pad_sequence([whole for _, whole in sequences(batch)], batch_first=True)
        logits = hf(input_ids=ids, attention_mask=(ids != 0).long()).logits[:, 0]
    engine = make(folder, REWARD, trains=False, padding_free=padding_free, micro_batch_rows=4)
    assert engine.model.packed == packed
    scores = engine.compute(batch, ["scores"])["scores"]
    assert scores.dtype == torch.float32
    assert logits.std() > 0.5
    torch.testing.assert_close(scores, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "name", "loss"), [(CRITIC, "values", value_loss), (REWARD, "scores", score_loss)])
def test_the_gradient_is_that_of_plain_autograd_however_the_batch_is_cut(
    scored_folder, random_batch, gradients, assert_close, kind, name, loss
):
    batch = random_batch(groups=4, size=2)
    hf = AutoModelForSequenceClassification.from_pretrained(scored_folder(), dtype=torch.float32).eval()
    errors, count = [], 0
    for row, (prompt, whole) in enumerate(sequences(batch)):
        numbers = hf.score(hf.model(input_ids=whole[None]).last_hidden_state)[0, :, 0]
        mask = batch["response_mask"].to_list()[row]
        read = numbers[len(prompt) - 1 : -1] if kind == CRITIC else numbers[-1:]
        weight = mask if kind == CRITIC else torch.ones(1)
        errors.append(((read - batch["advantages"][row]) ** 2 * weight).sum())
        count += int(weight.sum())
    want = torch.stack(errors).sum() / count
    want.backward()
    for options in ({}, {"micro_batch_rows": 3}, {"micro_batch_rows": 1, "padding_free": False}):
        engine = make(scored_folder(), kind, **options)
        metrics = step(engine, batch, loss)
        assert metrics[f"loss/{name[:-1]}"] == pytest.approx(want.item(), rel=1e-5)
        assert_close(gradients(engine), {name: p.grad for name, p in hf.named_parameters()}, 1e-4)


@pytest.mark.parametrize(("kind", "name", "loss"), [(CRITIC, "values", value_loss), (REWARD, "scores", score_loss)])
def test_a_new_head_is_zero_and_learns(model_folder, random_batch, kind, name, loss):
    engine = make(model_folder(), kind)
    batch = random_batch()

    def numbers():
        given = engine.compute(batch, [name])[name]
        return given.values if isinstance(given, Ragged) else given

    assert not numbers().any()
    first = step(engine, batch, loss)
    assert first["train/grad_norm"] > 0
    assert numbers().any()
    for number in range(4):
        last = step(engine, batch, loss, number)
    assert last[f"loss/{name[:-1]}"] < first[f"loss/{name[:-1]}"]


def test_training_goes_on_bit_for_bit_after_a_save_and_the_folder_opens_with_transformers(
    model_folder, random_batch, tmp_path
):
    straight, saved = (make(model_folder(), REWARD) for _ in range(2))
    for engine in (straight, saved):
        step(engine, random_batch(seed=1), score_loss)
    saved.save(tmp_path)
    resumed = make(model_folder(), REWARD)
    resumed.restore(tmp_path)
    batch = random_batch(seed=2)
    scores = resumed.compute(batch, ["scores"])["scores"]
    assert step(resumed, batch, score_loss, 1) == step(straight, batch, score_loss, 1)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(resumed.export(torch.float32), straight.export(torch.float32)))  # noqa: B905
    hf = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    assert (hf.config.num_labels, hf.config.architectures) == (1, ["Qwen2ForSequenceClassification"])
    for row, (_, whole) in enumerate(sequences(batch)):
        assert hf(input_ids=whole[None]).logits.item() == pytest.approx(scores[row].item(), abs=1e-5)
    # And what was written serves the roles that read such folders.
    again = make(tmp_path / "model", REWARD, trains=False).compute(batch, ["scores"])["scores"]
    torch.testing.assert_close(again, scores)
    assert make(tmp_path / "model", CRITIC).model.hf.score.weight.equal(hf.score.weight)


def test_a_saved_reward_model_names_the_pad_token_of_its_tokenizer(model_folder, tmp_path):
    shutil.copytree(model_folder(), tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    make(tmp_path / "base", REWARD).save_pretrained(tmp_path / "saved")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").config.pad_token_id == 0


def test_no_rows_give_no_numbers(scored_folder, random_batch):
    batch = random_batch()[:0]
    assert make(scored_folder(), REWARD).compute(batch, ["scores"])["scores"].shape == (0,)
    assert len(make(scored_folder(), CRITIC).compute(batch, ["values"])["values"]) == 0


@pytest.mark.parametrize("kind", [POLICY, CRITIC])
def test_following_copies_or_averages(model_folder, random_batch, kind):
    """follow(1) takes over every bit; follow(0.5) goes half of the way: (a + b) / 2."""
    leader, follower = make(model_folder(), kind), make(model_folder(), kind, trains=False)
    with torch.no_grad():
        for parameter in leader.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    mine, theirs = (dict(engine.export(torch.float32)) for engine in (follower, leader))
    want = {name: (mine[name] + theirs[name]) / 2 for name in mine}
    follower.follow(leader, 0.5)
    for name, tensor in follower.export(torch.float32):
        torch.testing.assert_close(tensor, want[name])
    follower.follow(leader, 1.0)
    assert follower.version == 2  # a rollout engine has to be brought up to date twice
    for name, tensor in follower.export(torch.float32):
        assert torch.equal(tensor, theirs[name])
        assert tensor.data_ptr() != theirs[name].data_ptr()
    assert not any(parameter.requires_grad for parameter in follower.model.parameters())


def test_following_another_model_is_refused(model_folder):
    follower = make(model_folder(), POLICY, trains=False)
    with pytest.raises(DataError, match=r"belong to another model: .*q_proj.bias is missing; .* and 2 more"):
        follower.follow(make(model_folder("llama"), POLICY), 1.0)
    with pytest.raises(DataError, match=r"another model: .*score.weight is unknown"):
        follower.follow(make(model_folder(), CRITIC), 1.0)


def test_folders_that_are_no_reward_model(model_folder, tmp_path):
    options = {"new_head": False, "padding_free": True, "device": CPU}
    with pytest.raises(ConfigError, match=r"has no weights of a score head.*docs/roles.md says which"):
        load_scalar_model(ModelConfig(path=str(model_folder())), **options)
    two = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=2)
    two.save_pretrained(tmp_path / "two")
    with pytest.raises(ConfigError, match=r"with one label: it has other shapes for score\.weight"):
        load_scalar_model(ModelConfig(path=str(tmp_path / "two")), **options)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    bert = BertConfig(vocab_size=20, num_labels=1, **sizes)
    AutoModelForSequenceClassification.from_config(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(ConfigError, match="BertForSequenceClassification is not supported, as it has no linear head"):
        load_scalar_model(ModelConfig(path=str(tmp_path / "bert")), **options)


def test_a_folder_without_some_of_its_weights_is_refused(model_folder, tmp_path):
    """transformers would make up what is missing."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"it has no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        make(tmp_path, POLICY)
