"""The checks on an algorithm's runs, and the list of all checks.

A check takes an AlgorithmSuite and returns a few words on the things it checked. It raises CheckFailed with the fault,
or NotApplicable with the reason. The reason follows from the algorithm's roles and runs; no author can set it.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from collections.abc import Callable

from rlcore import PluginManager, Run
from rlcore.config import compose, from_yaml, to_yaml
from rlcore.training.preflight import preflight
from rlcore_plugin_testing.algorithm import loss_checks
from rlcore_plugin_testing.algorithm.problem import STEPS
from rlcore_plugin_testing.algorithm.suite import STOPPED_AT, AlgorithmSuite, FinishedRun, contents
from rlcore_plugin_testing.algorithm.watch import Changes, function_name, plain_function
from rlcore_plugin_testing.report import CheckFailed, NotApplicable

METRIC = re.compile(r"[A-Za-z]\w*([/.@-]\w+)*")
NOT_FINITE = re.compile(r"not finite|\b(nan|inf)\b")
OF_ROWS = re.compile(r"(time|timeline|throughput|rollout|response)/|health/effective_tokens$")
"""The metrics of times and of rows, which differ where an episode has more rows."""
RATIO_TOLERANCE = 1e-4
"""Largest distance of a ratio from 1 due to fp32 rounding: rollout and update compute in different orders."""


def config(suite: AlgorithmSuite) -> str:
    """The spec is valid, and so is its default config (with the given settings): rlcore train would start."""
    plugins = PluginManager.load(suite.plugins)
    config = compose([f"algo={suite.name}", *suite.settings], plugins)
    roles = preflight(config, plugins).roles
    if from_yaml(to_yaml(config), plugins) != config:
        raise CheckFailed("the config changes when it is saved with a run and read back")
    fields = len(dataclasses.fields(suite.spec.algorithm.config_class))
    return f"{fields} settings; roles: {', '.join(roles) or 'none'}"


def steps(suite: AlgorithmSuite) -> str:
    """It takes two steps on the tiny model, asks every role, and at least one row reaches an optimizer."""
    finished = suite.plain
    items = [item for item in finished.record.items if len(item.batch)]
    if any(role.trains for role in suite.roles.values()) and not items:
        raise CheckFailed(f"in {len(finished.record.metrics)} steps no row reached update() of any role")
    idle = [name for name in suite.roles if name not in finished.record.asked]
    if idle and not suite.spec.algorithm(suite.config.algo).evaluates:
        raise CheckFailed(
            f"roles() declares {', '.join(idle)}, and no step calls a method of it; use the role, or leave it out"
        )
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
                raise CheckFailed(f"a metric is called {name!r}; use words of letters, digits and _, separated by /")
    return f"{len(names)} metrics"


def same_seed(suite: AlgorithmSuite) -> str:
    """A second run with the same seed gives the same metrics and samples, for any state of global random generators."""
    again = suite.changed("again", Changes(random_seed=20261121))
    if found := _unequal(suite.plain, again, exact=True):
        raise CheckFailed(
            f"two runs with one seed differ: {found}. Randomness must come from the seed, not from random or torch"
        )
    return _compared(again)


def reaches_workers(suite: AlgorithmSuite) -> str:
    """Loss and map functions are module-level functions, and run in Ray's worker processes."""
    record = suite.plain.record
    called: list[Callable[..., object]] = [item.loss for item in record.items]
    called += [mapped.function for mapped in record.mapped]
    functions = list(dict.fromkeys(map(plain_function, called)))
    for function in functions:
        name = function_name(function)
        module = importlib.import_module(function.__module__)
        if getattr(module, name, None) is None:
            raise CheckFailed(
                f"{name} is not a module-level function of {function.__module__}; define it there with `def`, and pass "
                "settings with functools.partial"
            )
    suite.on_ray(2)
    return f"{', '.join(map(function_name, functions)) or 'no function'}"


def in_process_equals_ray(suite: AlgorithmSuite) -> str:
    """A run in one process and one on Ray give the same samples, and the same metrics up to rounding."""
    # The run on Ray has two workers. Only if it differs, a run with one worker tells the two causes apart.
    if _unequal(suite.plain, suite.on_ray(2)) and (found := _unequal(suite.plain, suite.on_ray(1))):
        raise CheckFailed(f"in process and on Ray differ: {found}")
    return _compared(suite.plain)


def one_worker_equals_two(suite: AlgorithmSuite) -> str:
    """One worker and two give the same samples, and the same metrics up to rounding; map functions see parts."""
    loss_checks.maps_by_row(suite)  # here, as Ray's workers would send so few rows to the controller
    if _unequal(suite.plain, suite.on_ray(2)) and (found := _unequal(suite.on_ray(1), suite.on_ray(2))):
        raise CheckFailed(
            f"1 worker and 2 differ: {found}. A function that sees some of the rows must not depend on the others"
        )
    return _compared(suite.on_ray(2))


def zero_learning_rate(suite: AlgorithmSuite) -> str:
    """At a learning rate that rounds to 0 the weights stay equal bit for bit, and the ratio to old_log_probs at 1."""
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
            raise CheckFailed(f"the ratio of {loss} differs from 1 by up to {away:.3g}")
    ratios = ", ".join(finished.record.ratios)
    return f"weights equal; {f'ratio of {ratios} at 1' if ratios else 'no loss reads old_log_probs'}"


def resume(suite: AlgorithmSuite) -> str:
    """A run that stops before a checkpoint and is resumed in this process equals an uninterrupted one bit for bit."""
    files = _equal_end(suite, suite.stopped_and_resumed)
    return f"stopped in step {STOPPED_AT} of {STEPS}; {files} files of weights and optimizers are equal"


def kill_and_resume(suite: AlgorithmSuite) -> str:
    """A run that is killed in its own process and resumed equals an uninterrupted one bit for bit."""
    files = _equal_end(suite, suite.killed_and_resumed)
    return f"killed in step {STOPPED_AT} of {STEPS}; {files} files of weights and optimizers are equal"


def _equal_end(suite: AlgorithmSuite, resumed: FinishedRun) -> int:
    """Compare a resumed run with the plain one: metrics, samples, state, weights, optimizers. Return the file count."""
    if found := _unequal(suite.plain, resumed, exact=True):
        raise CheckFailed(
            f"the resumed run differs: {found}. State that one step writes and a later one reads belongs in state_dict"
        )
    one, other = suite.plain.saved(STEPS), resumed.saved(STEPS)
    if (state := suite.plain.state(STEPS)) != (resumed_state := resumed.state(STEPS)):
        raise CheckFailed(f"the resumed run ends with the state_dict() {resumed_state}, not {state}")
    if different := [name for name in {**one, **other} if one.get(name) != other.get(name)]:
        raise CheckFailed(f"the resumed run ends with different contents in {', '.join(different)}")
    return len(one)


def non_finite(suite: AlgorithmSuite) -> str:
    """A score or a loss that is not finite stops the run with an error; far log-probs leave gradients finite."""
    plain = suite.plain.record
    if not any(len(item.batch) for item in plain.items) and not plain.scored:
        raise NotApplicable("it scores nothing and updates nothing")
    looked = []
    if plain.scored:
        looked.append("a score")
        _expect_stop(suite, "nan-score", Changes(nan_score=True), "a score of NaN")
    if plain.items:
        looked.append("a loss")
        _expect_stop(suite, "nan-loss", Changes(nan_loss=True), "a loss of NaN")
        loss_checks.reports_nan(suite)
        loss_checks.stays_finite(suite)
    return f"the run stops for {' and '.join(looked)} of NaN"


def failed_rewards(suite: AlgorithmSuite) -> str:
    """Rows whose reward failed reach no update; the step is taken with the others."""
    if not suite.plain.record.scored:
        raise NotApplicable("it scores nothing")
    record = suite.changed("failed", Changes(failed=True, stop_after=1)).record
    compared = 0
    for item in record.items:
        if {"uid", "sample_index"} <= set(item.batch.keys()):
            rows = list(zip(item.batch["uid"], item.batch["sample_index"].tolist(), strict=True))
            compared += 1
            if taught := sum(row in record.failed for row in rows):
                raise CheckFailed(
                    f"{item.title}: {taught} of {len(rows)} rows have no reward, as it failed. Take the rows that "
                    "batch.union(run.reward(batch)) keeps"
                )
    if record.items and not compared:
        raise CheckFailed("no update got the columns uid and sample_index; keep those of generate() in the batch")
    return f"{len(record.failed)} rows without a reward reach no update"


def branches(suite: AlgorithmSuite) -> str:
    """An episode counts once, however many branches it has: with two equal ones it teaches the same as with one."""
    if not suite.plain.record.generated:
        raise NotApplicable("it generates nothing")
    plain = suite.plain.record.metrics[0]
    forked = suite.changed("forked", Changes(forked=True, stop_after=1)).record.metrics[0]
    names = [name for name in {**plain, **forked} if not OF_ROWS.match(name)]
    for name in names:
        one, two = (float(row.get(name, math.nan)) for row in (plain, forked))
        if not _near(one, two):
            raise CheckFailed(
                f"{name} is {one:.9g}, and {two:.9g} with a second branch in some episodes. Give "
                "`episode=episodes(batch)` to group_advantages and its like, or take the rows of `one_row_each`"
            )
    return f"{len(names)} metrics are equal with a second branch in some episodes"


def _expect_stop(suite: AlgorithmSuite, name: str, changes: Changes, fault: str) -> None:
    error = suite.expect_error(name, changes)
    if error is None:
        raise CheckFailed(f"with {fault} the run continued")
    if not NOT_FINITE.search(str(error)):
        raise CheckFailed(f"with {fault} the run stopped, but its error does not name the cause: {error}")


def _unequal(one: FinishedRun, other: FinishedRun, *, exact: bool = False) -> str | None:
    """Return the first difference of two runs. Unless `exact`, metrics may differ by 1e-4 of their size, or by 1e-5."""
    for a, b in zip(one.samples, other.samples, strict=False):
        if a != b:
            return f"prompt {a['prompt_text']!r} got {a['response_text']!r} and {b['response_text']!r}, or other scores"
    if len(one.samples) != len(other.samples) or len(one.numbers) != len(other.numbers):
        return f"{len(one.samples)} and {len(other.samples)} samples, {len(one.numbers)} and {len(other.numbers)} steps"
    tolerance = 0.0 if exact else 1e-4
    for a, b in zip(one.numbers, other.numbers, strict=True):
        for name in {**a, **b}:
            x, y = (float(row.get(name, math.nan)) for row in (a, b))
            if not _near(x, y, tolerance):
                return f"{name} of step {a['step']} is {x:.9g} and {y:.9g}"
    return None


def _near(one: float, other: float, tolerance: float = 1e-4) -> bool:
    return one == other or abs(one - other) <= tolerance * max(0.1, abs(one), abs(other))


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
        failed_rewards,
        branches,
        resume,
        kill_and_resume,
        reaches_workers,
        in_process_equals_ray,
        one_worker_equals_two,
    )
}
"""All checks by name, in the order of the report card: cheap ones first."""
