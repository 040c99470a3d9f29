"""The memory left for micro-batches, by hand, and a worker that measures, keeps and names its number.

A CPU has no memory figures, so those of a GPU are made up here; the passes and the bytes of their tensors are real.
"""

import dataclasses
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlcore.config import EngineConfig, ModelConfig, RolloutConfig
from rlcore.engine import room, worker
from rlcore.engine.collectives import Ranks
from rlcore.engine.parallel.layout import Layout, ShardSpec
from rlcore.engine.parallel.mesh import TrainMesh
from rlcore.engine.rollout import Sampling
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.update.micro_batch_size import MicroBatchSize
from rlcore.engine.worker import ModelWorker
from rlcore.errors import DeviceMemoryError
from rlcore.plugins import CRITIC, REWARD, Role, RolloutCapabilities
from rlcore.protocol import DataProto, Ragged
from rlcore.workers import WorkerContext
from rlcore.workers.worker import construct

TRAINED = Role(trains=True, generates=True)
CARD = "NVIDIA H100 80GB HBM3"
PLACE = f"{CARD}, pp=1 tp=1 dp=1 shard=1"


@pytest.fixture
def card(monkeypatch):
    """A function that gives this process a card with so many bytes free and in all."""
    path = Path(__file__).with_name("live_bytes.py")
    spec = importlib.util.spec_from_file_location("live_bytes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.LiveBytes() as live:

        def give(free, total=None):
            figures = lambda device: (free, total or free)  # noqa: E731
            monkeypatch.setattr(room, "free_bytes", figures)
            monkeypatch.setattr(worker, "free_bytes", figures)
            monkeypatch.setattr(worker, "peak_bytes", lambda device, run: live.peak(run))
            monkeypatch.setattr(worker, "has_memory_figures", lambda device: True)
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: CARD)

        yield give


@pytest.fixture
def start(engine_models, model_folder, monkeypatch):
    """A function that starts the workers of roles in one process, and returns them by role."""
    monkeypatch.setattr(ModelWorker, "device", torch.device("cpu"))

    def make(roles, **engine):
        together = {}
        for name, role in roles.items():
            model = ModelConfig(path=str(model_folder("llama")))
            setup = engine_models.role_setup(role, model, EngineConfig(**engine), RolloutConfig(response_len=6))
            context = WorkerContext(name, 0, 1, 0, "here", gpus=1.0)
            together[name] = construct(context, ModelWorker, (setup,), {}, siblings=together)
            together[name].start()
        return together

    return make


def parameters(of):
    return sum(tensor.numel() for tensor in of.train.held_parameters().values())


# Room


def test_the_moments_of_a_rank_are_those_of_its_part(make_engine):
    engine = make_engine()
    assert room.local_parameters(engine) == sum(each.numel() for each in engine.held_parameters().values())


@pytest.mark.parametrize(
    ("layout", "shards", "rank", "count"),
    [
        (Layout(), 1, 0, 1000 + 600 + 10),
        (Layout(dp=4), 4, 3, 403),  # 1,610 over 4, rounded up
        (Layout(dp=4), 2, 3, 805),
        (Layout(tp=2), 1, 1, 1000 + 300 + 10),
        (Layout(pp=2), 1, 0, 1000),
        (Layout(pp=2), 1, 1, 610),
        (Layout(pp=2, tp=2, dp=2), 2, 7, 155),  # (300 + 10) / 2
    ],
)
def test_local_parameters_by_hand(layout, shards, rank, count):
    mesh = TrainMesh(Ranks(rank, layout.world_size), layout, shards)
    specs = {
        "embedding": ShardSpec((100, 10), (0,)),
        "weight": ShardSpec((60, 10), (layout.pp - 1,), dim=0),
        "norm": ShardSpec((10,), (layout.pp - 1,)),
    }
    assert room.local_parameters(SimpleNamespace(mesh=mesh, trained_specs=specs)) == count


def test_keys_and_values_by_hand():
    text = SimpleNamespace(num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, hidden_size=896)
    config = SimpleNamespace(get_text_config=lambda: text)
    # Keys and values of 24 layers x 2 heads x 64, in bf16: 12,288 bytes a token.
    assert room.cache_bytes(config, 1000, 2) == 12_288_000
    text.head_dim, text.num_key_value_heads = 128, None
    assert room.cache_bytes(config, 1, 4) == 2 * 24 * 14 * 128 * 4


def test_the_room_is_what_is_free_less_what_is_to_come(start, card):
    card(free=70 * 10**6, total=80 * 10**6)
    roles = {"actor": TRAINED, "ref": Role(), "critic": Role(trains=True, kind=CRITIC)}
    together = start(roles)
    actor, critic = together["actor"], together["critic"]
    # 256 rows of 100 tokens; keys and values of 2 layers x 2 heads x 12, in fp32: 384 bytes a token.
    cache = 256 * 100 * 384
    moments = 8 * (parameters(actor) + parameters(critic))
    got = room.room_for(actor.train, actor._trained, 1.0, 100)
    assert got == 70e6 - 8e6 - moments - 4 * parameters(critic) - cache
    assert room.room_for(together["ref"].train, actor._trained, 1.0, 100) == got - 4 * parameters(actor)
    # A cache takes no more than a quarter of the card, and half of a card is half of what is free.
    assert room.room_for(actor.train, [actor], 1.0, 10**6) == 62e6 - 8 * parameters(actor) - 20e6
    assert room.room_for(actor.train, [actor], 0.5, 100) == 31e6 - 8 * parameters(actor) - cache


@pytest.mark.parametrize(
    ("can", "taken"),
    [(RolloutCapabilities(cache_key="rollout.vllm.memory"), 0), (RolloutCapabilities(), 20e6)],
    ids=["has its cache already", "says nothing"],
)
def test_other_rollout_engines(start, card, can, taken):
    card(free=70 * 10**6, total=80 * 10**6)
    actor = start({"actor": TRAINED})["actor"]
    actor.setup = dataclasses.replace(
        actor.setup, rollout_engine=dataclasses.replace(actor.setup.rollout_engine, capabilities=can)
    )
    assert room.room_for(actor.train, [actor], 1.0, 100) == 62e6 - 8 * parameters(actor) - taken


# The worker


def test_sampling_gets_the_memory_of_gradients(start, random_batch):
    together = start({"actor": TRAINED, "critic": Role(trains=True, kind=CRITIC), "ref": Role()})
    trained = [each.train.model for name, each in together.items() if name != "ref"]
    prompts = random_batch().select(["prompts"], ["uid"])
    prompts["sample_index"] = torch.arange(len(prompts))
    for each in trained:
        for parameter in each.parameters():
            parameter.grad = torch.ones_like(parameter)
    together["actor"].generate(prompts, Sampling(max_tokens=2))
    assert all(parameter.grad is None for each in trained for parameter in each.parameters())


def test_each_role_gets_its_own_number(start, card):
    card(free=90 * 10**6)
    roles = {
        "actor": TRAINED,
        "ref": Role(),
        "critic": Role(trains=True, kind=CRITIC),
        "scorer": Role(trains=True, kind=REWARD),
    }
    together = start(roles)
    sizes = {name: each.fit_micro_batches(None, 100) for name, each in together.items()}
    # Real bytes: a micro-batch with a backward takes some 9 kB a token here, a forward about 2.
    assert {name: size.tokens for name, size in sizes.items()} == {
        "actor": 4096,
        "ref": 32768,
        "critic": 4096,
        "scorer": 4096,
    }
    for name, each in together.items():
        assert each.train.micro_batch_tokens == sizes[name].tokens
        assert sizes[name].place == PLACE
    assert "micro-batches of 4096 tokens (measured: 0.01 MB a token and 0.0 GB, of 0.1 GB free)" in (
        together["actor"].describe()
    )


def test_a_kept_number_holds_on_the_same_card_and_layout_only(start, card, monkeypatch):
    card(free=90 * 10**6)
    actor = start({"actor": TRAINED})["actor"]
    fresh = actor.fit_micro_batches(MicroBatchSize(512, "NVIDIA A100, pp=1 tp=1 dp=1 shard=1", "measured"), 100)
    assert fresh.tokens == 4096
    monkeypatch.setattr(worker, "measure", None)  # is not called again
    kept = MicroBatchSize(512, PLACE, "measured then")
    assert actor.fit_micro_batches(kept, 100) == kept
    assert actor.train.micro_batch_tokens == 512


@pytest.mark.parametrize("given", [0, 300])
def test_a_given_number_is_not_measured(start, card, monkeypatch, given):
    card(free=90 * 10**6)
    monkeypatch.setattr(worker, "measure", None)
    actor = start({"actor": TRAINED}, micro_batch_tokens=given)["actor"]
    assert actor.fit_micro_batches(None, 100) is None
    assert actor.train.micro_batch_tokens == given
    assert "micro-batches" not in actor.describe()


def test_a_cpu_keeps_its_number(start, monkeypatch):
    monkeypatch.setattr(worker, "measure", None)
    actor = start({"actor": TRAINED})["actor"]
    assert actor.fit_micro_batches(None, 100) is None
    assert actor.train.micro_batch_tokens == 16384


def test_the_number_cuts_updates_and_forwards(start, card, random_batch, monkeypatch):
    card(free=90 * 10**6)
    actor = start({"actor": TRAINED})["actor"]
    actor.fit_micro_batches(MicroBatchSize(40, PLACE, "measured"), 100)
    parts = []
    forward = actor.train.forward
    monkeypatch.setattr(actor.train, "forward", lambda each, *rest: [parts.extend(each), forward(each, *rest)])
    actor.log_probs(random_batch(), "old_log_probs", False)
    tokens = [int(part.view("prompts").lengths.sum() + part.view("responses").lengths.sum()) for part in parts]
    assert len(tokens) > 2
    assert max(tokens) <= 40


def no_memory(*args, **words):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_running_out_of_memory_names_the_number_and_its_half(start, card, monkeypatch):
    card(free=90 * 10**6)
    actor = start({"actor": TRAINED})["actor"]
    actor.fit_micro_batches(None, 100)
    monkeypatch.setattr(actor.train, "update", no_memory)
    rows = DataProto.from_single_dict({"prompts": Ragged.from_list([torch.tensor([5, 6])])})
    with pytest.raises(DeviceMemoryError, match=r"engine.micro_batch_tokens=2048 \(auto took 4096, measured: 0.01 MB"):
        actor.update([UpdateItem(rows, [1], None, None)], 1, 0)


def test_rows_that_stay_together_are_named_where_they_exceed_a_micro_batch(start, card, random_batch, monkeypatch):
    actor = start({"actor": TRAINED}, micro_batch_tokens=20)["actor"]
    monkeypatch.setattr(actor.train, "update", no_memory)
    batch = random_batch(groups=2, size=3)
    lengths = batch["prompts"].lengths + batch["responses"].lengths
    most = max(int(lengths[:3].sum()), int(lengths[3:].sum()))
    assert most > 20
    with pytest.raises(
        DeviceMemoryError,
        match=rf"these: fewer or shorter rows with equal 'uid': {most} tokens stay in one micro-batch; ",
    ):
        actor.update([UpdateItem(batch, [6], None, None, keep_together="uid")], 1, 0)
    with pytest.raises(DeviceMemoryError, match=r"Try one of these: engine.micro_batch_tokens=10; "):
        actor.update([UpdateItem(batch, [6], None, None)], 1, 0)


def test_a_measurement_without_memory_says_so(start, card, monkeypatch):
    card(free=90 * 10**6)
    actor = start({"actor": TRAINED})["actor"]
    monkeypatch.setattr(actor.train, "forward_backward", no_memory)
    with pytest.raises(DeviceMemoryError, match=r"measuring a micro-batch of 32 rows with 4096 tokens does not fit"):
        actor.fit_micro_batches(None, 100)
