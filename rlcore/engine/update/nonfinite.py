"""Losses and gradients that are not finite: terms and rows, the keys that help, skipped steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from rlcore.engine.update.items import UpdateItem
from rlcore.engine.update.loss_accumulator import first_of, row_names
from rlcore.errors import DataError
from rlcore.ops import Outputs, Term
from rlcore.protocol import DataProto

MOST_SKIPPED = 5
"""Optimizer steps in a row that `trainer.on_nonfinite=skip` leaves out; one more stops the run."""


LargestGradient = tuple[str, str, float]
"""A term, a row, and the largest absolute gradient of the one at the model's outputs of the other."""


class NotFiniteError(DataError):
    """A loss or a gradient of an optimizer step is not finite; all ranks raise it, before the weights change."""


def largest_gradients(
    out: Outputs, part: DataProto, terms_of: Callable[[Outputs], Mapping[str, Term]]
) -> list[LargestGradient]:
    """Return the largest gradient of each objective of `terms_of` at the outputs `out` of each row, before the mean."""
    found: list[LargestGradient] = []
    with torch.enable_grad():
        leaves = {name: values.detach().requires_grad_() for name, values in out.given.items()}
        for name, term in terms_of(Outputs(leaves, out.log_ratio_bound)).items():
            if term.weight is None or not term.total.requires_grad:
                continue
            gradients = torch.autograd.grad(
                term.total, list(leaves.values()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            by_row = [(each * term.weight).reshape(len(part), -1).abs().amax(-1) for each in gradients]
            sizes = torch.stack(by_row).amax(0).tolist()  # NaN is the largest
            found += [(name, row_names(part[[row]]), size) for row, size in enumerate(sizes)]
    return found


def explain(cause: str, found: Sequence[LargestGradient], item: UpdateItem, *, lr: float, dtype: torch.dtype) -> str:
    """Return the whole message: the cause, the terms and rows that it comes from, and the keys that help."""
    rows: dict[str, list[str]] = {}
    for term, row, size in found:
        if not math.isfinite(size):
            rows.setdefault(term, []).append(row)
    said = [f"the gradient of term {term!r} is not finite in rows {first_of(names)}" for term, names in rows.items()]
    if found and not rows:
        largest, most, _ = max(((term, size, row) for term, row, size in found), key=lambda each: each[1])
        rows[largest] = [row for term, row, size in found if term == largest and size >= most / 1000]
        said = [
            f"the gradients at the model's outputs are finite, the largest {most:.3g} of term {largest!r} in rows "
            f"{first_of(rows[largest])}"
        ]
    helps = [f"engine.lr below {lr:g}"]
    bound = item.numerics.log_ratio_bound
    if bound == 0:
        helps.insert(0, "trainer.log_ratio_bound=20, which bounds ratios and k3")
    for term in rows:
        coef = getattr(item.config, f"{term}_coef", 0)
        if coef:
            helps.append(f"algo.{term}_coef below {coef:g}")
    if dtype is not torch.float32:
        helps.append("model.dtype=fp32")
    if item.numerics.on_nonfinite == "stop":
        helps.append("trainer.on_nonfinite=skip, which leaves such steps out and may be set when the run is resumed")
    return f"{'; '.join([cause, *said])}; the weights were left unchanged. Keys that may help: {', '.join(helps)}"
