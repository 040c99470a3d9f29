"""The trial of an engine in a version that no test has seen. They cost 6 s of a core."""

import dataclasses
import logging
import re

import pytest
import torch

from rlcore.config import EngineConfig, ModelConfig, RolloutConfig
from rlcore.engine.rollout import Sampling, Untested
from rlcore.engine.worker import ModelWorker, RoleSetup, SamplingWorker
from rlcore.engines.hf.config import HFConfig
from rlcore.engines.hf.plugin import rlcore_rollout_engines
from rlcore.engines.hf.rollout import HFRollout
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.plugin import rlcore_train_engines
from rlcore.errors import WeightsError
from rlcore.plugins import Role, RolloutCapabilities
from rlcore.protocol import DataProto, Ragged
from rlcore.workers import WorkerContext
from rlcore.workers.worker import construct

COPYING, SHARING = RolloutCapabilities(), rlcore_rollout_engines().capabilities
UNTESTED = Untested("engine 9", "engine 7, engine 8")
SAMPLING = Sampling(max_tokens=8)


class Watched(HFRollout):
    """Keeps the names of the rows that it sampled, and what it was given."""

    untested: Untested | None = UNTESTED

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.events: list[str] = []

    def sync(self, weights, version, shapes):
        self.events.append("sync")
        super().sync(weights, version, shapes)

    def sleep(self):
        self.events.append("sleep")

    def generate(self, batch, sampling):
        self.events.append("sample " + batch.view("uid")[0])
        return super().generate(batch, sampling)


class Known(Watched):
    untested = None


class Forgetful(Watched):
    """Draws other tokens for the same row."""

    def generate(self, batch, sampling):
        return super().generate(batch, dataclasses.replace(sampling, call=len(self.events)))


class Stale(Watched):
    """Takes its first weights, and no later ones."""

    def sync(self, weights, version, shapes):
        held = dict(self.hf.named_parameters()) if self.events else {}
        super().sync(((name, held.get(name, tensor)) for name, tensor in weights), version, shapes)


class HeadOfTheStart(Watched):
    """Computes with the output layer that it has from its model's folder, as packed weights would."""

    def sync(self, weights, version, shapes):
        head = self.hf.get_output_embeddings()
        packed = torch.nn.Parameter(head.weight.detach().clone()) if not self.events else head.weight
        super().sync(weights, version, shapes)
        head.weight = packed


class WithoutFingerprint(Watched):
    def fingerprint(self):
        return None


class Cold(WithoutFingerprint):
    """Says that its rows were less likely than they were."""

    def generate(self, batch, sampling):
        out = super().generate(batch, sampling)
        if len(self.events) > 3:  # after the weights under which all tokens are alike
            out["rollout_log_probs"] = out.view("rollout_log_probs").with_values(
                out.view("rollout_log_probs").values - 0.5
            )
        return out


class Changed(Watched):
    """Lacks what rlcore calls."""

    def generate(self, batch, sampling):
        raise AttributeError("no attribute 'sample'")


def worker_of(engine, folder, kind=ModelWorker, can=COPYING, **config):
    def create(setup):
        return engine(setup.model, batch_size=4, device=setup.device, shared=setup.shared)

    spec = rlcore_rollout_engines()
    setup = RoleSetup(
        Role(trains=True, generates=True),
        ModelConfig(path=str(folder)),
        EngineConfig(**config),
        RolloutConfig(),
        rlcore_train_engines(),
        dataclasses.replace(spec, create=create, capabilities=can),
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
            "prompts": Ragged.from_list([torch.tensor([5, 6]), torch.tensor([7, 8, 9])]),
            "uid": ["0", "1"],
            "sample_index": torch.zeros(2, dtype=torch.int64),
        }
    )


def warnings(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


@pytest.mark.parametrize("kind", ["qwen2", "llama"], ids=["tied", "untied"])
def test_a_run_after_a_trial_is_the_run_without_it(model_folder, caplog, kind):
    folder = model_folder(kind)
    tried, plain = (worker_of(engine, folder) for engine in (Watched, Known))
    outs = [worker.generate(rows(), SAMPLING) for worker in (tried, plain)]
    for name in ("responses", "rollout_log_probs"):
        assert torch.equal(*(out.view(name).values for out in outs))
    assert tried.rollout.fingerprint() == plain.rollout.fingerprint() == tried.train.fingerprint(torch.float32)
    assert tried.route._switches == plain.route._switches == 1
    assert tried.switch_bytes() == plain.switch_bytes()
    assert plain.rollout.events == ["sync", "sample 0", "sleep"]
    probe = "sample probe"
    assert tried.rollout.events == ["sync", probe, "sleep", "sync", probe, probe, "sample 0", "sleep"]
    # The next weights are delivered as ever.
    tried.rollout.events.clear()
    tried.train.version += 1
    tried.generate(rows(), SAMPLING)
    assert tried.rollout.events == ["sync", "sample 0", "sleep"]
    (line,) = warnings(caplog)
    assert line.startswith("no test of rlcore has seen engine 9; it was tried with its first weights and passed. Known")
    assert line.endswith("engine 7, engine 8")


@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        (Forgetful, r"the same row has tokens \[\d.*\], and sampled again \[\d"),
        (HeadOfTheStart, r"with a log-prob of -4\.575 nats, but its log-probs are -\d"),
        (Changed, r"and failed: AttributeError: no attribute 'sample'\. Known"),
        (Stale, r"differ from training's by [\d.]+ nats: they are -4\.575 on average, and training's -\d"),
        (Cold, r"differ from training's by 0\.5 nats: they are -[\d.]+ on average, and training's -"),
    ],
)
@pytest.mark.parametrize("kind", ["qwen2", "llama"], ids=["tied", "untied"])
def test_a_fault_is_named_with_both_values_and_nothing_is_sampled(model_folder, engine, fault, kind):
    worker = worker_of(engine, model_folder(kind))
    for _ in range(2):  # nor after the error is caught
        with pytest.raises(WeightsError, match=fault) as caught:
            worker.generate(rows(), SAMPLING)
        assert str(caught.value).startswith("engine 9 was tried with its first weights")
        assert "Known to pass: engine 7, engine 8. Install one of these" in str(caught.value)
        assert worker.rollout.version == -1
        worker.rollout.events.clear()
    assert "sample 0" not in worker.rollout.events


def test_an_engine_without_a_fingerprint_is_compared_once(model_folder, monkeypatch):
    worker = worker_of(WithoutFingerprint, model_folder())
    computed, compute = [], worker.train.compute
    monkeypatch.setattr(
        worker.train, "compute", lambda batch, names: computed.append(len(batch)) or compute(batch, names)
    )
    worker.generate(rows(), SAMPLING)
    assert computed == [2]
    assert worker.rollout.events.count("sample probe") == 3


def test_with_offload_every_train_engine_leaves_before_each_row_and_none_is_asked(model_folder, monkeypatch, caplog):
    folder = model_folder()
    worker, other = worker_of(WithoutFingerprint, folder, offload=True), worker_of(Known, folder, offload=True)
    worker._siblings = {"critic": other}
    for each, name in ((worker, "actor"), (other, "critic")):
        offload = each.train.offload
        monkeypatch.setattr(
            each.train,
            "offload",
            lambda offload=offload, name=name: worker.rollout.events.append(f"{name} leaves") or offload(),
        )
    monkeypatch.setattr(worker.train, "compute", None)
    worker.generate(rows(), SAMPLING)
    trial = ["actor leaves", "critic leaves", "sample probe"]
    assert worker.rollout.events[:12] == ["sync", *trial, "sleep", "sync", *trial, *trial]
    assert all(each.train._offloader.is_offloaded for each in (worker, other))
    assert "passed, without a look at training's log-probs." in warnings(caplog)[0]


def test_the_trained_module_itself_is_tried_without_other_weights(model_folder):
    worker = worker_of(Watched, model_folder(), can=SHARING)
    before = worker.train.fingerprint(torch.float32)
    worker.generate(rows(), SAMPLING)
    assert worker.rollout.events == ["sample probe", "sample probe", "sample 0", "sleep"]
    assert worker.train.fingerprint(torch.float32) == before


def test_an_engine_in_other_processes_is_tried_with_the_weights_that_it_receives(model_folder, caplog):
    folder = model_folder()
    trained, sampling = worker_of(Known, folder), worker_of(Watched, folder, kind=SamplingWorker)
    names = DataProto.from_single_dict({"name": list(trained.train.shapes)})
    weights = trained.send_weights(names, torch.float32)
    sampling.take_weights(weights)
    assert sampling.rollout.events == ["sync", "sample probe", "sleep", "sync", "sample probe", "sample probe"]
    assert sampling.rollout.fingerprint() == trained.train.fingerprint(torch.float32)
    assert re.search("passed, without a look", warnings(caplog)[0])
    broken = worker_of(HeadOfTheStart, folder, kind=SamplingWorker)
    with pytest.raises(WeightsError, match="engine 9 was tried"):
        broken.take_weights(weights)
    with pytest.raises(WeightsError, match="engine 9 was tried"):
        broken.generate(rows(), SAMPLING)
