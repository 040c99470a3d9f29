"""Which route a worker takes: the capabilities of the engine's spec decide, and the engine is not asked."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from rlcore.config import EngineConfig, ModelConfig, RolloutConfig
from rlcore.engine.parallel.layout import Layout, ShardSpec
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.weights.generation import GenerationLayout
from rlcore.engine.weights.meter import ProcessGroups
from rlcore.engine.weights.routes import Gathered, Received, Resharded, SharedModule, choose_route
from rlcore.engine.weights.transfer import RemoteWeights, pack_weights
from rlcore.engine.worker import ModelWorker, RoleSetup, SamplingWorker
from rlcore.engines.hf.config import HFConfig
from rlcore.engines.hf.plugin import rlcore_rollout_engines
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.plugin import rlcore_train_engines
from rlcore.errors import DataError, DeviceMemoryError
from rlcore.plugins import Role, RolloutCapabilities
from rlcore.protocol import DataProto, Ragged
from rlcore.workers import WorkerContext
from rlcore.workers.worker import construct

NOTHING, ALL = RolloutCapabilities(), rlcore_rollout_engines().capabilities


def worker_of(kind, folder, rollout_can=ALL, train_can=None, engine=EngineConfig(), generates=True):  # noqa: B008
    train = rlcore_train_engines()
    setup = RoleSetup(
        Role(trains=True, generates=generates),
        ModelConfig(path=str(folder)),
        engine,
        RolloutConfig(),
        dataclasses.replace(train, capabilities=train_can or train.capabilities),
        dataclasses.replace(rlcore_rollout_engines(), capabilities=rollout_can),
        TorchConfig(),
        HFConfig(),
        0,
        10,
    )
    worker = construct(WorkerContext("actor", 0, 1, 0, "here"), kind, (setup,), {}, {})
    worker.start()
    return worker


def rows():
    return DataProto.from_single_dict(
        {
            "prompts": Ragged.from_list([torch.tensor([5, 6])]),
            "uid": ["0"],
            "sample_index": torch.zeros(1, dtype=torch.int64),
        }
    )


def test_only_an_engine_whose_spec_shares_modules_is_lent_the_trained_one(model_folder):
    sharing = worker_of(ModelWorker, model_folder())
    assert isinstance(sharing.route, SharedModule)
    assert sharing.rollout.hf is sharing.train.shared_module
    copying = worker_of(ModelWorker, model_folder(), NOTHING)
    assert isinstance(copying.route, Gathered)
    assert copying.rollout.hf is not copying.train.shared_module


class Cut:
    """A train engine on one of two tensor ranks, as far as routes look at it."""

    version, dtype, shared_module, ranks = 3, torch.float32, None, SimpleNamespace(device=torch.device("cpu"))
    layout, shard_specs = Layout(tp=2), {"weight": ShardSpec((4, 2), (0,), dim=0)}


@pytest.mark.parametrize(
    ("can", "shards", "route"),
    [
        (NOTHING, 1, Gathered),
        (RolloutCapabilities(adopts_weights=True), 1, Resharded),
        (RolloutCapabilities(tensor_shards=True), 2, Resharded),
        (RolloutCapabilities(tensor_shards=True), 1, Gathered),
    ],
)
def test_shards_go_to_engines_whose_spec_adopts_weights_or_that_are_divided_themselves(can, shards, route, monkeypatch):
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks: None)
    generation = GenerationLayout(Cut.layout, tp=shards)
    found = choose_route(Cut, SimpleNamespace(version=-1), can, generation, ProcessGroups(0))
    assert type(found) is route


def test_a_sampling_worker_refuses_to_sample_without_weights_and_after_an_update_that_failed(model_folder):
    trained, worker = (worker_of(kind, model_folder()) for kind in (ModelWorker, SamplingWorker))
    assert isinstance(worker.route, Received)
    sampling = worker.setup.rollout
    with pytest.raises(DataError, match="has received none"):
        worker.generate(rows(), sampling)
    train = trained.train

    def sent(version, names):
        shapes = {name: train.shapes[name] for name in names}
        every = ((name, tensor) for name, tensor in train.export(torch.float32) if name in shapes)
        return pack_weights(list(names), every, shapes, torch.float32, version)

    worker.take_weights(sent(4, train.shapes))
    assert worker.route.is_current
    with pytest.raises(DataError, match="is missing"):
        worker.take_weights(sent(5, list(train.shapes)[1:]))
    assert worker.rollout.version == 4  # refused before any changed, and stale all the same
    with pytest.raises(DataError, match=r"sent weights of version 5, but its engine has version 4.*send the weights"):
        worker.generate(rows(), sampling)
    worker.take_weights(sent(5, train.shapes))
    assert worker.route.is_current
    assert RemoteWeights(sent(5, train.shapes)).version == worker.rollout.version


def test_a_worker_of_a_role_that_does_not_generate_says_so(model_folder):
    worker = worker_of(ModelWorker, model_folder(), generates=False)
    with pytest.raises(DataError, match=r"does not generate; declare it with Role\(generates=True\)"):
        worker.generate(rows(), None)


def no_memory(*args, **options):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("engine", "train_can", "offered"),
    [
        (EngineConfig(), None, True),
        (EngineConfig(offload=True), None, False),
        (EngineConfig(), dataclasses.replace(rlcore_train_engines().capabilities, offload=False), False),
    ],
    ids=["off", "already on", "not offered"],
)
def test_offload_is_a_remedy_only_where_it_is_off_and_the_engine_has_it(
    model_folder, monkeypatch, engine, train_can, offered
):
    worker = worker_of(ModelWorker, model_folder(), engine=engine, train_can=train_can)
    monkeypatch.setattr(worker.rollout, "generate", no_memory)
    monkeypatch.setattr(worker.train, "update", no_memory)
    monkeypatch.setattr(worker.train, "offload", lambda: None)
    batch = rows()
    calls = {
        "generate": lambda: worker.generate(batch, None),
        "update": lambda: worker.update([UpdateItem(batch[:0], [0], None, None)], 1, 0),
    }
    remedies = {"generate": "half of rollout.hf.batch_size", "update": "engine.torch.activation_checkpointing=true"}
    for call, run in calls.items():
        with pytest.raises(DeviceMemoryError) as caught:
            run()
        assert remedies[call] in str(caught.value)
        assert ("engine.offload=true" in str(caught.value)) is offered


@pytest.mark.parametrize("call", ["log_probs", "values", "score"])
def test_a_forward_that_does_not_fit_names_its_call_and_a_key(model_folder, monkeypatch, call):
    worker = worker_of(ModelWorker, model_folder())
    monkeypatch.setattr(worker.train, "compute", no_memory)
    arguments = {"log_probs": ("old_log_probs", False), "values": (), "score": ("scores",)}[call]
    with pytest.raises(DeviceMemoryError, match=rf"{call} of 1 rows .*engine.micro_batch_tokens="):
        getattr(worker, call)(rows(), *arguments)
