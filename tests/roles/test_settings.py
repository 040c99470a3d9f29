"""Settings of single roles: a frozen bf16 teacher beside an fp32 student, their engines and rollout keys."""

import json
from dataclasses import replace

import pytest
import torch

from rlcore.cli import main
from rlcore.config import compose
from rlcore.errors import ConfigError
from rlcore.plugins import CRITIC, PluginManager, Role
from rlcore.rewards.compose import resolve
from rlcore.roles.handles import TOKENS
from rlcore.roles.placement import plan_pools, restrict_to_roles
from rlcore.roles.settings import resolve_roles, role_config, with_settings
from rlcore.training.preflight import preflight
from rlcore.training.run import check_roles, open_run

ROLES = {"actor": Role(trains=True, generates=True), "ref": Role()}
SMALL = [
    *("algo=grpo", "algo.kl_coef=0.1", "algo.group_size=2", "cluster=in_process", "tracker=none", "engine.lr=1e-3"),
    *(
        "rollout.response_len=5",
        "data.batch_size=2",
        "data.max_rows=128",
        "data.eval_size=2",
        "trainer.total_steps=2",
        "trainer.eval_every=0",
    ),
]


@pytest.fixture(scope="module")
def plugins():
    return PluginManager.load()


@pytest.fixture(scope="module")
def make(plugins):
    return lambda *overrides: compose([*SMALL, *overrides], plugins)


def test_the_users_settings_come_before_the_algorithms_and_those_before_the_runs(make):
    config = make("roles.ref.dtype=bf16", "roles.ref.rollout={temperature: 0.5}", "roles.actor.lr=0.5")
    declared = {**ROLES, "ref": Role(dtype="fp32", lr=0.25, model="tiny", rollout={"temperature": 2.0, "top_k": 3})}
    roles = resolve_roles(declared, config)
    ref, actor = (role_config(config, name, roles[name]) for name in ("ref", "actor"))
    assert (ref.model.dtype, ref.model.path, ref.engine.lr) == ("bf16", "tiny", 0.25)
    assert (ref.rollout.temperature, ref.rollout.top_k, ref.rollout.response_len) == (0.5, 3, 5)
    assert (actor.model.dtype, actor.engine.lr) == ("fp32", 0.5)
    assert (actor.rollout, actor.trainer) == (config.rollout, config.trainer)
    assert with_settings(declared, make()) == declared


def test_a_run_folder_keeps_the_settings(make, plugins):
    from rlcore.config import from_yaml, same_run, to_yaml

    config = make("roles.ref.dtype=bf16")
    assert from_yaml(to_yaml(config), plugins) == config
    assert same_run(config, make()) == ["roles"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "roles.reff.dtype=bf16",
            r"roles\.reff: this run has no role 'reff'\. Did you mean 'ref'\? Its roles: act",
        ),
        ("roles.ref.dtype=fp16", r"roles\.ref\.dtype = 'fp16' is not one of fp32, bf16"),
        (
            "roles.ref.precision=bf16",
            r"unknown key 'roles\.ref\.precision'.* Allowed .*: model, dtype, lr, engine",
        ),
        ("roles.ref.rollout={temprature: 1}", r"'roles\.ref\.rollout\.temprature'\. Did you mean 'roles.*temperature'"),
        ("roles.ref.rollout={top_p: 2}", r"roles\.ref\.rollout\.top_p = 2.0 is out of bounds"),
        ("roles.ref.engine=trch", r"roles\.ref\.engine = 'trch' is not installed\. Did you mean 'torch'"),
        ("roles.ref.rollout={name: hff}", r"roles\.ref\.rollout\.name = 'hff' is not installed\. Did you mean 'hf'"),
        ("roles.actor.rollout={top_p: 0}", r"role 'actor': rollout\.top_p = 0 leaves no token"),
        ("roles.actor.rollout={response_len: 2, min_tokens: 3}", r"role 'actor': rollout\.min_tokens = 3 is more than"),
        ("roles.ref.rollout={stop: ['']}", r"role 'ref': rollout\.stop holds an empty text"),
        ("roles.ref.model=/nowhere", "the model of role 'ref', /nowhere does not exist"),
    ],
)
def test_settings_that_cannot_be(make, plugins, override, message):
    with pytest.raises(ConfigError, match=message):
        preflight(make(override), plugins)


def test_an_engine_is_asked_for_the_kinds_that_it_holds(make, plugins, monkeypatch):
    torch_engine = plugins.train_engines()["torch"]
    mini = replace(torch_engine, name="mini", capabilities=replace(torch_engine.capabilities, kinds=(), layouts=False))
    monkeypatch.setattr(plugins, "train_engines", lambda: {"torch": torch_engine, "mini": mini})
    with pytest.raises(ConfigError, match=r"critic, which engine=mini does not support; .*critic.engine"):
        check_roles({**ROLES, "critic": Role(kind=CRITIC, trains=True, engine="mini")}, make(), plugins)
    config = make("cluster=local", "cluster.workers=2", "roles.ref.engine=mini")
    with pytest.raises(ConfigError, match=r"pool main, ref: engine=mini supports one worker, not 2"):
        plan_pools(config, resolve_roles(ROLES, config), plugins.train_engines())
    average = {**ROLES, "ref": Role(follows="actor")}
    config = make("roles.ref.engine=mini")
    with pytest.raises(ConfigError, match=r"ref follows actor and .* both need the same engine and the same"):
        plan_pools(config, resolve_roles(average, config), plugins.train_engines())


def test_an_evaluation_leaves_out_the_settings_of_roles_that_it_lacks(make):
    config = make("roles.ref.dtype=bf16", "roles.actor.rollout={temperature: 0.5}")
    alone = restrict_to_roles(config, {"actor": Role()})
    assert list(alone.roles) == ["actor"]
    assert with_settings({"actor": Role()}, alone)["actor"].rollout == {"temperature": 0.5}


def test_an_algorithm_is_asked_about_the_rollout_keys_of_a_role_that_samples(plugins):
    greedy = "roles.actor.rollout={temperature: 0}"
    config = compose(["algo=online_dpo", "cluster=in_process", greedy], plugins)
    with pytest.raises(ConfigError, match=r"role 'actor': rollout\.temperature=0"):
        preflight(config, plugins)
    preflight(compose(["algo=online_dpo", "cluster=in_process", greedy.replace("actor", "ref")], plugins), plugins)


def numbers(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "timeline/", "throughput/"))} for row in rows]


def compare_first_step(tmp_path, *overrides):
    """Run two steps with a reference in fp32 and with one in bf16; return the metrics of both first steps."""
    found = []
    for dtype in ("fp32", "bf16"):
        folder = tmp_path / dtype
        assert main(["train", *SMALL, *overrides, f"run.dir={folder}", f"roles.ref.dtype={dtype}"]) == 0
        found.append(numbers(folder)[0])
    return found


def check_same_but_for_the_reference(plain, mixed):
    """The first step samples and scores alike; the KL to a rounded reference is not that to an exact one."""
    assert {name for name in plain if plain[name] != mixed[name]} <= {"loss/kl", "kl/mean", "train/grad_norm"}
    assert plain["kl/mean"] == pytest.approx(0, abs=1e-6)
    assert 1e-6 < mixed["kl/mean"] < 0.05


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_frozen_bf16_reference_changes_nothing_but_its_own_numbers(tmp_path):
    check_same_but_for_the_reference(*compare_first_step(tmp_path))


@pytest.mark.ray
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_frozen_bf16_reference_on_ray(ray_cluster, tmp_path):
    check_same_but_for_the_reference(*compare_first_step(tmp_path, "cluster=local", "cluster.workers=2"))


@pytest.mark.ray
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_frozen_bf16_reference_on_a_pool_of_its_own(ray_cluster, tmp_path):
    pools = "cluster.pools={student: {roles: [actor], workers: 2}, teacher: {roles: [ref], workers: 1}}"
    check_same_but_for_the_reference(*compare_first_step(tmp_path, "cluster=local", pools))


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_rollout_keys_of_the_only_role_that_samples_are_as_good_as_the_runs(tmp_path):
    """GRPO without a reference and evaluations: the actor alone reads them. The ban on ends makes rows of 3 or more."""
    folders = [tmp_path / "run", tmp_path / "role"]
    common = ["train", *SMALL, "algo.kl_coef=0", "rollout.response_len=9"]
    assert main([*common, f"run.dir={folders[0]}", "rollout.temperature=0.7", "rollout.min_tokens=3"]) == 0
    assert main([*common, f"run.dir={folders[1]}", "roles.actor.rollout={temperature: 0.7, min_tokens: 3}"]) == 0
    by_run, by_role = map(numbers, folders)
    assert by_run == by_role


def test_a_roles_handle_has_its_rollout_settings(make, plugins, tmp_path):
    """GRPO's budget and DAPO's penalty are of the responses that the actor may give."""
    config = make("roles.actor.rollout={response_len: 3}")
    rewards = resolve(config.reward, "arithmetic", plugins.rewards())
    with open_run(config, tmp_path, plugins, resolve_roles({"actor": ROLES["actor"]}, config), rewards) as run:
        assert (run.actor.rollout_config.response_len, run.config.rollout.response_len) == (3, 5)


def test_a_bf16_teacher_holds_its_weights_in_bf16_and_an_fp32_student_its_own(make, plugins, tmp_path):
    config = make("roles.teacher.dtype=bf16")
    roles = resolve_roles({"actor": ROLES["actor"], "teacher": Role(), "exact": Role()}, config)
    rewards = resolve(config.reward, "arithmetic", plugins.rewards())
    with open_run(config, tmp_path, plugins, roles, rewards) as run:
        run.begin_step(1)
        dtypes = {}
        for name in roles:
            (worker,) = run.roles[name].group._processes._workers[name]
            dtypes[name] = {parameter.dtype for parameter in worker.train.model.hf.model.layers.parameters()}
        batch = random_tokens(4)
        by_teacher, by_exact = (run.roles[name].log_probs(batch)["log_probs"].values for name in ("teacher", "exact"))
        run.end_step()
    assert torch.bfloat16 in dtypes["teacher"]
    assert dtypes["actor"] == dtypes["exact"] == {torch.float32}
    assert by_teacher.dtype == torch.float32
    assert not by_teacher.equal(by_exact)
    torch.testing.assert_close(by_teacher, by_exact, rtol=0.01, atol=0)


def random_tokens(rows):
    from rlcore.protocol import DataProto, Ragged

    generator = torch.Generator().manual_seed(0)
    sides = {name: [torch.randint(3, 40, (5,), generator=generator) for _ in range(rows)] for name in TOKENS}
    return DataProto.from_single_dict({name: Ragged.from_list(side) for name, side in sides.items()})
