"""Whole parameters between processes: a follower beside its leader and on a pool of its own, and what does not fit."""

import dataclasses
import sys

import pytest
import torch

from rlcore.config import ClusterConfig, Config, EngineConfig, ModelConfig, RolloutConfig
from rlcore.engine.weights.transfer import RemoteWeights, pack_weights, packed_specs
from rlcore.engine.worker import ModelWorker, SamplingWorker
from rlcore.engines.torch import state
from rlcore.errors import DataError, WeightsError
from rlcore.plugins import Role
from rlcore.protocol import DataProto
from rlcore.roles.handles import PolicyHandle, StepClock
from rlcore.roles.rollout_pool import RolloutPool
from rlcore.roles.weight_exporter import WeightExporter
from rlcore.workers import ClassWithInitArgs, Dispatch, Worker, make_executor, register, wait_for

ROLES = {"actor": Role(trains=True, generates=True), "average": Role(follows="actor")}


class ProbedWorker(ModelWorker):
    """A model worker whose weights can be looked at, and be made other ones."""

    @register(Dispatch.ONE_TO_ALL)
    def shake(self) -> None:
        """Add noise to all weights, the same under any number of ranks; the next delivery brings checksums."""
        self._sends = 0
        generator = torch.Generator().manual_seed(5)
        for name, parameter in self.train.parameters.named_local():
            noise = torch.randn(parameter.shape, generator=generator) / 7
            state.local(parameter.data).add_(self.train.parameters.shard_of(name, noise))

    @register(Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor]:
        """Return every parameter whole."""
        return {name: tensor.clone() for name, tensor in self.train.export(torch.float32)}


class DroppingWorker(SamplingWorker):
    """A sampling worker whose engine can be made to leave a parameter as it is."""

    @register(Dispatch.ONE_TO_ALL)
    def drop(self, name: str) -> None:
        """Have the engine keep the old values of this parameter."""
        sync, own = self.rollout.sync, dict(self.rollout.hf.named_parameters())

        def dropping(weights, version, shapes):
            old = own[name].detach().clone()
            sync(((each, old if each == name else tensor) for each, tensor in weights), version, shapes)

        self.rollout.sync = dropping

    @register(Dispatch.ONE_TO_ALL)
    def fingerprint(self) -> dict[str, int]:
        """Return the checksums of the weights that it samples with."""
        return self.rollout.fingerprint()


def made(setup, **roles):
    return {name: ClassWithInitArgs(ProbedWorker, dataclasses.replace(setup, role=r)) for name, r in roles.items()}


def shapes_of(weights):
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def setup_of(engine_models, folder):
    engine = EngineConfig(lr=1e-2)
    return engine_models.role_setup(Role(), ModelConfig(path=str(folder)), engine, RolloutConfig())


@pytest.mark.ray
def test_a_follower_on_another_pool_has_the_same_bits_as_one_beside_its_leader(
    ray_cluster, engine_models, model_folder
):
    """Leader on 2 ranks; follower beside it on 2, then on a pool of 1. Shares 0.3 and 1, one after the other."""
    setup = setup_of(engine_models, model_folder())
    config, clock = Config(algorithm="", algo=None, model=setup.model), StepClock()
    seen = []
    with make_executor(ClusterConfig(), by_value_modules=[sys.modules[__name__]]) as executor:
        pools = executor.resource_pool(2), executor.resource_pool(1)
        beside = executor.worker_group(pools[0], made(setup, **ROLES), name="beside")
        apart = executor.worker_group(pools[1], made(setup, average=ROLES["average"]), name="apart")["average"]
        for group in (*beside.values(), apart):
            group.start()
        beside["actor"].shake()
        for group, leader in ((beside["average"], None), (apart, beside["actor"])):
            follower = PolicyHandle("average", ROLES["average"], group, config, clock, leader=leader)
            before = group.weights()[0]
            seen.append([])
            for share in (0.3, 1.0):
                follower.follow(share)
                seen[-1].append(group.weights()[0])
            assert group.version()[0] == 2
        theirs = beside["actor"].weights()[0]
        assert not apart.fetched
        assert not beside["actor"].fetched
    for name, tensor in theirs.items():
        torch.testing.assert_close(seen[0][0][name], before[name] + 0.3 * (tensor - before[name]))
        assert torch.equal(seen[0][0][name], seen[1][0][name])
        assert torch.equal(seen[0][1][name], tensor)
        assert torch.equal(seen[1][1][name], tensor)


@pytest.mark.ray
def test_a_pool_of_its_own_has_the_trained_weights_or_says_which_it_has_not(ray_cluster, engine_models, model_folder):
    """Trained on 2 ranks with FSDP; sampled on one in another process, which then loses a parameter."""
    setup, lost = setup_of(engine_models, model_folder()), "model.layers.0.mlp.down_proj.weight"
    with make_executor(ClusterConfig(), by_value_modules=[sys.modules[__name__]]) as executor:
        actor = executor.worker_group(executor.resource_pool(2), made(setup, actor=ROLES["actor"]), name="actor")[
            "actor"
        ]
        sampling = executor.worker_group(executor.resource_pool(1), ClassWithInitArgs(DroppingWorker, setup))
        pool = RolloutPool(sampling, WeightExporter(actor, torch.float32), 0)
        for group in (actor, sampling):
            group.start()
        pool.prepare(1)
        actor.shake()
        pool.mark_stale()
        pool.prepare(2)
        assert sampling.fingerprint()[0] == actor.fingerprint()[0]
        sampling.drop(lost)
        actor.shake()
        pool.mark_stale()
        pool.prepare(3)
        with pytest.raises(WeightsError, match=rf"route Received: 1 of 26 parameters differ: {lost}\."):
            wait_for(sampling.outstanding())


def test_a_parameter_that_does_not_fit_is_named_and_nothing_is_changed(make_engine):
    engine = make_engine()
    weights = {name: tensor + 1 for name, tensor in engine.export(torch.float32)}
    names = list(weights)
    before = {name: tensor.clone() for name, tensor in engine.export(torch.float32)}
    short = {name: t[:-1] if name == names[0] else t for name, t in weights.items() if name != names[-1]}
    short["extra"] = torch.zeros(2)
    packed = pack_weights(list(short), short.items(), shapes_of(short), torch.float32, 7)
    rows, width = before[names[0]].shape
    sent = RemoteWeights(packed)
    with pytest.raises(
        DataError,
        match=rf"{names[-1]} is missing; extra is unknown; {names[0]} has shape \[{rows - 1}, {width}\], not \[{rows}",
    ):
        engine.load(sent, sent.shapes, 1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.export(torch.float32))
    assert engine.version == 0


def test_a_parameter_that_is_not_made_is_not_sent_as_what_was_in_memory():
    weights = {"first": torch.ones(2), "second": torch.ones(3)}
    shapes = shapes_of(weights)
    assert RemoteWeights(pack_weights(["second"], weights.items(), shapes, torch.float32, 1))["second"].tolist() == [
        1,
        1,
        1,
    ]
    with pytest.raises(DataError, match="weights are missing: second"):
        pack_weights(["second"], [("first", weights["first"])], shapes, torch.float32, 1)


def test_bf16_weights_are_those_of_the_forward(make_engine):
    engine = make_engine()
    engine.dtype = torch.bfloat16
    sent = RemoteWeights(
        pack_weights(list(engine.shapes), engine.export(engine.dtype), engine.shapes, torch.bfloat16, 3)
    )
    assert sent.version == 3
    for name, tensor in engine.export(torch.float32):
        assert torch.equal(sent[name], tensor.bfloat16())


class OneNumber(Worker):
    """A model of one weight, the number of the step that it was trained in; a copy notes what it holds."""

    def __init__(self) -> None:
        self.step = 0

    @register(Dispatch.RANK_ZERO)
    def parameter_names(self) -> list[str]:
        return ["step"]

    @register(Dispatch.ONE_TO_ALL)
    def train(self, step: int) -> None:
        self.step = step

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("name",), gives=packed_specs)
    def send_weights(self, names: DataProto, dtype: torch.dtype) -> DataProto:
        packed = pack_weights(["step"], [("step", torch.tensor([self.step]))], {"step": (1,)}, dtype, self.step)
        packed["checksum"] = ["of a copy that does not compare"]
        return packed

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def take_weights(self, weights: DataProto, share: float = 1.0) -> None:
        self.step = int(RemoteWeights(weights)["step"])

    @register(Dispatch.RANK_ZERO)
    def held(self) -> int:
        return self.step


def play(ahead: int, steps: int, synced: tuple[int, ...] = ()) -> list[int]:
    """Return the step at whose end each step's samples got their weights; a sync follows the steps in `synced`."""
    used = []
    with make_executor(ClusterConfig(executor="in_process", workers=1)) as executor:
        trained, sampling = (
            executor.worker_group(executor.resource_pool(), ClassWithInitArgs(OneNumber)) for _ in range(2)
        )
        copy = RolloutPool(sampling, WeightExporter(trained, torch.float32), ahead)
        for step in range(1, steps + 1):
            copy.prepare(step)
            used.append(sampling.held())
            trained.train(step)
            copy.mark_stale()
            copy.end_step(step)
            if step in synced:
                copy.sync()
    return used


def test_which_weights_each_step_samples_with():
    assert play(0, 4) == [0, 1, 2, 3]
    assert play(1, 5) == [0, 0, 1, 2, 3]
    assert play(2, 5) == [0, 0, 0, 1, 2]
    assert play(1, 6, synced=(3,)) == [0, 0, 1, 3, 3, 4]  # the newest after a sync, and from there on as before
