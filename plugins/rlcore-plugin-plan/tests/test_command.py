"""`rlcore plan` from config to overrides that a run takes, and what it says to bad input."""

import json
import shlex

import pytest
import yaml
from rlcore_plugin_plan.command import read_lengths
from rlcore_plugin_plan.overrides import values, words
from rlcore_plugin_plan.plans import make_plans

from rlcore.cli import main
from rlcore.config import compose
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager
from rlcore.roles.placement import plan_pools as placed

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
}


@pytest.fixture(scope="module")
def plugins():
    return PluginManager.load()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder that holds the config.json of a 13B model, and no weights."""
    path = tmp_path_factory.mktemp("13b")
    (path / "config.json").write_text(json.dumps(LLAMA))
    return path


@pytest.fixture
def given(folder):
    return [
        *("algo=ppo", "algo.mini_batches=8", "algo.kl_coef=0.1", f"model.path={folder}", "model.dtype=bf16"),
        *("data.prompt_len=1024", "rollout.response_len=1024", "data.batch_size=1024", "plan.device=a100-80g"),
        *("engine.torch.activation_checkpointing=true", "engine.micro_batch_tokens=8192"),
    ]


def show(capsys, *argv):
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out


def refused(capsys, *argv):
    assert main(["plan", *argv]) == 2
    return capsys.readouterr().err


def test_the_table_and_overrides_that_a_run_takes(capsys, given, plugins):
    text = show(capsys, *given, "plan.gpus=64")
    assert "generation  preparation  training" in text
    assert "more than the best" in text
    assert "A actor, C critic, R ref, . waits" in text
    command = text.rpartition("run it:\n")[2].strip()
    program, train, *overrides = shlex.split(command)
    assert (program, train) == ("rlcore", "train")
    config = compose(overrides, plugins)
    roles = plugins.algorithm("ppo").algorithm(config.algo).roles()
    pools = placed(config, roles)  # checks layouts against the model, too
    models = [pool for pool in pools if pool.roles != ("reward",)]
    assert sum(pool.workers for pool in models) <= 64
    assert all(pool.gpus_per_worker == 1 for pool in models)


def test_json_and_an_experiment_say_the_same(capsys, given, plugins, tmp_path):
    file = tmp_path / "experiment" / "big.yaml"
    found = json.loads(show(capsys, *given, "plan.gpus=128", "--json", "--save", str(file)))
    best = found["plans"][0]
    assert [plan["seconds"] for plan in found["plans"]] == sorted(plan["seconds"] for plan in found["plans"])
    assert best["seconds"] == pytest.approx(sum(best["stage_seconds"]))
    assert all(pool["memory"] <= pool["capacity"] for plan in found["plans"] for pool in plan["pools"])
    search = [f"hydra.searchpath=['file://{tmp_path}']", "experiment=big"]
    saved = compose(search, plugins)
    for key, value in best["overrides"].items():
        assert saved.value(key) == value
    assert (saved.algorithm, saved.algo.mini_batches, saved.data.batch_size) == ("ppo", 8, 1024)
    assert saved.value("plan.gpus") is None
    assert yaml.safe_load(file.read_text())["rollout"]["response_len"] == 1024


def test_layouts_of_single_roles_reach_their_engines(given, plugins):
    config = compose([*given, "plan.gpus=16"], plugins)
    best = make_plans(config, plugins)[0]
    planned = config.with_values(values(best, config))
    from rlcore.engine import engine_of, layout_of

    for pool in best.pools:
        for part in pool.parts:
            assert layout_of(engine_of(planned.engine, part.role), pool.count) == part.layout
    assert compose([*given, *shlex.split(words(values(best, config)))], plugins).engine == planned.engine


def test_sampling_ahead_and_several_kinds(given, plugins):
    kinds = "plan.device=a100-80g:32+h100:32"
    plans = make_plans(compose([*given, kinds, "trainer.rollouts_ahead=1"], plugins), plugins)
    pools = values(plans[0], compose(given, plugins))["cluster.pools"]
    assert any(pool["roles"] == ["rollout"] for pool in pools.values())
    marks = {pool["node"] for pool in pools.values()}
    assert marks <= {"accelerator_type:A100", "accelerator_type:H100"}
    for plan in plans:
        for kind, each in enumerate(plan.problem.devices):
            assert sum(pool.count for pool in plan.pools if pool.kind == kind) <= each.count


def test_lengths_and_cost(capsys, given, tmp_path):
    whole = json.loads(show(capsys, *given, "plan.gpus=32", "--json"))["plans"][0]
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(str(length) for length in range(100, 400)))
    short = json.loads(show(capsys, *given, "plan.gpus=32", "--json", "--lengths", str(file)))["plans"][0]
    assert short["seconds"] < whole["seconds"]
    cheap = json.loads(show(capsys, *given, "plan.gpus=32", "--json", "--objective", "cost"))["plans"][0]
    assert cheap["dollars"] <= whole["dollars"]
    assert read_lengths("3,5, 9", 10) == [3, 5, 9]


def test_auto_pools_run(tmp_path, capsys):
    overrides = ["algo=grpo", "algo.group_size=2", "cluster=in_process", "cluster.pools=auto", "plan.device=cpu"]
    small = ["data.batch_size=2", "rollout.response_len=4", "trainer.total_steps=1", "trainer.eval_every=0"]
    assert main(["train", *overrides, *small, "tracker=none", f"run.dir={tmp_path / 'run'}"]) == 0
    assert "a step takes" in capsys.readouterr().out
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["cluster"]["pools"] == {"main": {"roles": ["actor", "ref"], "workers": 1}}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["plan.gpus=0"], "plan.gpus = 0 is out of bounds: it must be at least 1"),
        (["plan.gpus=8", "plan.device=a100"], "'a100' is not a device profile."),
        (["plan.gpus=8", "plan.device=h100:4+h200:8"], "plan.gpus = 8, but plan.device = h100:4+h200:8"),
        (["plan.device=h100:0+h200:8"], "must be NAME, or NAME:COUNT with counts from 1"),
        (["plan.device=h100:8+cpu:8"], "processor cores and GPUs cannot be planned together"),
        (["plan.device=h100"], "this machine has no h100 to count; give a number, as plan.gpus=8"),
        (["plan.gpus=4"], "GB short"),
        (
            ["plan.gpus=8", "cluster.pools={a: {roles: [actor], workers: 16}, b: [critic, ref]}"],
            "cluster.pools needs 16 devices, 8 more than the 8 to plan for",
        ),
        (["plan.gpus=8", "cluster.pools={a: [actor, critic]}"], "cluster.pools lacks ref"),
        (["plan.gpus=8", "engine.tp=3"], "no layout of the model fits"),
        (["plan.gpus=8", "engine.layouts={critic: [1]}"], "engine.layouts.critic = [1] must be [pp, tp]"),
        (["plan.gpus=64", "--lengths", "5,2000"], "'2000' is not a response length"),
        (["plan.gpus=64", "--save", "x.json"], "an experiment is a file NAME.yaml"),
    ],
)
def test_bad_input(capsys, given, overrides, message):
    assert message in refused(capsys, *given, *overrides)


@pytest.mark.timeout(200)
def test_a_model_that_fits_nowhere(capsys, given, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 400}))
    text = refused(capsys, *given, f"model.path={tmp_path}", "plan.gpus=8")
    assert "no placement of actor, critic, ref fits on 8 a100-80g" in text
    assert "GB short" in text
    assert "The smallest change that would fit: " in text
    assert "a100-80g in place of 8 a100-80g (plan.gpus)" in text


def test_experts_are_refused(plugins, given, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "mixtral", "num_local_experts": 8}))
    config = compose([*given, f"model.path={tmp_path}", "plan.gpus=8"], plugins)
    with pytest.raises(ConfigError, match="mixture of 8 experts"):
        make_plans(config, plugins)


@pytest.mark.parametrize(("device", "tokens"), [("a100-80g", 8192), ("cpu", 16384)])
def test_micro_batches_of_auto(plugins, device, tokens):
    config = compose(["algo=grpo", f"plan.device={device}", "plan.gpus=2"], plugins)
    assert config.engine.micro_batch_tokens == "auto"
    assert make_plans(config, plugins)[0].problem.work.micro_batch_tokens == tokens


def test_micro_batches_of_auto_become_smaller_until_a_plan_fits(plugins, tmp_path):
    shape = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **shape, "num_hidden_layers": 24}))
    given = ["algo=grpo", f"model.path={tmp_path}", "model.dtype=bf16", "plan.device=a100-80g", "plan.gpus=2"]
    given += ["data.prompt_len=512", "rollout.response_len=512", "data.batch_size=256"]
    with pytest.raises(ConfigError, match=r"The smallest change that would fit: engine.micro_batch_tokens=4096"):
        make_plans(compose([*given, "engine.micro_batch_tokens=8192"], plugins), plugins)
    assert make_plans(compose(given, plugins), plugins)[0].problem.work.micro_batch_tokens == 4096
