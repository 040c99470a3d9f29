"""The checks on an algorithm's losses, called directly with the rows that reached `update` in a real run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlcore import POLICY, DataProto, Ragged
from rlcore.engine.update.microbatch import column_values
from rlcore.protocol.dataproto import map_rows
from rlcore.protocol.row_groups import row_groups
from rlcore_plugin_testing.algorithm.losses import TOLERANCE, Evaluated, LossProbe, difference
from rlcore_plugin_testing.algorithm.suite import AlgorithmSuite
from rlcore_plugin_testing.algorithm.watch import Changes, RunRecord, function_name, hole_positions, with_holes
from rlcore_plugin_testing.report import CheckFailed, NotApplicable

MOST_ROWS = 8
"""Most rows (or units) that are checked one by one."""
FAR = 200.0
"""Nats that log-probs are moved by; exp of it is infinite in fp32."""
CANDIDATES = 3
"""Most samples whose score is raised, one after the other, until one of them shows an effect."""


def micro_batch_split(suite: AlgorithmSuite) -> str:
    """Loss and gradient are the same if the rows go through the model at once, in halves, or unit by unit."""

    def check(probe: LossProbe) -> None:
        whole = probe.evaluate()
        half = (len(probe.units) + 1) // 2
        for parts in ([_rows_of(probe.units[:half]), _rows_of(probe.units[half:])], probe.units):
            parts = [part for part in parts if part]
            if found := _compare(whole, lambda parts=parts: probe.evaluate(parts)):  # type: ignore[misc]
                raise CheckFailed(f"{probe.item.title}: cut into {len(parts)} micro-batches, {found}")

    return _each(suite.probes(suite.plain), check)


def padding(suite: AlgorithmSuite) -> str:
    """Loss and gradient are the same when every padded column is wider than necessary."""

    def check(probe: LossProbe) -> None:
        for extra in (1, 5):
            if found := _compare(probe.evaluate(), lambda extra=extra: probe.evaluate(extra=extra)):  # type: ignore[misc]
                raise CheckFailed(f"{probe.item.title}: with {extra} more columns of padding, {found}")

    return _each(suite.probes(suite.plain), check)


def row_order(suite: AlgorithmSuite) -> str:
    """Loss and gradient are the same for every order of the rows; units stay whole."""

    def check(probe: LossProbe) -> None:
        order = torch.randperm(len(probe.units), generator=torch.Generator().manual_seed(0)).tolist()
        for units in (probe.units[::-1], [probe.units[i] for i in order]):
            rows = _rows_of(units)
            if found := _compare(probe.evaluate(), lambda rows=rows: probe.evaluate([rows])):  # type: ignore[misc]
                raise CheckFailed(f"{probe.item.title}: with the rows in a different order, {found}")

    return _each(suite.probes(suite.plain), check)


def rows_together(suite: AlgorithmSuite) -> str:
    """A row's gradient depends only on its own unit's outputs: rows that a loss compares are kept together."""

    def check(probe: LossProbe) -> None:
        whole = probe.evaluate()
        for unit in probe.units[:MOST_ROWS]:
            mine = torch.zeros(len(probe.item.batch), dtype=torch.bool)
            mine[unit] = True
            leaves = {name: torch.where(_rows(mine, leaf), leaf, leaf - 0.7) for name, leaf in probe.leaves.items()}
            moved = probe.evaluate(leaves=leaves)
            for name, gradient in whole.gradient.items():
                away = ((gradient - moved.gradient[name]) * _rows(mine, gradient)).abs().max()
                if not float(away) <= 1e-7 + TOLERANCE * float(gradient.abs().max()):
                    raise CheckFailed(
                        f"{probe.item.title}: the gradient of a row changes with the outputs of rows outside its unit; "
                        "pass update(keep_together=COLUMN) for rows that the loss compares"
                    )

    probes = suite.probes(suite.plain)
    return _each(probes, check, f"units of {', '.join(sorted({_unit(probe) for probe in probes}))}")


def masked_tokens(suite: AlgorithmSuite) -> str:
    """Tokens with response_mask 0 get no gradient; their outputs affect no loss, gradient or result of a map."""
    finished = suite.changed("holes", Changes(holes=True, stop_after=1))
    maps_leave_out_masked(finished.record)
    probes = [probe for probe in suite.probes(finished) if "scores" not in probe.leaves]
    if not probes:
        raise NotApplicable("no loss reads an output of tokens")

    def check(probe: LossProbe) -> None:
        # Responses from neither generate nor encode are masked only here; columns derived from the mask stay as before.
        batch = probe.item.batch
        if not finished.record.masked:
            if "response_mask" not in batch:
                raise CheckFailed(f"{probe.item.title} gets no response_mask, so it cannot ignore any token")
            batch = with_holes(batch)
        holes = hole_positions(probe.lengths, probe.width)
        before = probe.evaluate(batch=batch)
        leaves = {name: torch.where(_like(holes, leaf), leaf - 2.0, leaf) for name, leaf in probe.leaves.items()}
        if "logits" in leaves:
            noise = torch.randn(leaves["logits"].shape, generator=torch.Generator().manual_seed(1))
            leaves["logits"] = torch.where(holes[..., None], noise, leaves["logits"])
        after = probe.evaluate(leaves=leaves, batch=batch)
        for name, gradient in after.gradient.items():
            if bool((gradient * _like(holes, gradient)).any()):
                raise CheckFailed(f"{probe.item.title}: tokens with response_mask 0 get a gradient by {name}")
        if found := difference(_as_one(before), _as_one(after)):
            raise CheckFailed(f"{probe.item.title}: with different outputs at masked tokens, {found}")

    return _each(probes, check)


def reports_nan(suite: AlgorithmSuite) -> None:
    """Raise CheckFailed when a loss returns a finite number although the model's outputs are NaN."""
    for probe in suite.probes(suite.plain):
        leaves = {name: leaf * torch.nan for name, leaf in probe.leaves.items()}
        if torch.isfinite(torch.tensor(probe.evaluate(leaves=leaves).objective)):
            raise CheckFailed(f"{probe.item.title} hides a model whose outputs are NaN behind a finite loss")


def stays_finite(suite: AlgorithmSuite) -> None:
    """Raise CheckFailed when a gradient is not finite although the log-probs are, FAR from those of the batch."""
    for probe in suite.probes(suite.plain):
        for shift in (FAR, -FAR) if "log_probs" in probe.leaves else ():
            leaves = {name: leaf + shift if name == "log_probs" else leaf for name, leaf in probe.leaves.items()}
            if not all(bool(each.isfinite().all()) for each in probe.evaluate(leaves=leaves).gradient.values()):
                raise CheckFailed(
                    f"{probe.item.title} has a gradient that is not finite where log-probs are {shift:g} nats from "
                    "those of the batch: out.ratio and kl_estimate bound log-ratios before exp"
                )


def maps_by_row(suite: AlgorithmSuite) -> None:
    """Raise CheckFailed when a map function returns different values for a row if it sees only some of the units."""
    for mapped in suite.plain.record.mapped:
        units = row_groups(len(mapped.batch), column_values(mapped.batch, mapped.keep_together))
        half = (len(units) + 1) // 2
        parts = [part for part in (_rows_of(units[:half]), _rows_of(units[half:])) if part]
        whole = map_rows(mapped.function, mapped.batch[_rows_of(units)])
        cut = DataProto.concat([map_rows(mapped.function, mapped.batch[part]) for part in parts])
        for name in whole.keys():  # noqa: SIM118 (a batch is not a dict)
            if not _alike(whole.view(name), cut.view(name)):
                raise CheckFailed(
                    f"map of {function_name(mapped.function)}: {name} of a row depends on the other rows; "
                    "map(..., keep_together=COLUMN) keeps a group whole, masked_moments counts over all rows"
                )


def maps_leave_out_masked(record: RunRecord) -> None:
    """Raise CheckFailed when a map function that reads response_mask returns values that depend on masked tokens."""
    for mapped in record.mapped:
        batch = mapped.batch
        if "response_mask" not in batch:
            continue
        mask, moved, outputs = batch.view("response_mask"), batch[:], []
        for name in batch.keys():  # noqa: SIM118 (a batch is not a dict)
            column = batch.view(name)
            if name.endswith(("log_probs", "values", "entropy")) and _side_by_side(column, mask):
                moved[name] = column.with_values(torch.where(mask.values == 0, column.values - 2.0, column.values))
                outputs.append(name)
        before, after = map_rows(mapped.function, batch), map_rows(mapped.function, moved)
        for name in before.keys():  # noqa: SIM118
            one, other = before.view(name), after.view(name)
            if _side_by_side(one, mask):
                one, other = (value.values[mask.values != 0] for value in (one, other))
            if not _alike(one, other):
                raise CheckFailed(
                    f"map of {function_name(mapped.function)}: {name} changes with {', '.join(outputs)} of tokens with "
                    "response_mask 0"
                )


def _side_by_side(one: Any, mask: Ragged) -> bool:
    return isinstance(one, Ragged) and one.offsets.tolist() == mask.offsets.tolist()


def _alike(one: Any, other: Any) -> bool:
    one, other = (value.values if isinstance(value, Ragged) else value for value in (one, other))
    if not isinstance(one, Tensor):
        return bool(one.tolist() == other.tolist())
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), TOLERANCE, 1e-6, equal_nan=True)


def better_sample(suite: AlgorithmSuite) -> str:
    """A higher advantage or score of a sample makes the update push the sample's log-prob further up."""
    probes = [probe for probe in suite.probes(suite.plain, kinds=[POLICY]) if _speaks_of_log_probs(probe)]
    with_advantages = [probe for probe in probes if "advantages" in probe.item.batch]
    scored = bool(suite.plain.record.scored)
    if not with_advantages and not scored:
        raise NotApplicable("there is neither a score nor a column `advantages`")
    looked = []
    for probe in with_advantages:
        _check_advantages(probe)
        looked.append(f"advantage in {probe.item.title}")
    if scored:
        looked.append(f"score, from {_check_scores(suite)}")
    return "; ".join(looked)


def _check_advantages(probe: LossProbe) -> None:
    probe = LossProbe(probe.item, probe.config, _vocab_of(probe), spread=0.0)
    batch = probe.item.batch
    before = probe.push(probe.evaluate())
    acts = batch.view("response_mask").to_padded(length=probe.width).any(1) if "response_mask" in batch else None
    for row in [row for row in range(len(batch)) if acts is None or acts[row]][:MOST_ROWS]:
        raised = batch[:]
        raised["advantages"] = _raised(batch["advantages"], row)
        after = probe.push(probe.evaluate(batch=raised))
        if not after[row] > before[row]:
            raise CheckFailed(
                f"{probe.item.title}: with a higher advantage of row {row}, its log-prob is pushed up by "
                f"{float(after[row]):.3g}, not by more than before ({float(before[row]):.3g})"
            )


def _raised(advantages: Tensor | Ragged, row: int) -> Tensor | Ragged:
    if isinstance(advantages, Tensor):
        advantages[row] += 1.0
        return advantages
    rows = [values + (index == row) for index, values in enumerate(advantages.to_list())]
    return Ragged.from_list(rows, dtype=advantages.dtype)


def _check_scores(suite: AlgorithmSuite) -> str:
    """Raise one sample's score and compare the update's effect on its log-prob with that of the plain run."""
    plain = suite.plain.record
    pushes = []
    for number, (call, row) in enumerate(_candidates(plain)[:CANDIDATES]):
        sample = _tokens(plain.scored[call][1])[row]
        changed = suite.changed(f"raised-{number}", Changes(raised=(call, row), stop_after=1)).record
        before, after = _push_of(sample, plain, suite), _push_of(sample, changed, suite)
        if after > before + 1e-6 * max(abs(before), 1e-3):
            return f"{before:.3g} to {after:.3g}"
        pushes.append(f"{before:.3g} to {after:.3g}")
    if not pushes:
        raise NotApplicable("no scored response differs from all others of its step")
    raise CheckFailed(f"the highest score of all does not push samples' log-probs further up: {', '.join(pushes)}")


def _candidates(record: RunRecord) -> list[tuple[int, int]]:
    """Return (call, row) of samples of step 1 whose score may be raised, lowest scores first.

    They are unlike all other samples, and from the call whose rows reached the update.
    """
    learnt = {tokens for item in record.items if item.step == 1 for tokens in _tokens(item.batch)}
    calls = [_tokens(batch) for step, batch in record.scored if step == 1]
    if not calls:
        return []
    call = max(range(len(calls)), key=lambda index: (sum(t in learnt for t in calls[index]), -index))
    times = Counter(chain.from_iterable(calls))
    scores = record.scored[call][1]["scores"]
    order = scores.argsort(stable=True).tolist()
    return [(call, row) for row in order if times[calls[call][row]] == 1]


def _push_of(sample: tuple[tuple[int, ...], ...], record: RunRecord, suite: AlgorithmSuite) -> float:
    """Return the push of step 1's policy updates on a response's log-prob; 0 if it is in none of them."""
    total = 0.0
    for item in record.items:
        if item.step == 1 and item.kind == POLICY and len(item.batch):
            probe = LossProbe(item, suite.config.algo, suite.vocab, spread=0.0)
            if _speaks_of_log_probs(probe):
                push = probe.push(probe.evaluate())
                total += sum(float(push[row]) for row, own in enumerate(_tokens(item.batch)) if own == sample)
    return total


def _tokens(batch: DataProto) -> list[tuple[tuple[int, ...], ...]]:
    prompts, responses = batch.view("prompts").to_list(), batch.view("responses").to_list()
    return [(tuple(p.tolist()), tuple(r.tolist())) for p, r in zip(prompts, responses, strict=True)]


def _speaks_of_log_probs(probe: LossProbe) -> bool:
    return bool({"log_probs", "logits"} & set(probe.leaves))


def _vocab_of(probe: LossProbe) -> int:
    return probe.leaves["logits"].shape[-1] if "logits" in probe.leaves else 0


def _as_one(evaluated: Evaluated) -> Evaluated:
    """Leave out the terms that are only metrics."""
    return Evaluated({"objective": evaluated.objective}, evaluated.objective, evaluated.gradient)


def _like(rows_tokens: Tensor, leaf: Tensor) -> Tensor:
    return rows_tokens.view(*rows_tokens.shape, *[1] * (leaf.dim() - 2))


def _rows_of(units: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(units))


def _rows(rows: Tensor, leaf: Tensor) -> Tensor:
    return rows.view(-1, *[1] * (leaf.dim() - 1))


def _unit(probe: LossProbe) -> str:
    return f"column {probe.item.keep_together}" if probe.item.keep_together else "one row"


def _compare(whole: Evaluated, evaluate: Callable[[], Evaluated]) -> str | None:
    """Return the difference in words, or the exception of the loss; None where there is none."""
    try:
        return difference(whole, evaluate())
    except Exception as error:  # a loss may raise anything on rows that it was not written for
        return f"the loss raises {type(error).__name__}: {error}"


def _each(probes: list[LossProbe], check: Callable[[LossProbe], None], extra: str = "") -> str:
    for probe in probes:
        check(probe)
    titles = ", ".join(f"{probe.item.title} ({len(probe.item.batch)} rows)" for probe in probes)
    return f"{titles}; {extra}" if extra else titles
