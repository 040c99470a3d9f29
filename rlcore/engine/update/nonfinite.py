"""Losses and gradients that are not finite: terms and rows, the keys that help, skipped steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rlcore.engine.update.items import UpdateItem
from rlcore.engine.update.loss_accumulator import first_of, row_names
from rlcore.errors import DataError
from rlcore.ops import Outputs, Term
from rlcore.protocol import DataProto

MOST_SKIPPED = 5
"""Optimizer steps in a row that `trainer.on_nonfinite=skip` leaves out; one more stops the run."""


class NotFiniteError(DataError):
    """A loss or a gradient of an optimizer step is not finite; all ranks raise it, before the weights change."""


def bad_gradients(
    out: Outputs, part: DataProto, terms_of: Callable[[Outputs], Mapping[str, Term]]
) -> list[tuple[str, str]]:
    """Return each objective of `terms_of` and each row for which its gradient at the outputs `out` is not finite."""
    found = []
    with torch.enable_grad():
        leaves = {name: values.detach().requires_grad_() for name, values in out.given.items()}
        terms = terms_of(Outputs(leaves, out.log_ratio_bound))
        for name, term in terms.items():
            if term.weight is None or not term.total.requires_grad:
                continue
            gradients = torch.autograd.grad(term.total, list(leaves.values()), retain_graph=True, allow_unused=True)
            bad = torch.zeros(len(part), dtype=torch.bool)
            for gradient in gradients:
                if gradient is not None:
                    bad |= ~_finite_rows(gradient).cpu()
            found += [(name, row_names(part[[row]])) for row in bad.nonzero().flatten().tolist()]
    return found


def _finite_rows(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).isfinite().all(-1)


def explain(cause: str, found: Sequence[tuple[str, str]], item: UpdateItem, *, lr: float, dtype: torch.dtype) -> str:
    """Return the whole message: the cause, the pairs of a term and a row that were found, and the keys that help."""
    rows: dict[str, list[str]] = {}
    for term, row in found:
        rows.setdefault(term, []).append(row)
    said = [f"the gradient of term {term!r} is not finite in rows {first_of(names)}" for term, names in rows.items()]
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
