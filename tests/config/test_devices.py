"""What `auto` becomes, by the GPUs that are found. GPUs are stood in for where rlcore asks torch for them."""

import pytest
import torch
import yaml

from rlcore.config import compose, from_yaml, to_yaml
from rlcore.config.devices import Gpus, device_lines, local_gpus, uses_gpus
from rlcore.errors import ConfigError

NONE = Gpus(reason="torch finds none")
ONE = Gpus(1, "NVIDIA H100 80GB HBM3", True)
EIGHT = Gpus(8, "NVIDIA H100 80GB HBM3", True)
OLD = Gpus(1, "Tesla V100-SXM2-16GB", False)
IN_PROCESS = ["cluster=in_process"]


@pytest.fixture
def made(plugins):
    def make(gpus, *overrides, base=None):
        words = ["algo=echo", "algo.target=you", *overrides]
        config = compose(words, plugins, base=base, find_gpus=lambda address: gpus)
        return config.cluster.workers, config.cluster.gpus_per_worker, config.model.dtype

    return make


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (NONE, [], (2, 0.0, "fp32")),
        (NONE, ["cluster=local"], (2, 0.0, "fp32")),
        (NONE, IN_PROCESS, (1, 0.0, "fp32")),
        (NONE, ["cluster.executor=in_process"], (1, 0.0, "fp32")),
        (ONE, [], (1, 1.0, "bf16")),
        (ONE, IN_PROCESS, (1, 1.0, "bf16")),
        (EIGHT, IN_PROCESS, (1, 1.0, "bf16")),
        (EIGHT, ["cluster=local"], (8, 1.0, "bf16")),
        (OLD, [], (1, 1.0, "fp32")),
        # Given values win.
        (ONE, ["cluster.gpus_per_worker=0"], (2, 0.0, "fp32")),
        (ONE, ["model.dtype=fp32"], (1, 1.0, "fp32")),
        (OLD, ["model.dtype=bf16"], (1, 1.0, "bf16")),
        (NONE, ["model.dtype=bf16"], (2, 0.0, "bf16")),
        (EIGHT, ["cluster.workers=3"], (3, 1.0, "bf16")),
        (EIGHT, ["cluster.gpus_per_worker=2"], (4, 2.0, "bf16")),
        (ONE, ["cluster.gpus_per_worker=0.5"], (1, 0.5, "bf16")),
        # Whole groups of pipeline stages and tensor-parallel ranks.
        (Gpus(7, "H100", True), ["engine.tp=2"], (6, 1.0, "bf16")),
        (EIGHT, ["engine.tp=2", "engine.pp=3"], (6, 1.0, "bf16")),
        (ONE, ["engine.tp=2"], (2, 1.0, "bf16")),  # more than there are: Ray says so
        # Pools divide the GPUs, and share one where there are fewer.
        (EIGHT, ["cluster.pools={a: [actor], b: [ref], reward: [reward]}"], (4, 1.0, "bf16")),
        (EIGHT, ["cluster.pools={a: [actor], b: {roles: [ref], workers: 2}}"], (8, 1.0, "bf16")),
        (ONE, ["cluster.pools={a: [actor], b: [rollout]}"], (1, 0.5, "bf16")),
        (
            ONE,
            ["cluster.gpus_per_worker=0", "cluster.pools={a: {roles: [actor], gpus_per_worker: 1}}"],
            (2, 0.0, "bf16"),
        ),
    ],
)
def test_devices_and_precision_follow_the_gpus(gpus, overrides, expected, made):
    assert made(gpus, *overrides) == expected


@pytest.mark.parametrize("gpus", [NONE, ONE])
def test_roles_have_their_own(gpus, plugins):
    overrides = ["algo=echo", "algo.target=you", "roles.actor.dtype=auto", "roles.ref.dtype=fp32", "roles.old.lr=1.0"]
    config = compose([*overrides, "model.dtype=fp32"], plugins, find_gpus=lambda address: gpus)
    assert [config.roles[name].dtype for name in ("actor", "ref", "old")] == [
        "bf16" if gpus.count else "fp32",
        "fp32",
        None,
    ]


def test_auto_is_for_few_keys(made):
    with pytest.raises(ConfigError, match=r"cluster.cpus_per_worker = 'auto' has the wrong type"):
        made(ONE, "cluster.cpus_per_worker=auto")
    with pytest.raises(ConfigError, match=r"cluster.workers = 'four' has the wrong type"):
        made(ONE, "cluster.workers=four")
    with pytest.raises(ConfigError, match=r"model.dtype = 'fp16' is not one of fp32, bf16"):
        made(ONE, "model.dtype=fp16")


def test_micro_batches_stay_auto_as_only_a_worker_can_measure(plugins):
    words = ["algo=echo", "algo.target=you"]
    for gpus in (NONE, ONE):
        config = compose(words, plugins, find_gpus=lambda address, gpus=gpus: gpus)
        assert config.engine.micro_batch_tokens == "auto"
        assert uses_gpus(config.cluster) is bool(gpus.count)
    for given in (0, 300):
        config = compose([*words, f"engine.micro_batch_tokens={given}"], plugins, find_gpus=lambda address: ONE)
        assert config.engine.micro_batch_tokens == given
        assert from_yaml(to_yaml(config), plugins) == config
    for given, fault in ((-1, "= -1 is out of bounds"), ("many", "= 'many' has the wrong type")):
        with pytest.raises(ConfigError, match=f"engine.micro_batch_tokens {fault}"):
            compose([*words, f"engine.micro_batch_tokens={given}"], plugins, find_gpus=lambda address: ONE)


@pytest.mark.parametrize(
    ("overrides", "uses"),
    [
        (["cluster.gpus_per_worker=0.5"], True),
        (["cluster.gpus_per_worker=0", "cluster.pools={a: {roles: [actor], gpus_per_worker: 1}}"], True),
        (["cluster.gpus_per_worker=0", "cluster.pools={a: [actor]}"], False),
        (["cluster.gpus_per_worker=0", "cluster.pools=auto"], False),
    ],
)
def test_whether_a_run_uses_gpus(overrides, uses, plugins):
    config = compose(["algo=echo", "algo.target=you", *overrides], plugins, find_gpus=lambda address: ONE)
    assert uses_gpus(config.cluster) is uses


def test_only_auto_asks_for_gpus(plugins):
    def never(address):
        raise AssertionError("asked")

    given = ["cluster.workers=2", "cluster.gpus_per_worker=0", "model.dtype=fp32"]
    saved = compose(["algo=echo", "algo.target=you", *given], plugins, find_gpus=never)
    compose([], plugins, base=yaml.safe_load(to_yaml(saved)), find_gpus=never)
    asked = []
    address = ["cluster.address=1.2.3.4:5", "algo=echo", "algo.target=you"]
    compose(address, plugins, find_gpus=lambda address: asked.append(address) or ONE)
    assert asked == ["1.2.3.4:5"]


def begun_on(gpus, folder, plugins, *overrides):
    words = ["algo=echo", "algo.target=you", f"run.dir={folder}", *overrides]
    config = compose(words, plugins, find_gpus=lambda address: gpus)
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    return words


def test_a_run_that_has_begun_keeps_its_device(made, tmp_path, plugins):
    words = begun_on(NONE, tmp_path / "run", plugins, "roles.actor.dtype=auto")
    assert made(ONE, *words) == (1, 1.0, "bf16")  # no step has been made: nothing to keep
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert made(ONE, *words) == (2, 0.0, "fp32")
    again = compose(words, plugins, find_gpus=lambda address: ONE)
    assert again.roles["actor"].dtype == "fp32"
    assert device_lines(again, ONE)[0].endswith(
        "on the CPU, as cluster.gpus_per_worker is 0, as given or as the run began; there is 1 x NVIDIA H100 80GB HBM3"
    )
    assert made(ONE, *words, "cluster.gpus_per_worker=1")[1] == 1.0  # which same_run then refuses


def test_a_run_on_gpus_is_resumed_on_gpus(made, tmp_path, plugins):
    words = begun_on(EIGHT, tmp_path / "run", plugins)
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert made(EIGHT, *words) == (8, 1.0, "bf16")
    assert made(Gpus(4, "H100", True), *words) == (4, 1.0, "bf16")  # `workers` may change
    assert made(OLD, *words) == (1, 1.0, "bf16")
    with pytest.raises(
        ConfigError, match=r"began with 1 GPUs for each worker, and here is no GPU \(torch finds none\)"
    ):
        made(NONE, *words)


@pytest.mark.parametrize(
    ("gpus", "overrides", "device", "precision"),
    [
        (
            NONE,
            [],
            "2 workers on Ray, on the CPU; there is no GPU (torch finds none)",
            "fp32, as bf16 is chosen on a GPU",
        ),
        (NONE, [*IN_PROCESS, "model.dtype=bf16"], "this process, on the CPU; there is", "bf16, as model.dtype says so"),
        (ONE, [], "1 worker on Ray, 1 GPU each; there is 1 x NVIDIA H100", "bf16, as the GPU has bf16"),
        (ONE, ["model.dtype=fp32"], "1 worker on Ray, 1 GPU each", "fp32, as model.dtype says so"),
        (OLD, [], "1 worker on Ray, 1 GPU each; there is 1 x Tesla V100", "fp32, as the GPU has no bf16"),
    ],
)
def test_the_lines_say_why(gpus, overrides, device, precision, plugins):
    config = compose(["algo=echo", "algo.target=you", *overrides], plugins, find_gpus=lambda address: gpus)
    lines = device_lines(config, gpus)
    assert lines[0].startswith(f"device: {device}")
    assert lines[1].startswith(f"precision: {precision}")


def test_torch_is_asked_for_gpus(monkeypatch):
    kinds = [("NVIDIA A100", (8, 0)), ("NVIDIA H100", (9, 0))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: kinds[index][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: kinds[index][1])
    monkeypatch.setattr(torch.version, "hip", None)
    assert local_gpus() == Gpus(2, "NVIDIA A100 or NVIDIA H100", True)
    kinds.append(("Tesla T4", (7, 5)))
    assert not local_gpus().bf16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local_gpus() == Gpus(reason="CUDA_VISIBLE_DEVICES is empty")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert local_gpus().reason == "torch is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert local_gpus().reason == "torch finds none"
