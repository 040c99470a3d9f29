"""Checks an update call, and spreads its rows over ranks and mini-batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor, tensor

from rlcore.config import TrainerConfig
from rlcore.engine.update.items import Importance, Numerics, UpdateItem
from rlcore.engine.update.microbatch import column_values, update_plan
from rlcore.errors import DataError
from rlcore.ops import Loss, episodes, needs_of
from rlcore.plugins import Role
from rlcore.protocol import DataProto
from rlcore.protocol.glossary import check_fields


def check_update(name: str, role: Role, losses: Sequence[Loss], epochs: int, mini_batches: int) -> None:
    """Raise DataError for an update that role `name` does not support."""
    if not role.trains:
        raise DataError(f"role {name!r} is frozen; declare it with Role(trains=True) to update it")
    for option, value in (("epochs", epochs), ("mini_batches", mini_batches)):
        if value < 1:
            raise DataError(f"{name}.update({option}={value}): it must be at least 1")
    gives = role.kind.gives
    for loss in losses:
        if missing := [need for need in needs_of(loss) if need not in gives]:
            raise DataError(
                f"loss {getattr(loss, '__name__', loss)!r} needs {', '.join(missing)}, but role {name!r} is a "
                f"{role.kind}, which gives {', '.join(gives)}; declare the needed outputs with @needs(...)"
            )


def check_constants(constants: Mapping[str, float], batches: Sequence[DataProto]) -> None:
    """Raise DataError for a constant that is a tensor column of a batch, or no finite number."""
    for name, value in constants.items():
        if any(name in rows.batch for rows in batches):
            raise DataError(f"update(constants={{{name!r}: ...}}): the batch has a column of this name; rename one")
        if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
            raise DataError(f"update(constants={{{name!r}: {value!r}}}): it must be a finite number")


def importance_of(role: Role, trainer: TrainerConfig) -> Importance | None:
    """Return the correction of the role's updates for tokens of another policy; None: no correction."""
    kind = trainer.correction
    if kind == "off" or not role.generates:
        return None
    low, high = trainer.importance_band
    return Importance(kind, trainer.importance_cap, (low, high))


def row_weights(rows: DataProto) -> Tensor | None:
    """Return 1 / the number of branches of each row's episode among `rows`, fp32 [rows]; None if all are 1."""
    names = episodes(rows)
    branches = rows.view("branch").tolist() if "branch" in rows else range(len(rows))
    count = Counter(name for name, _ in set(zip(names, branches, strict=True)))
    if len(count) == len(names) or set(count.values()) == {1}:
        return None
    return tensor([1.0 / count[name] for name in names])


def plan_update(
    batches: Sequence[tuple[DataProto, Loss, float]],
    ranks: int,
    *,
    mini_batches: int,
    keep_together: str | None,
    costs: Callable[[DataProto], list[int] | None],
    config: Any,
    importance: Importance | None,
    numerics: Numerics,
    constants: Mapping[str, float],
) -> list[list[UpdateItem]]:
    """Return the items of each rank, one for each (batch, loss, weight), with the rows of its mini-batches in order.

    `costs` returns the cost of each row, which balances rows over the ranks; None: balance by number of rows.
    """
    shares: list[list[UpdateItem]] = [[] for _ in range(ranks)]
    for rows, loss, weight in batches:
        check_fields(rows)
        wanted = ["uid", *([keep_together] if keep_together else [])]
        objects = [name for name in dict.fromkeys(wanted) if name in rows.non_tensor_batch]
        sent = rows.select(list(rows.batch.keys()), objects, [])
        # A loss of pairs reads both rows of a pair in one call, so it has one row of each episode, without a weight.
        if keep_together in (None, "uid") and (weights := row_weights(rows)) is not None:
            sent["row_weight"] = weights
        plan = update_plan(len(rows), column_values(rows, keep_together), mini_batches, ranks, costs(rows))
        for share, cuts in zip(shares, plan, strict=True):
            # One selection for all mini-batches of a rank, which the worker cuts by `sizes`: fewer references to send.
            indices = [row for cut in cuts for row in cut]
            sizes = [len(cut) for cut in cuts]
            mine = sent[indices]
            share.append(UpdateItem(mine, sizes, loss, config, weight, keep_together, importance, numerics, constants))
    return shares
