"""A policy loss against an independent one: written out row by row, on ragged rows with masked tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcore.ops import Loss, Outputs, needs_of

# In the middle of a response, at its end, nowhere, everywhere but one, and everywhere: the fifth row has no action.
MASKS = ((1, 1, 0, 1, 1), (1, 0, 1), (1, 1, 1, 1), (0, 1, 0), (0, 0), (1, 1, 1, 1, 0, 0), (1,))
ADVANTAGES = (1.0, -0.5, 2.0, -1.5, 0.75, -0.25, 0.5)
BUDGET = 8
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Response:
    """The actions of one response: its tokens with response_mask 1. Lists have one number, fp64, for each action.

    `log_probs` are scalar tensors with a gradient. `advantages` repeats the row's advantage, unless it has one for each
    token. `budget` is the constant `response_len`.
    """

    log_probs: list[Tensor]
    old_log_probs: list[float]
    ref_log_probs: list[float]
    rollout_log_probs: list[float]
    advantages: list[float]
    budget: int = BUDGET


def compare_policy_loss(
    loss: Loss,
    config: Any,
    by_hand: Callable[[Sequence[Response]], Tensor],
    *,
    spread: float = 0.5,
    token_advantages: bool = False,
) -> None:
    """Raise AssertionError unless what the engine minimises for `loss` is `by_hand`, in value and gradient, to 1e-6.

    `by_hand` gets seven responses, one of them without an action, and returns the loss, written out from its formula.
    Log-probs are about -2.5 nats; those of pi, pi_ref and of the policy that sampled differ from those of pi_old by
    `spread` nats (standard deviation). `token_advantages` gives the column `advantages` one number for each token. The
    loss must also be the same with wider padding and in any micro-batches, and its gradient must be exactly 0 at tokens
    with response_mask 0.
    """
    batch, log_probs = made_up_batch(spread, token_advantages)
    mask = batch["response_mask"].bool()
    leaf = log_probs.clone().requires_grad_()
    value = _minimised(loss, config, batch, leaf, [list(range(len(mask)))])
    (gradient,) = torch.autograd.grad(value, leaf)

    exact = log_probs.double().requires_grad_()
    expected = by_hand([_response(batch, exact, row) for row in range(len(mask))])
    (expected_gradient,) = torch.autograd.grad(expected, exact)
    _close(value, expected, "the loss")
    _close(gradient, expected_gradient, "the gradient")
    if expected_gradient.abs().max() < 1e-3:
        raise AssertionError("no token of the made-up batch has a gradient; change its spread")
    if gradient[~mask].any():
        raise AssertionError("tokens with response_mask 0 have a gradient")

    for extra, parts in (
        (3, [list(range(len(mask)))]),
        (0, [[2, 5], [0], [6, 4, 1], [3]]),
        (1, [[r] for r in range(len(mask))]),
    ):
        wide = {name: torch.nn.functional.pad(v, (0, extra)) if v.ndim > 1 else v for name, v in batch.items()}
        again = log_probs.clone().requires_grad_()
        same = _minimised(loss, config, wide, torch.nn.functional.pad(again, (0, extra)), parts)
        _close(same, value, f"the loss in {len(parts)} micro-batches, with {extra} more columns of padding,")
        _close(torch.autograd.grad(same, again)[0], gradient, f"its gradient in {len(parts)} micro-batches")


def made_up_batch(spread: float, token_advantages: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """Return the columns that a policy loss reads, [rows, tokens] or [rows], and the log-probs of pi."""
    draw = torch.Generator().manual_seed(20261121)
    lengths = [len(mask) for mask in MASKS]
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(inside.shape, generator=draw)

    old = -2.5 + noise(0.5)
    columns = {"old_log_probs": old, "ref_log_probs": old + noise(spread), "rollout_log_probs": old + noise(spread)}
    batch = {name: values * inside for name, values in columns.items()}
    batch["response_mask"] = torch.tensor([[*mask, *[0] * (max(lengths) - len(mask))] for mask in MASKS])
    advantages = torch.tensor(ADVANTAGES)
    batch["advantages"] = (advantages[:, None] + noise(0.5)) * inside if token_advantages else advantages
    return batch, (old + noise(spread)) * inside


def _response(batch: dict[str, Tensor], log_probs: Tensor, row: int) -> Response:
    actions = batch["response_mask"][row].nonzero()[:, 0].tolist()
    advantages = batch["advantages"][row].expand(log_probs.shape[1])
    names = ("old_log_probs", "ref_log_probs", "rollout_log_probs")
    old, ref, rollout = ([float(batch[name][row, token]) for token in actions] for name in names)
    given = [log_probs[row, token] for token in actions]
    return Response(given, old, ref, rollout, [float(advantages[token]) for token in actions])


def _minimised(
    loss: Loss, config: Any, batch: dict[str, Tensor], log_probs: Tensor, parts: Sequence[Sequence[int]]
) -> Tensor:
    """Return what the engine minimises: the sum over terms of weight * total / count, over all micro-batches."""
    totals: dict[str, tuple[Tensor, float, float | None]] = {}
    for rows in parts:
        given: dict[str, Tensor] = {name: torch.ones_like(log_probs[rows]) for name in needs_of(loss)}
        given["log_probs"] = log_probs[rows]
        columns = {name: values[rows] for name, values in batch.items()}
        terms = loss(Outputs(given), {**columns, "response_len": BUDGET}, config)
        for name, term in terms.items():
            total, count, _ = totals.get(name, (torch.zeros(()), 0.0, None))
            totals[name] = (total + term.total, count + float(term.count), term.weight)
    return torch.stack([w * total / count for total, count, w in totals.values() if w is not None and count]).sum()


def _close(got: Tensor, expected: Tensor, what: str) -> None:
    got, expected = got.detach().double(), expected.detach().double()
    away = float((got - expected).abs().max())
    if not away <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise AssertionError(f"{what} differs by {away:.3g}: {got.tolist()}, by hand {expected.tolist()}")
