"""The checks on a train engine, and the list of all checks.

A check takes a TrainEngineSuite and returns a few words on the things it checked. It raises CheckFailed with the fault,
or NotApplicable with the reason, which follows from the spec's capabilities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore import POLICY, ConfigError, DataError, DataProto, Ragged
from rlcore.config import from_yaml, to_yaml
from rlcore.engine import Numerics, TrainEngine, UpdateItem
from rlcore.ops import Loss
from rlcore_plugin_testing.report import CheckFailed, NotApplicable, expect_error
from rlcore_plugin_testing.train_engine import adapter_checks, problem, state_checks
from rlcore_plugin_testing.train_engine.ranks import ranks
from rlcore_plugin_testing.train_engine.reference import Reference
from rlcore_plugin_testing.train_engine.suite import (
    LINEAR,
    SMOOTH,
    TOLERANCE,
    TrainEngineSuite,
    expect_equal,
    expect_near,
    weights_of,
)

CUTS: tuple[dict[str, Any], ...] = (
    {},
    {"micro_batch_rows": 1},
    {"micro_batch_rows": 5},
    {"micro_batch_tokens": 30},
)
"""Ways to cut a mini-batch into micro-batches."""


def config(suite: TrainEngineSuite) -> str:
    """The spec and its default config are valid, and the engine describes the model that it loaded."""
    if suite.spec.check is not None:
        suite.spec.check(suite.config)
    if from_yaml(to_yaml(suite.config), suite.manager) != suite.config:
        raise CheckFailed("the config that is saved with a run is not the same when it is read back")
    if POLICY not in suite.spec.capabilities.kinds:
        raise CheckFailed("its capabilities leave out POLICY; every train engine holds policies")
    engine, reference = suite.engine(), suite.reference()
    if not isinstance(engine, TrainEngine):
        raise CheckFailed(f"create() returned a {type(engine).__name__}, which is no rlcore.engine.TrainEngine")
    wanted = {name: tuple(tensor.shape) for name, tensor in reference.weights.items()}
    if {name: tuple(shape) for name, shape in engine.shapes.items()} != wanted:
        different = [name for name in {**wanted, **engine.shapes} if wanted.get(name) != engine.shapes.get(name)]
        raise CheckFailed(f"`shapes` differs from the Hugging Face model in {', '.join(different[:5])}")
    if engine.vocab_size != suite.vocab:
        raise CheckFailed(f"vocab_size is {engine.vocab_size}; the model has {suite.vocab} logits")
    own = 0 if suite.own_config is None else len(dataclasses.fields(suite.own_config))
    kinds = ", ".join(map(str, suite.spec.capabilities.kinds))
    return f"{own} settings; roles: {kinds}; {len(wanted)} parameters"


def outputs(suite: TrainEngineSuite) -> str:
    """Outputs equal those of the plain model, in row order, at any temperature and however the rows are cut."""
    worst = 0.0
    batch = problem.rows(suite.vocab)
    for kind in suite.spec.capabilities.kinds:
        names = [name for name in kind.gives if name != "logits"]  # logits never become a column
        temperature = 0.7 if kind.is_language_model else 1.0
        wanted = _plain_outputs(suite.reference(kind, temperature=temperature), batch, names)
        for cut in CUTS:
            got = suite.engine(kind, trains=False, temperature=temperature, **cut).compute(batch, names)
            for name in names:
                worst = max(worst, _largest_difference(got[name], wanted[name], f"{name} with {cut or 'one cut'}"))
        empty = suite.engine(kind, trains=False).compute(batch[:0], names)
        if any(len(empty[name]) for name in names):
            raise CheckFailed("compute over no rows returned rows")
    return f"{len(CUTS)} cuts of a {_kinds(suite)}; off by at most {worst:.1g}"


@torch.no_grad()
def _plain_outputs(reference: Reference, batch: DataProto, names: Sequence[str]) -> dict[str, list[Tensor]]:
    """Return each output by row."""
    rows = [reference.outputs(*pair) for pair in zip(batch["prompts"], batch["responses"], strict=True)]
    return {name: [row[name].flatten() for row in rows] for name in names}


def _largest_difference(got: Ragged | Tensor, wanted: Sequence[Tensor], title: str) -> float:
    """Return the largest difference of any row's numbers. Raises CheckFailed for one above the tolerance."""
    lengths = [value.numel() for value in got]
    if lengths != [len(value) for value in wanted]:
        raise CheckFailed(f"{title}: rows have {lengths} numbers, not {[len(value) for value in wanted]}")
    off = [float((value.cpu().flatten() - want).abs().max()) for value, want in zip(got, wanted, strict=True)]
    if not max(off) <= 10 * TOLERANCE:
        raise CheckFailed(f"{title} is off by {max(off):.2g} in row {off.index(max(off))}")
    return max(off)


def gradients(suite: TrainEngineSuite) -> str:
    """Loss and gradient equal those of plain autograd in fp32, however the rows are cut into micro-batches."""
    worst = 0.0
    for kind in suite.spec.capabilities.kinds:
        item = suite.item(kind)
        reference = suite.reference(kind, **LINEAR)
        start = reference.weights
        wanted = reference.step([item], LINEAR["lr"])
        for cut in CUTS:
            engine = suite.engine(kind, **LINEAR, **cut)
            metrics = engine.update([item], epochs=1, step=0)
            title = f"a {kind} with {cut or 'one micro-batch'}"
            worst = max(worst, expect_near(weights_of(engine), reference.weights, start, title))
            for name, value in wanted.items():
                if not abs(metrics[name] - value) <= 2 * TOLERANCE * max(1.0, abs(value)):
                    raise CheckFailed(f"{title}: {name} is {metrics[name]:.9g}; plain autograd has {value:.9g}")
    return f"{len(CUTS)} cuts of a {_kinds(suite)}; off by at most {worst:.1g}"


def items(suite: TrainEngineSuite) -> str:
    """Several weighted batches with their losses share one optimizer step."""
    work = [suite.item(seed=1, weight=0.7), suite.item(seed=2, weight=0.5)]
    engine, reference = suite.engine(micro_batch_rows=5, **LINEAR), suite.reference(**LINEAR)
    start = reference.weights
    reference.step(work, LINEAR["lr"])
    _expect_steps(engine, engine.update(work, epochs=1, step=0), 1)
    off = expect_near(weights_of(engine), reference.weights, start, "two items with weights 0.7 and 0.5")
    return f"2 items; off by {off:.1g}"


def optimizer_steps(suite: TrainEngineSuite) -> str:
    """Each mini-batch of each epoch is a step of AdamW with the keys of `engine`, at the rate that `step` was given."""
    options: dict[str, Any] = {**SMOOTH, "betas": [0.8, 0.9], "weight_decay": 0.1, "schedule": "linear"}
    work = suite.item(sizes=[3, 6, 3])
    engine, reference = suite.engine(**options), suite.reference(**options)
    start = reference.weights
    total = 0
    for step, rate in ((0, 1.0), (5, 0.5)):
        _expect_steps(engine, engine.update([work], epochs=2, step=step), 6)
        total += 6
        for mini_batch in (0, 1, 2, 0, 1, 2):
            reference.step([work], SMOOTH["lr"] * rate, mini_batch)
    title = f"{total} steps with betas {options['betas']}, weight decay and a schedule"
    off = expect_near(weights_of(engine), reference.weights, start, title, 10 * TOLERANCE)
    still = suite.engine(lr=0.0)
    before = weights_of(still)
    still.update([suite.item()], epochs=1, step=0)
    expect_equal(weights_of(still), before, "after a step with learning rate 0")
    return f"{total} steps; off by {off:.1g}"


def clip(suite: TrainEngineSuite) -> str:
    """`approve` gets the square of the gradient's norm once a step, and the gradient is multiplied by its factor."""
    options = {**LINEAR, "clip_grad": 0.01}
    engine, reference = suite.engine(**options), suite.reference(**options)
    start = reference.weights
    wanted = reference.step([suite.item()], LINEAR["lr"])["train/grad_norm"]
    norm = engine.update([suite.item()], epochs=1, step=0)["train/grad_norm"]
    if not abs(norm - wanted) <= 2 * TOLERANCE * wanted:
        raise CheckFailed(f"the gradient's norm before clipping is {norm:.9g}; plain autograd has {wanted:.9g}")
    off = expect_near(weights_of(engine), reference.weights, start, "the update with clip_grad=0.01")
    return f"a gradient of norm {norm:.3g} clipped to 0.01; off by {off:.1g}"


def refused_step(suite: TrainEngineSuite) -> str:
    """An error of `approve` passes through `step` and leaves weights, version and optimizer as they were."""
    engine, plain = suite.engine(**SMOOTH), suite.engine(**SMOOTH)
    before = weights_of(engine)

    def refuse(squares: float) -> float:
        raise DataError("refused by the suite")

    step = engine.step
    vars(engine)["step"] = lambda lr, approve: step(lr, refuse)
    with expect_error(DataError, "an error of `approve`", "refused by the suite"):
        engine.update([suite.item()], epochs=1, step=0)
    del vars(engine)["step"]
    expect_equal(weights_of(engine), before, "after a step that `approve` refused")
    if engine.version:
        raise CheckFailed(f"after a step that `approve` refused, the version is {engine.version}, not 0")
    for each in (engine, plain):
        each.update([suite.item(seed=3)], epochs=1, step=0)
    expect_equal(weights_of(engine), weights_of(plain), "the update after a refused one, beside an engine without it")
    return "weights, version and the next update are as without it"


def non_finite(suite: TrainEngineSuite) -> str:
    """A loss or a gradient that is not finite is refused, naming rows, and changes nothing; so does a skipped step."""
    for loss, says in ((problem.nan_loss, "loss is not finite"), (problem.steep_loss, "gradient norm is nan")):
        engine = suite.engine(**SMOOTH)
        before = weights_of(engine)
        batch = problem.rows(suite.vocab)
        with expect_error(DataError, f"an update whose {says}", says, "uid=0:"):
            engine.update([UpdateItem(batch, [len(batch)], loss, None)], epochs=1, step=0)
        expect_equal(weights_of(engine), before, f"after an update whose {says}")
        engine.update([suite.item()], epochs=1, step=0)
        if not all(bool(tensor.isfinite().all()) for tensor in weights_of(engine).values()):
            raise CheckFailed(f"after an update whose {says}, the next one gives weights that are not finite")
        _skip(suite, loss, says)
    return "a loss and a gradient of NaN are refused, or skipped"


def _skip(suite: TrainEngineSuite, loss: Loss, says: str) -> None:
    """Skip a step between two others, and compare with an engine that only takes those."""
    engine, plain = suite.engine(**SMOOTH), suite.engine(**SMOOTH)
    batch = problem.rows(suite.vocab)
    bad = UpdateItem(batch, [len(batch)], loss, None, numerics=Numerics(on_nonfinite="skip"))
    for step in (0, 1):
        for each in (engine, plain):
            each.update([suite.item(seed=step)], epochs=1, step=step)
        if step == 0:
            metrics = engine.update([bad], epochs=1, step=step)
            counts = metrics.get("train/nonfinite_updates"), metrics["train/optimizer_steps"]
            if counts != (1, 0):
                raise CheckFailed(f"with on_nonfinite=skip, {counts[0]} updates whose {says} were counted, not 1")
    expect_equal(weights_of(engine), weights_of(plain), f"two steps with a skipped one between, whose {says}")
    if engine.version != plain.version:
        raise CheckFailed(f"after a skipped step the version is {engine.version}, not {plain.version}")


def frozen(suite: TrainEngineSuite) -> str:
    """An engine that does not train computes, and refuses updates and steps."""
    engine = suite.engine(trains=False)
    before = weights_of(engine)
    with expect_error(DataError, "an update of a frozen engine"):
        engine.update([suite.item()], epochs=1, step=0)
    with expect_error(DataError, "step() of a frozen engine"):
        engine.step(1.0, lambda squares: 1.0)
    expect_equal(weights_of(engine), before, "a frozen engine after refused updates")
    if engine.version:
        raise CheckFailed(f"a frozen engine has version {engine.version} after refused updates, not 0")
    got = engine.compute(problem.rows(suite.vocab), ["log_probs"])["log_probs"]
    assert isinstance(got, Ragged)
    if got.values.requires_grad:
        raise CheckFailed("log-probs of a frozen engine require a gradient")
    return "update and step are refused"


def bf16(suite: TrainEngineSuite) -> str:
    """With model.dtype=bf16 the forward rounds; master weights and their updates stay fp32."""
    try:
        engine = suite.engine(dtype="bf16", **{**SMOOTH, "lr": 1e-5})
    except ConfigError as refused:
        raise NotApplicable(f"it refuses model.dtype=bf16: {refused}") from refused
    start = suite.reference().weights
    expect_equal(weights_of(engine), start, "the fp32 export of a bf16 engine")
    metrics = engine.update([suite.item()], epochs=1, step=0)
    after = weights_of(engine)
    rounded = [name for name, tensor in after.items() if torch.equal(tensor, tensor.bfloat16().float())]
    if rounded:
        raise CheckFailed(f"after an update the master weights of {rounded[0]} are rounded to bf16")
    if all(torch.equal(after[name], start[name]) for name in start):
        raise CheckFailed("a step smaller than bf16 can hold changed no weight; master weights have to be fp32")
    batch = problem.rows(suite.vocab)
    fine, coarse = (e.compute(batch, ["log_probs"])["log_probs"] for e in (suite.engine(), engine))
    assert isinstance(fine, Ragged)
    assert isinstance(coarse, Ragged)
    off = float((fine.values - coarse.values).abs().max())
    if not off < 0.5:
        raise CheckFailed(f"log-probs in bf16 are off by up to {off:.2g} nats from those in fp32")
    return f"gradient norm {metrics['train/grad_norm']:.3g}; log-probs differ from fp32 by up to {off:.1g} nats"


def _expect_steps(engine: TrainEngine, metrics: dict[str, float], steps: int) -> None:
    if metrics["train/optimizer_steps"] != steps:
        raise CheckFailed(f"an update took {metrics['train/optimizer_steps']:g} optimizer steps, not {steps}")
    if metrics["train/skipped_updates"]:
        raise CheckFailed(f"an update skipped {metrics['train/skipped_updates']:g} mini-batches that have rows")


def _kinds(suite: TrainEngineSuite) -> str:
    return ", a ".join(map(str, suite.spec.capabilities.kinds))


CHECKS: dict[str, Callable[[TrainEngineSuite], str]] = {
    check.__name__: check
    for check in (
        config,
        outputs,
        gradients,
        items,
        optimizer_steps,
        clip,
        refused_step,
        non_finite,
        frozen,
        state_checks.versions,
        state_checks.resume,
        state_checks.damaged_state,
        state_checks.export,
        state_checks.load,
        state_checks.other_model,
        state_checks.incomplete_model,
        state_checks.save_pretrained,
        state_checks.offload,
        adapter_checks.adapters,
        bf16,
        ranks,
    )
}
"""All checks by name, in the order of the report card."""
