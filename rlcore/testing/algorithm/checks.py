"""The checks on an algorithm's runs, and the list of all checks.

A check takes an AlgorithmSuite and returns what it looked at, in a few words. It raises CheckFailed with what is wrong,
or NotApplicable with the reason. The reason follows from the roles that the algorithm declares and from its runs; no
author can set it.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from collections.abc import Callable
from itertools import chain

from rlcore.config import check as check_config
from rlcore.config import compose, from_yaml, to_yaml
from rlcore.plugins import PluginManager
from rlcore.run import Run, check_roles, with_reward_model
from rlcore.testing.algorithm import loss_checks
from rlcore.testing.algorithm.suite import KILLED_AT, AlgorithmSuite, FinishedRun, contents
from rlcore.testing.algorithm.watch import Changes, function_name, plain_function
from rlcore.testing.report import CheckFailed, NotApplicable

METRIC = re.compile(r"[A-Za-z]\w*([/.@-]\w+)*")
NOT_FINITE = re.compile(r"not finite|\b(nan|inf)\b")
RATIO_TOLERANCE = 1e-4
"""How far from 1 a ratio may be by the noise of fp32: rollout and update compute in another order."""


def config(suite: AlgorithmSuite) -> str:
    """The spec is valid, and so is its default config (with the given settings): rlcore train would start."""
    plugins = PluginManager.load(suite.plugins)
    config = compose([f"algo={suite.name}", *suite.settings], plugins)
    check_config(config, plugins)
    roles = suite.spec.algorithm(config.algo).roles()
    check_roles(with_reward_model(roles, config), config)
    if from_yaml(to_yaml(config), plugins) != config:
        raise CheckFailed("the config that is saved with a run is not the same when it is read back")
    fields = len(dataclasses.fields(suite.spec.algorithm.config_class))
    return f"{fields} settings; roles: {', '.join(roles) or 'none'}"


def steps(suite: AlgorithmSuite) -> str:
    """It takes two steps on the tiny model, and something reaches an optimizer."""
    finished = suite.plain
    items = [item for item in finished.record.items if len(item.batch)]
    if any(role.trains for role in suite.roles.values()) and not items:
        raise CheckFailed(f"in {len(finished.record.metrics)} steps no row reached update() of any role")
    updated = ", ".join(dict.fromkeys(item.title for item in items))
    return f"{len(finished.record.metrics)} steps; updates by {updated or 'none'}"


def metrics(suite: AlgorithmSuite) -> str:
    """Every metric is a finite number and has a name that trackers can group: words, with / between them."""
    names: dict[str, None] = {}
    for step, row in enumerate(suite.plain.record.metrics, start=1):
        for name, value in row.items():
            names[name] = None
            if not math.isfinite(value):
                raise CheckFailed(f"{name} is {value} in step {step}")
            if not METRIC.fullmatch(name):
                raise CheckFailed(
                    f"a metric is called {name!r}; use words of letters, digits and _, with / between them"
                )
    return f"{len(names)} metrics"


def same_seed(suite: AlgorithmSuite) -> str:
    """A second run with the same seed gives the same metrics and samples, whatever global random generators hold."""
    again = suite.changed("again", Changes(random_seed=20261121))
    if found := _unequal(suite.plain, again, exact=True):
        raise CheckFailed(
            f"two runs with one seed differ: {found}. Chance must come from the seed, not from random or torch"
        )
    return _compared(again)


def reaches_workers(suite: AlgorithmSuite) -> str:
    """Loss and map functions are module-level functions, and run in Ray's worker processes."""
    record = suite.plain.record
    functions = list(
        dict.fromkeys(
            plain_function(f) for f in chain((i.loss for i in record.items), (m.function for m in record.mapped))
        )
    )
    for function in functions:
        name = function_name(function)
        module = importlib.import_module(function.__module__)
        if getattr(module, name, None) is None:
            raise CheckFailed(
                f"{name} is no function of the module {function.__module__}; define it there with `def`, and give it "
                "settings with functools.partial"
            )
    suite.on_ray(2)
    return f"{', '.join(map(function_name, functions)) or 'no function'}"


def in_process_equals_ray(suite: AlgorithmSuite) -> str:
    """A run in one process and one on Ray give the same samples, and the same metrics but for noise."""
    # The run on Ray has two workers. Only if it differs is one with a single worker made, to tell the two causes apart.
    if _unequal(suite.plain, suite.on_ray(2)) and (found := _unequal(suite.plain, suite.on_ray(1))):
        raise CheckFailed(f"in process and on Ray differ: {found}")
    return _compared(suite.plain)


def one_worker_equals_two(suite: AlgorithmSuite) -> str:
    """One worker and two give the same samples, and the same metrics but for noise; map functions see parts."""
    loss_checks.maps_by_row(suite)  # as few rows as these, Ray's workers would send here to be mapped
    if _unequal(suite.plain, suite.on_ray(2)) and (found := _unequal(suite.on_ray(1), suite.on_ray(2))):
        raise CheckFailed(f"1 worker and 2 differ: {found}. Whatever looks at a part of the rows depends on the cut")
    return _compared(suite.on_ray(2))


def zero_learning_rate(suite: AlgorithmSuite) -> str:
    """With learning rate 0 the weights stay what they were, bit for bit, and the ratio to old_log_probs at 1."""
    if not any(role.trains for role in suite.roles.values()):
        raise NotApplicable("no role trains")

    def save(run: Run) -> None:
        for name, handle in run.roles.items():
            if handle.role.trains:
                handle.group.save_pretrained(str(suite.folder / "before" / name))

    finished = suite.changed("frozen", Changes(frozen=True), start=save)
    saved = finished.saved(len(finished.record.metrics))
    for name, role in finished.record.roles.items():
        before = suite.folder / "before" / name / "model.safetensors"
        if role.trains and saved[f"{name}/model/model.safetensors"] != contents(before):
            raise CheckFailed(f"the weights of {name} changed")
    for loss, away in finished.record.ratios.items():
        if not away <= RATIO_TOLERANCE:
            raise CheckFailed(f"the ratio of {loss} is up to {away:.3g} away from 1")
    ratios = ", ".join(finished.record.ratios)
    return f"weights equal; {f'ratio of {ratios} at 1' if ratios else 'no loss reads old_log_probs'}"


def kill_and_resume(suite: AlgorithmSuite) -> str:
    """A run that was killed and resumed equals one that was not, bit for bit: metrics, samples, weights, optimizers."""
    resumed = suite.resumed
    if found := _unequal(suite.plain, resumed, exact=True):
        raise CheckFailed(
            f"resumed, it goes another way: {found}. What a step reads and an earlier one wrote belongs into state_dict"
        )
    last = len(suite.plain.record.metrics)
    one, other = suite.plain.saved(last), resumed.saved(last)
    if (state := suite.plain.state(last)) != (resumed_state := resumed.state(last)):
        raise CheckFailed(f"resumed, its state_dict() ends as {resumed_state}, not as {state}")
    if different := [name for name in {**one, **other} if one.get(name) != other.get(name)]:
        raise CheckFailed(f"resumed, it ends with other contents in {', '.join(different)}")
    return f"killed in step {KILLED_AT} of {last}; {len(one)} files of weights and optimizers are equal"


def non_finite(suite: AlgorithmSuite) -> str:
    """A score or a loss that is not finite stops the run with an error that says so."""
    plain = suite.plain.record
    if not any(len(item.batch) for item in plain.items) and not plain.scored:
        raise NotApplicable("nothing is scored and nothing is updated")
    looked = []
    if plain.scored:
        looked.append("a score")
        _expect_stop(suite, "nan-score", Changes(nan_score=True), "a score of NaN")
    if plain.items:
        looked.append("a loss")
        _expect_stop(suite, "nan-loss", Changes(nan_loss=True), "a loss of NaN")
        loss_checks.reports_nan(suite)
    return f"the run stops for {' and '.join(looked)} of NaN"


def _expect_stop(suite: AlgorithmSuite, name: str, changes: Changes, what: str) -> None:
    error = suite.expect_error(name, changes)
    if error is None:
        raise CheckFailed(f"with {what} the run went on")
    if not NOT_FINITE.search(str(error)):
        raise CheckFailed(f"with {what} the run stopped, but its error does not say why: {error}")


def _unequal(one: FinishedRun, other: FinishedRun, *, exact: bool = False) -> str | None:
    """Return where two runs differ; metrics may by 1e-4 of their size (1e-5 for small ones) unless `exact`."""
    for a, b in zip(one.samples, other.samples, strict=False):
        if a != b:
            return (
                f"prompt {a['prompt_text']!r} got {a['response_text']!r} and {b['response_text']!r}, or another score"
            )
    if len(one.samples) != len(other.samples) or len(one.numbers) != len(other.numbers):
        return f"{len(one.samples)} and {len(other.samples)} samples, {len(one.numbers)} and {len(other.numbers)} steps"
    tolerance = 0.0 if exact else 1e-4
    for a, b in zip(one.numbers, other.numbers, strict=True):
        for name in {**a, **b}:
            x, y = (float(row.get(name, math.nan)) for row in (a, b))
            if not (x == y or abs(x - y) <= tolerance * max(0.1, abs(x), abs(y))):
                return f"{name} of step {a['step']} is {x:.9g} and {y:.9g}"
    return None


def _compared(finished: FinishedRun) -> str:
    return f"{len(finished.samples)} samples and the metrics of {len(finished.numbers)} steps are equal"


CHECKS: dict[str, Callable[[AlgorithmSuite], str]] = {
    check.__name__: check
    for check in (
        config,
        steps,
        metrics,
        same_seed,
        loss_checks.micro_batch_split,
        loss_checks.padding,
        loss_checks.row_order,
        loss_checks.rows_together,
        loss_checks.masked_tokens,
        loss_checks.better_sample,
        zero_learning_rate,
        non_finite,
        kill_and_resume,
        reaches_workers,
        in_process_equals_ray,
        one_worker_equals_two,
    )
}
"""All checks by name, in the order of the report card: the cheap ones first."""
