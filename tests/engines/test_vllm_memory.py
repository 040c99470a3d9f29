"""vLLM's share of a GPU's memory, its versions, and its place in a run; these need neither vLLM nor a GPU."""

import dataclasses
import importlib.metadata
import re

import pytest
import torch

from rlcore.config import EngineConfig, ModelConfig, RolloutConfig, compose
from rlcore.engine.rollout import RolloutEngine, Sampling, Untested
from rlcore.engine.weights.fingerprint import checksum
from rlcore.engine.weights.meter import Group
from rlcore.engine.worker import ModelWorker
from rlcore.engines.vllm import internals
from rlcore.engines.vllm.config import VLLMConfig
from rlcore.engines.vllm.memory import AWAKE_SHARE, MemoryPlan, Needs, measure, plan
from rlcore.errors import ConfigError, DataError
from rlcore.plugins import PluginManager, Role
from rlcore.protocol import DataProto, Ragged
from rlcore.workers import WorkerContext
from rlcore.workers.worker import construct

MB = 1 << 20
GB = 10**9
ROOMY = Needs(row=4 * MB, rows=64, weights=1000 * MB, training=6000 * MB, kept=6000 * MB, beside_training=True)


def test_room_for_all_rows_is_taken_where_it_fits_beside_training():
    free = 9000 * MB  # 2000 MB are left, 30 % of them hold 150 rows
    assert plan(VLLMConfig(), ROOMY, free) == MemoryPlan(64 * 4 * MB, sleeps=False)


def test_where_it_does_not_fit_beside_training_vllm_sleeps():
    free = 7400 * MB
    assert plan(VLLMConfig(), ROOMY, free) == MemoryPlan(64 * 4 * MB, sleeps=True)
    awake = plan(VLLMConfig(sleep="off"), ROOMY, free)
    assert awake == MemoryPlan(int(AWAKE_SHARE * 400 * MB), sleeps=False)


def test_a_given_size_is_taken_and_decides_whether_vllm_sleeps():
    assert plan(VLLMConfig(memory=100), ROOMY, 7400 * MB) == MemoryPlan(100 * MB, sleeps=False)
    assert plan(VLLMConfig(memory=200), ROOMY, 7400 * MB) == MemoryPlan(200 * MB, sleeps=True)
    assert plan(VLLMConfig(memory=200, sleep="off"), ROOMY, 7400 * MB) == MemoryPlan(200 * MB, sleeps=False)


def test_a_pool_of_its_own_takes_more_and_never_sleeps():
    alone = Needs(row=4 * MB, rows=64, weights=1000 * MB, training=0, kept=0, beside_training=False)
    assert plan(VLLMConfig(), alone, 1200 * MB) == MemoryPlan(170 * MB, sleeps=False)


def test_one_row_that_does_not_fit_is_an_error_that_names_the_keys():
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.memory=auto: of 7\.34 GB free .* Set rollout\.vllm\.memory"):
        plan(VLLMConfig(), ROOMY, 7000 * MB)


# 8B over 8 GPUs of 80 GB, of which 75 GB are free once the shard of 1B parameters has loaded. bf16 takes 16 GB for
# vLLM. A row of 2,048 tokens x 131,072 bytes (32 layers, 8 heads of 128, keys and values) is 268,435,456 bytes.
ROW = 2048 * 131_072
SHARDED_8B = Needs(ROW, 64, 16 * GB, 12 * GB, 12 * GB, True)


def test_a_sharded_8b_model_fits():
    # 75 - 16 - 12 = 47 GB; 30 % are 14.1 GB, less than 64 rows (17.18 GB), which 85 % (39.95 GB) hold.
    assert plan(VLLMConfig(), SHARDED_8B, 75 * GB) == MemoryPlan(64 * ROW, sleeps=True)
    assert plan(VLLMConfig(sleep="off"), SHARDED_8B, 75 * GB) == MemoryPlan(14_100_000_000, sleeps=False)
    many = dataclasses.replace(SHARDED_8B, rows=256)
    assert plan(VLLMConfig(), many, 75 * GB) == MemoryPlan(39_950_000_000, sleeps=True)


def test_moments_that_move_out_leave_their_memory_to_a_vllm_that_sleeps():
    offloaded = Needs(ROW, 256, 16 * GB, 12 * GB, 4 * GB, True)
    # 85 % of 75 - 16 - 4 = 55 GB. Awake, vLLM keeps its cache while the moments are back.
    assert plan(VLLMConfig(), offloaded, 75 * GB) == MemoryPlan(46_750_000_000, sleeps=True)
    assert plan(VLLMConfig(sleep="off"), offloaded, 75 * GB) == MemoryPlan(14_100_000_000, sleeps=False)
    # vLLM's weights come back while the moments are still there: 27 GB do not hold 16 + 12.
    with pytest.raises(ConfigError, match=r"training will take 12\.00 GB"):
        plan(VLLMConfig(), offloaded, 27 * GB)


def test_beside_a_role_that_does_not_train_it_stays_awake():
    still = Needs(ROW, 256, 16 * GB, 0, 0, False)
    assert plan(VLLMConfig(), still, 75 * GB) == MemoryPlan(50_150_000_000, sleeps=False)  # 85 % of 59 GB


def test_a_share_of_the_gpu_is_a_share_of_what_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GB)
    card = torch.device("cuda", 0)
    assert measure(SHARDED_8B, card, 1.0, None) == (SHARDED_8B, 70 * GB)
    assert measure(SHARDED_8B, card, 0.5, None) == (SHARDED_8B, 35 * GB)
    assert measure(SHARDED_8B, torch.device("cpu"), 1.0, None) == (SHARDED_8B, None)


def test_of_a_tensor_group_the_least_memory_and_the_largest_needs_count(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)

    def gather(into, own, group):
        into[:] = [own, (50 * GB, 13 * GB, 3 * GB)]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    needs, free = measure(SHARDED_8B, torch.device("cuda", 0), 1.0, Group((0, 1), None))
    assert (needs.training, needs.kept, free) == (13 * GB, 12 * GB, 50 * GB)


# The worker


class Engine(RolloutEngine):
    """Records its setup and its sleeps; its rows fail."""

    def __init__(self, setup):
        self.setup, self.sleeps, self.requests, self.tokenizer = setup, 0, [], None

    def add(self, requests):
        self.requests += [each.id for each in requests]

    def step(self):
        raise RuntimeError("a step failed")

    def abort(self, ids):
        self.requests = [each for each in self.requests if each not in ids]

    @property
    def in_flight(self):
        return self.requests

    def sync(self, weights, version, shapes):
        self.version = version

    def fingerprint(self):
        return {name: checksum(tensor) for name, tensor in self.setup.shared.named_parameters()}

    def sleep(self):
        self.sleeps += 1


@pytest.fixture
def start(engine_models, model_folder, monkeypatch):
    """A function that starts the workers of roles in one process, and returns them by role."""
    monkeypatch.setattr(ModelWorker, "device", torch.device("cpu"))

    def make(roles, gpus=1.0, **engine):
        together = {}
        for name, role in roles.items():
            model = ModelConfig(path=str(model_folder("llama")))
            setup = engine_models.role_setup(role, model, EngineConfig(**engine), RolloutConfig(response_len=6))
            spec = dataclasses.replace(setup.rollout_engine, create=Engine)
            setup = dataclasses.replace(setup, rollout_engine=spec)
            context = WorkerContext(name, 0, 1, 0, "here", gpus=gpus)
            together[name] = construct(context, ModelWorker, (setup,), {}, siblings=together)
            together[name].start()
        return together

    return make


def training(worker):
    setup = worker.rollout.setup
    return setup.beside_training, setup.training_bytes, setup.kept_bytes


ACTOR, CRITIC = Role(trains=True, generates=True), Role(trains=True)


@pytest.mark.parametrize(("offload", "kept"), [(False, 12), (True, 4)])
def test_the_parameters_of_all_roles_that_train_count(start, offload, kept):
    together = start({"critic": CRITIC, "ref": Role(), "actor": ACTOR}, offload=offload)
    count = 2 * sum(each.numel() for each in together["actor"].train.held_parameters().values())
    assert training(together["actor"]) == (True, 12 * count, kept * count)


def test_roles_that_do_not_train_need_nothing(start):
    assert training(start({"actor": Role(generates=True), "ref": Role()})["actor"]) == (False, 0, 0)


def test_a_role_that_trains_and_loads_later_is_known_without_its_size(start, monkeypatch):
    began = ModelWorker.start
    later = {}
    monkeypatch.setattr(ModelWorker, "start", lambda self: later.setdefault(self._context.role, self))
    start({"actor": Role(generates=True), "critic": CRITIC})
    began(later["actor"])
    assert training(later["actor"]) == (True, 0, 0)


@pytest.mark.parametrize(("gpus", "share"), [(0.5, 0.5), (1.0, 1.0), (2.0, 1.0), (0.0, 1.0)])
def test_the_engine_is_told_its_share_of_the_gpu(start, gpus, share):
    assert start({"actor": ACTOR}, gpus)["actor"].rollout.setup.gpu_share == share


def test_a_failed_call_leaves_the_engine_asleep(start):
    actor = start({"actor": ACTOR})["actor"]
    rows = {"prompts": Ragged.from_list([torch.tensor([5, 6])]), "uid": ["0:0"], "sample_index": torch.tensor([0])}
    batch = DataProto.from_single_dict(rows)
    with pytest.raises(RuntimeError, match="a step failed"):
        actor.generate(batch, Sampling(max_tokens=4))
    assert (actor.rollout.sleeps, actor.rollout.requests) == (1, [])
    actor.rollout.requests = ["another's"]
    with pytest.raises(DataError, match="needs an idle engine"):
        actor.generate(batch, Sampling(max_tokens=4))
    assert actor.rollout.sleeps == 1, "rows in flight need their keys and values"


def test_a_cpu_keeps_its_size():
    assert plan(VLLMConfig(), ROOMY, None) == MemoryPlan(1 << 30, sleeps=False)
    assert plan(VLLMConfig(memory=64, sleep="on"), ROOMY, None) == MemoryPlan(64 * MB, sleeps=True)


def test_needs_of_a_model_are_its_heads_layers_and_weights():
    """The 0.5B model of docs/gpu.md: 12,288 bytes of keys and values for a token in bf16."""
    import transformers

    config = transformers.Qwen2Config(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    shapes = {"a": (1000, 10), "b": (7,)}
    options = {"rows": 3, "training": 120, "kept": 40, "beside_training": True}
    needs = Needs.of(config, shapes, torch.bfloat16, row_tokens=612, ranks=1, **options)
    assert needs == Needs(12_288 * 612, 3, 2 * 10_007, 120, 40, True)
    assert Needs.of(config, shapes, torch.bfloat16, row_tokens=0, ranks=2, **options).row == 6_144 * 2048


def test_the_key_of_earlier_versions_is_named():
    with pytest.raises(
        ConfigError, match=r"the key rollout\.vllm\.kv_cache_mb is now rollout\.vllm\.memory: write .*=64"
    ):
        compose(["experiment=quickstart", "+rollout.vllm.kv_cache_mb=64"], PluginManager.load())


@pytest.mark.parametrize("found", ["0.20.2", "0.20.2+cu130", "0.28.0", "0.33.0", "1.0.0rc1"])
def test_every_version_from_the_first_on_is_taken(monkeypatch, found):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    internals.check_version()


@pytest.mark.parametrize("found", ["0.19.1", "0.20.1", "0.1.dev1+g123"])
def test_earlier_versions_are_refused_by_name(monkeypatch, found):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with pytest.raises(
        ConfigError, match=rf"vllm {re.escape(found)} is installed, .* from 0\.20\.2 on; install a newer"
    ):
        internals.check_version()


@pytest.mark.parametrize(
    ("found", "runner", "name"),
    [
        ("0.32.0", "V1", None),
        ("0.20.2+cu130", "V1", None),
        ("0.31.0", "V1", "vLLM 0.31.0 with its V1 model runner"),
        ("0.33.0", "V2", "vLLM 0.33.0 with its V2 model runner"),
        ("0.32.0", "V2", "vLLM 0.32.0 with its V2 model runner"),
    ],
)
def test_what_no_test_has_seen_is_tried(monkeypatch, found, runner, name):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    untested = internals.untested(runner)
    assert (untested.name if untested else None) == name
    assert untested is None or untested.tested == "vLLM 0.20.2 (V1), vLLM 0.32.0 (V1)"


@pytest.mark.parametrize(
    ("has_v2", "on_cpu", "asked", "runner"),
    [
        (True, False, None, "V2"),
        (True, False, "0", "V1"),
        (True, True, None, "V1"),
        (False, False, None, "V1"),
        (False, False, "1", "V1"),
    ],
)
def test_the_runner_is_vllms_choice_where_it_takes_the_noise(monkeypatch, tmp_path, has_v2, on_cpu, asked, runner):
    package = tmp_path / "vllm"
    (package / internals.V2_PROCESSORS if has_v2 else package).mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    assert internals.choose_runner(on_cpu=on_cpu) == runner


def test_an_untested_version_that_does_not_start_is_named_with_those_that_pass():
    def start():
        raise ImportError("no module named vllm.v1.sample")

    untested = Untested("vLLM 0.40.0 with its V1 model runner", internals.known_to_pass())
    with (
        pytest.raises(ConfigError, match=r"vLLM 0\.40\.0 .* ImportError: no module.* Known to pass: vLLM 0\.20\.2"),
        internals.explaining(untested),
    ):
        start()
    with pytest.raises(ImportError), internals.explaining(None):
        start()
