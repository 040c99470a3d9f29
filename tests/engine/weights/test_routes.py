"""Which route a worker takes, by the capabilities of the engine's spec, and the proof that weights arrive by it."""

import copy
import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch

from rlcore.config import EngineConfig, ModelConfig, RolloutConfig
from rlcore.engine.parallel.layout import Layout, ShardSpec
from rlcore.engine.rollout import Sampling
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.weights.fingerprint import CHECK_EVERY, checksum
from rlcore.engine.weights.generation import GenerationLayout
from rlcore.engine.weights.meter import ProcessGroups
from rlcore.engine.weights.routes import Gathered, Received, Resharded, SharedModule, choose_route
from rlcore.engine.weights.transfer import RemoteWeights, object_column, pack_weights
from rlcore.engine.worker import ModelWorker, RoleSetup, SamplingWorker
from rlcore.engines.hf.config import HFConfig
from rlcore.engines.hf.plugin import rlcore_rollout_engines
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.plugin import rlcore_train_engines
from rlcore.errors import DataError, DeviceMemoryError, WeightsError
from rlcore.plugins import Role, RolloutCapabilities
from rlcore.protocol import DataProto, Ragged
from rlcore.workers import WorkerContext
from rlcore.workers.worker import construct

NOTHING, ALL = RolloutCapabilities(), rlcore_rollout_engines().capabilities


def worker_of(kind, folder, rollout_can=ALL, train_can=None, engine=EngineConfig(), generates=True, dtype="fp32"):  # noqa: B008
    train = rlcore_train_engines()
    setup = RoleSetup(
        Role(trains=True, generates=generates),
        ModelConfig(path=str(folder), dtype=dtype),
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
    found = choose_route(Cut, SimpleNamespace(version=-1, untested=None), can, generation, ProcessGroups(0))
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
    arguments = {"log_probs": ("old_log_probs", False), "values": (), "score": ("scores", False)}[call]
    with pytest.raises(DeviceMemoryError, match=rf"{call} of 1 rows .*engine.micro_batch_tokens="):
        getattr(worker, call)(rows(), *arguments)


# Delivery

SAMPLING = Sampling(max_tokens=3)
SHARED, GATHERED = (ModelWorker, ALL), (ModelWorker, NOTHING)
BROKEN = "model.layers.1.mlp.up_proj.weight"


def sent(worker):
    """Return a worker's weights as its `send_weights` gives them."""
    names = DataProto.from_single_dict({"name": object_column(list(worker.train.shapes))})
    return worker.send_weights(names, worker.train.dtype)


def shake(worker):
    """Train: change every weight, by more than bf16 hides."""
    with torch.no_grad():
        for parameter in worker.train.model.parameters():
            parameter.mul_(1.1).add_(0.1)
    worker.train.version += 1


def dropped(name, tensor, old):
    return old if name == BROKEN else tensor


def stale(name, tensor, old):
    return old


def permuted(name, tensor, old):
    return tensor.roll(1, 0) if name == BROKEN else tensor


def rounded(name, tensor, old):
    return tensor.bfloat16().to(tensor.dtype) if name == BROKEN else tensor


def one_bit(name, tensor, old):
    changed = tensor.clone().contiguous()
    changed.view(torch.int16 if tensor.itemsize == 2 else torch.int32).view(-1)[5] ^= int(name == BROKEN)
    return changed


def break_sync(monkeypatch, engine, fault):
    """Have an engine take over other weights than it is given."""
    sync = engine.sync

    def broken(weights, version, shapes):
        held = {name: parameter.detach().clone() for name, parameter in engine.hf.named_parameters()}
        sync(((name, fault(name, tensor, held[name])) for name, tensor in weights), version, shapes)

    monkeypatch.setattr(engine, "sync", broken)


def bring(trained, worker):
    """Make a worker sample with the newest weights, by its route, in a switch that is checked."""
    trained._sends = trained.route._switches = 0
    if worker is not trained:
        worker.take_weights(sent(trained))
    worker.generate(rows(), SAMPLING)


def pair_of(kind, can, folder, dtype="fp32"):
    """Return the worker that trains, and the one that samples with its weights; they may be the same."""
    worker = worker_of(kind, folder, can, dtype=dtype)
    return (worker if kind is ModelWorker else worker_of(ModelWorker, folder, dtype=dtype)), worker


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "can"), [SHARED, GATHERED, (SamplingWorker, NOTHING)], ids=["shared", "gathered", "received"]
)
def test_sound_weights_arrive_by_every_route(model_folder, kind, can, dtype):
    trained, worker = pair_of(kind, can, model_folder(), dtype)
    for _ in range(2):
        bring(trained, worker)
        shared = can is ALL
        held = torch.float32 if shared else trained.train.dtype
        expected = {name: checksum(tensor) for name, tensor in trained.train.export(held)}
        assert worker.rollout.fingerprint() == trained.train.fingerprint(held) == expected
        shake(trained)


@pytest.mark.parametrize(
    ("fault", "differ"),
    [(dropped, BROKEN), (stale, None), (permuted, BROKEN), (rounded, BROKEN), (one_bit, BROKEN)],
    ids=lambda fault: getattr(fault, "__name__", ""),
)
@pytest.mark.parametrize(("kind", "can"), [GATHERED, (SamplingWorker, NOTHING)], ids=["gathered", "received"])
def test_weights_that_do_not_arrive_are_named_and_never_sampled_with(
    monkeypatch, model_folder, kind, can, fault, differ
):
    trained, worker = pair_of(kind, can, model_folder())
    shake(trained)
    with monkeypatch.context() as broken:
        break_sync(broken, worker.rollout, fault)
        with pytest.raises(WeightsError) as caught:
            bring(trained, worker)
        route, message = type(worker.route).__name__, str(caught.value)
        assert f"version 1 by the route {route}:" in message
        count = len(trained.train.shapes)
        assert f"1 of {count} parameters differ: {differ}." if differ else f"{count} of {count}" in message
        assert worker.rollout.version == -1
        # Neither does it sample if the error is caught, nor take the next weights on trust.
        with pytest.raises(WeightsError, match="parameters differ"):
            worker.generate(rows(), SAMPLING)
        with pytest.raises(WeightsError):
            bring(trained, worker)
    bring(trained, worker)
    assert worker.rollout.version == 1


def test_a_sampler_that_is_not_the_trained_module_is_found(model_folder):
    worker = worker_of(ModelWorker, model_folder())
    assert isinstance(worker.route, SharedModule)
    worker.rollout.hf = copy.deepcopy(worker.rollout.hf)
    shake(worker)
    with pytest.raises(WeightsError, match=r"by the route SharedModule: 26 of 26 parameters differ: model\.embed"):
        worker.generate(rows(), SAMPLING)


def test_the_first_switch_is_checked_and_every_47th_after_it(monkeypatch, model_folder):
    worker = worker_of(ModelWorker, model_folder(), NOTHING)
    shake(worker)
    compared = []
    fingerprint = worker.rollout.fingerprint
    monkeypatch.setattr(worker.rollout, "fingerprint", lambda: compared.append(worker.train.version) or fingerprint())
    for _ in range(2 * CHECK_EVERY + 1):
        worker.route.bring()
        worker.train.version += 1
    assert compared == [1, 1 + CHECK_EVERY, 1 + 2 * CHECK_EVERY]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_engine_without_a_fingerprint_is_compared_by_log_probs(monkeypatch, model_folder, dtype):
    worker = worker_of(ModelWorker, model_folder(), NOTHING, dtype=dtype)
    monkeypatch.setattr(worker.rollout, "fingerprint", lambda: None)
    worker.generate(rows(), SAMPLING)
    assert worker.rollout.version == 0
    with torch.no_grad():
        worker.train.model.hf.get_input_embeddings().weight.normal_()
    worker.train.version += 1
    worker.route._switches = 0
    break_sync(monkeypatch, worker.rollout, stale)
    with pytest.raises(WeightsError, match=r"Gathered: log-probs of a probe differ from training's by \d") as caught:
        worker.generate(rows(), SAMPLING)
    assert float(re.search(r"by ([\d.]+) nats", str(caught.value))[1]) > 1
    assert worker.rollout.version == -1
