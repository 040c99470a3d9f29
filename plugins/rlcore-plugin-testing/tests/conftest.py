"""Every algorithm of the repository; and algorithms that each break one property, made from one that breaks none."""

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from rlcore.plugins import PluginManager
from rlcore.plugins.manager import installed

FIXTURES = Path(__file__).parent / "fixtures"
SOUND = str(FIXTURES / "sound.py")


@dataclass(frozen=True)
class Break:
    """What is broken: `old` in sound.py becomes `new`; the check that must find it, and words of what it says."""

    check: str
    old: str
    new: str
    says: str


POLICY = "-masked_sum(gain, mask), mask.sum()"
HIDDEN_STATE = ('self.steps = state["steps"]', 'state["steps"]', "belongs in state_dict")
BROKEN = {
    "mean_over_micro_batch": Break(
        "micro_batch_split", POLICY, "-(gain * mask).mean() * mask.sum(), mask.sum()", "term 'policy' was"
    ),
    "mask_leak": Break(
        "masked_tokens",
        "masked_sum(gain, mask)",
        'masked_sum(gain, batch["old_log_probs"] != 0)',
        "response_mask 0 get",
    ),
    "flipped_sign": Break("better_sample", POLICY, "masked_sum(gain, mask), mask.sum()", "higher advantage of row"),
    "hidden_state": Break("resume", *HIDDEN_STATE),
    "hidden_state_of_a_killed_run": Break("kill_and_resume", *HIDDEN_STATE),
    "global_random": Break(
        "same_seed", 'random.Random(f"{run.config.trainer.seed} {run.step}")', "random", "Randomness must come"
    ),
    "pair_split": Break("rows_together", ', keep_together="uid"', "", "keep_together=COLUMN"),
    # And one for each of the other checks that need no Ray.
    "wrong_default": Break("config", 'option(0.01, "', 'option(0.01, min=1, doc="', "pair_coef"),
    "no_update": Break("steps", "run.actor.update(batch, ", "run.actor.update(batch[:0], ", "no row reached update"),
    "idle_role": Break(
        "steps",
        '"actor": Role(trains=True, generates=True)',
        '"actor": Role(trains=True, generates=True), "ref": Role()',
        "roles() declares ref, and no step calls a method of it",
    ),
    "infinite_metric": Break("metrics", "steps=self.steps)", "steps=float('inf'))", "steps is inf in step 1"),
    "counts_columns": Break("padding", POLICY, "-masked_sum(gain, mask), mask.numel()", "more columns of padding"),
    "looks_at_the_first_row": Break(
        "row_order", "gain = ratio", "gain = out.log_probs[0, 0].detach() * ratio", "in a different order"
    ),
    "other_old_log_probs": Break(
        "zero_learning_rate",
        'batch = batch.union(run.actor.log_probs(batch, name="old_log_probs"))',
        'batch = batch.union(run.actor.log_probs(batch, name="old_log_probs"))\n'
        '        batch["old_log_probs"] = batch["old_log_probs"].map(torch.Tensor.round)',
        "differs from 1",
    ),
    "hidden_nan": Break(
        "non_finite",
        'mask = batch["response_mask"]',
        'mask = batch["response_mask"]\n    out = type(out)({n: value.nan_to_num() for n, value in out.given.items()})',
        "finite loss",
    ),
    "trains_on_failures": Break(
        "failed_rewards",
        "batch = batch.union(run.reward(batch))",
        "run.reward(batch)\n"
        "        batch = batch.union(run.score_by_functions(batch))\n"
        '        batch["scores"] = batch["scores"].nan_to_num()',
        "rows have no reward",
    ),
    "counts_branches": Break(
        "branches", "episode=episodes(batch)", "episode=None", "with a second branch in some episodes. Give `episode="
    ),
    "overflowing_ratio": Break(
        "non_finite",
        'out.ratio(batch["old_log_probs"])',
        '(out.log_probs - batch["old_log_probs"]).exp()',
        "a gradient that is not finite where log-probs are 200 nats",
    ),
    "nested_loss": Break(
        "reaches_workers",
        "loss=sound_loss",
        "loss=needs('log_probs', 'entropy')(lambda *given: sound_loss(*given))",
        "not a module-level function",
    ),
}


@pytest.fixture(params=list(BROKEN))
def broken(request, tmp_path) -> tuple[Break, str]:
    """A break, and the file of the algorithm that has it."""
    chosen = BROKEN[request.param]
    text = Path(SOUND).read_text()
    assert text.count(chosen.old) == 1
    file = tmp_path / f"{request.param}.py"
    file.write_text(text.replace(chosen.old, chosen.new))
    return chosen, str(file)


# Every algorithm

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


def algorithms() -> dict[str, list[str]]:
    """Return the algorithms by name, with the file behind `-p` for one that is not installed."""
    found = {path.stem.removeprefix("rlcore_"): path for path in (ROOT / "algorithms").glob("*.py")}
    for project in (ROOT / "plugins").glob("*/pyproject.toml"):
        entries = tomllib.loads(project.read_text())["project"]["entry-points"]["rlcore"]
        found |= {name: project.parent / f"{module}.py" for name, module in entries.items() if "." not in name}
    there = {entry.name for entry in installed()}
    return {name: [] if name in there else [str(path)] for name, path in sorted(found.items())}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the argument `algorithm` for every algorithm; on Ray, those without a loop in LOOPS are slow."""
    if "algorithm" in metafunc.fixturenames:
        always = LOOPS if "ray_cluster" in metafunc.fixturenames else algorithms()
        names = [pytest.param(name, marks=() if name in always else pytest.mark.slow) for name in algorithms()]
        metafunc.parametrize("algorithm", names)


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


@pytest.fixture
def every_algorithm() -> set[str]:
    """The names of all algorithms."""
    return set(algorithms())


@pytest.fixture
def plugins_of() -> Callable[[str], PluginManager]:
    """A function that loads the plugins with an algorithm, installed or not."""
    return lambda name: PluginManager.load(algorithms()[name])


@pytest.fixture
def algorithm_suite(algorithm, scorer, teacher, tmp_path) -> Iterator[Any]:
    """The suite over an algorithm, installed or not."""
    from rlcore_plugin_testing.suites import open_suite

    settings = [setting.format(scorer=scorer, teacher=teacher) for setting in SETTINGS.get(algorithm, [])]
    with open_suite(algorithm, tmp_path, settings=settings, plugins=algorithms()[algorithm]) as suite:
        yield suite
