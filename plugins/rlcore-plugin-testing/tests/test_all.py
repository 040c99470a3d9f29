"""Every algorithm in algorithms/ and plugins/ passes the whole suite, installed or not."""

import tomllib
from importlib.resources import files
from pathlib import Path

import cloudpickle
import pytest
from rlcore_plugin_testing.suites import open_suite

from rlcore.plugins.manager import installed

ROOT = Path(__file__).parents[3]
SETTINGS = {"safe_rlhf": ["algo.cost_model={scorer}"], "on_policy_distill": ["algo.teacher={teacher}"]}
"""What an algorithm cannot do without: {scorer} is a model with one label, {teacher} another policy."""
LOOP_CHECKS = ("kill_and_resume", "reaches_workers", "in_process_equals_ray", "one_worker_equals_two")
"""Checks of the loop and of functions of `map`, which need other processes."""


def algorithms() -> dict[str, list[str]]:
    """Return the algorithms by name, with the file behind `-p` for one that is not installed."""
    found = {path.stem.removeprefix("rlcore_"): path for path in (ROOT / "algorithms").glob("*.py")}
    for project in (ROOT / "plugins").glob("*/pyproject.toml"):
        entries = tomllib.loads(project.read_text())["project"]["entry-points"]["rlcore"]
        found |= {name: project.parent / f"{module}.py" for name, module in entries.items() if "." not in name}
    there = {entry.name for entry in installed()}
    return {name: [] if name in there else [str(path)] for name, path in sorted(found.items())}


@pytest.fixture(scope="session")
def scorer(tmp_path_factory) -> str:
    """A model that scores, made of the shipped one with a head that is not trained."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tiny, folder = str(files("rlcore.assets") / "tiny"), str(tmp_path_factory.mktemp("scorer"))
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def teacher(tmp_path_factory) -> str:
    """The shipped model with other weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tiny, folder = str(files("rlcore.assets") / "tiny"), str(tmp_path_factory.mktemp("teacher"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


def on_grpo(name: str) -> bool:
    """Whether an algorithm is GRPO with another loss or other advantages of rows, and so has its loop."""
    source = (ROOT / "plugins" / f"rlcore-plugin-{name.replace('_', '-')}" / f"rlcore_plugin_{name}.py").resolve()
    text = source.read_text() if source.exists() else ""
    return "(GRPO):" in text and "def step(" not in text and ".map(" not in text


@pytest.mark.e2e
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if on_grpo(name) else ()) for name in algorithms()]
)
def test_the_whole_suite(name, ray_cluster, scorer, teacher, tmp_path):
    settings = [setting.format(scorer=scorer, teacher=teacher) for setting in SETTINGS.get(name, [])]
    with open_suite(name, tmp_path, settings=settings, plugins=algorithms()[name]) as suite:
        results = list(suite.results())
    print(*results, f"{name}: {sum(result.seconds for result in results):.0f} s", sep="\n")
    assert not [str(result) for result in results if result.outcome == "FAIL"]
    passed = {result.check for result in results if result.outcome == "pass"}
    # Whatever else does not apply to an algorithm, these do.
    always = {"config", "steps", "metrics", "same_seed", "micro_batch_split", "padding", "row_order", "rows_together"}
    always |= {"zero_learning_rate", "non_finite", "kill_and_resume", "reaches_workers", "in_process_equals_ray"}
    assert passed >= {*always, "one_worker_equals_two"}


@pytest.mark.e2e
@pytest.mark.parametrize("name", [name for name in algorithms() if on_grpo(name)])
def test_the_suite_in_this_process_of_algorithms_that_have_grpos_loop(name, tmp_path):
    """GRPO's loop is seen on Ray and resumed above; its losses need no more than to be found by their module's name."""
    with open_suite(name, tmp_path, plugins=algorithms()[name]) as suite:
        results = [suite.result(check) for check in suite.checks if check not in LOOP_CHECKS]
        losses = {item.loss for item in suite.plain.record.items}
    print(*results, f"{name}: {sum(result.seconds for result in results):.0f} s", sep="\n")
    assert [str(result) for result in results if result.outcome != "pass"] == []
    assert len(results) == 12
    assert {cloudpickle.loads(cloudpickle.dumps(loss)) for loss in losses} == losses


def test_all_are_there():
    assert set(algorithms()) >= {
        *("grpo", "ppo", "online_dpo", "rejection_sampling"),
        *("rloo", "remax", "dapo", "safe_rlhf", "sft", "reward_model", "sppo", "dpo", "kto", "on_policy_distill"),
        *("gspo", "cispo", "sapo", "gmpo", "vespo", "dppo", "maxrl", "reinforce_pp", "pass_at_k", "gdpo"),
    }
