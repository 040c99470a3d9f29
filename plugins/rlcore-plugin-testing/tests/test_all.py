"""Every algorithm in algorithms/ and plugins/ passes the suite, installed or not.

Checks of an algorithm's own code run here for all, in one process. The checks that start processes are checks of the
core: they run for the loops in LOOPS, and for the others in `make test-slow`. On a quiet machine an algorithm takes
about 10 s, with processes 40 s.
"""

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
LOOPS = {
    "grpo": "groups of samples; also of rloo, remax, dapo and all that build on GRPO's loop",
    "ppo": "an actor and a critic",
    "online_dpo": "pairs of samples; also of sppo",
    "rejection_sampling": "updates with chosen samples",
    "dpo": "rows of a data set, in pairs; also of sft, kto and reward_model",
    "safe_rlhf": "several critics and scores",
    "on_policy_distill": "teachers",
}
"""The algorithms that run on Ray here, each with its loop's parts."""
PROCESS_CHECKS = ("kill_and_resume", "reaches_workers", "in_process_equals_ray", "one_worker_equals_two")
"""The checks that start processes."""


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


@pytest.mark.e2e
@pytest.mark.parametrize("name", algorithms())
def test_the_suite_in_one_process(name, scorer, teacher, tmp_path):
    settings = [setting.format(scorer=scorer, teacher=teacher) for setting in SETTINGS.get(name, [])]
    with open_suite(name, tmp_path, settings=settings, plugins=algorithms()[name]) as suite:
        results = [suite.result(check) for check in suite.checks if check not in PROCESS_CHECKS]
        losses = {item.loss for item in suite.plain.record.items}
    print(*results, f"{name}: {sum(result.seconds for result in results):.0f} s", sep="\n")
    assert not [str(result) for result in results if result.outcome == "FAIL"]
    passed = {result.check for result in results if result.outcome == "pass"}
    # Whatever else does not apply to an algorithm, these do.
    always = {"config", "steps", "metrics", "same_seed", "micro_batch_split", "padding", "row_order", "rows_together"}
    assert passed >= {*always, "zero_learning_rate", "non_finite", "resume"}
    # A worker finds a loss by its module's name.
    assert {cloudpickle.loads(cloudpickle.dumps(loss)) for loss in losses} == losses


@pytest.mark.e2e
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in LOOPS else pytest.mark.slow) for name in algorithms()]
)
def test_the_suite_with_processes(name, ray_cluster, scorer, teacher, tmp_path):
    settings = [setting.format(scorer=scorer, teacher=teacher) for setting in SETTINGS.get(name, [])]
    with open_suite(name, tmp_path, settings=settings, plugins=algorithms()[name]) as suite:
        results = [suite.result(check) for check in PROCESS_CHECKS]
    print(*results, f"{name}: {sum(result.seconds for result in results):.0f} s", sep="\n")
    assert [str(result) for result in results if result.outcome != "pass"] == []


def test_all_are_there():
    assert set(algorithms()) >= {
        *LOOPS,
        *("grpo", "ppo", "online_dpo", "rejection_sampling"),
        *("rloo", "remax", "dapo", "safe_rlhf", "sft", "reward_model", "sppo", "dpo", "kto", "on_policy_distill"),
        *("gspo", "cispo", "sapo", "gmpo", "vespo", "dppo", "maxrl", "reinforce_pp", "pass_at_k", "gdpo"),
    }
