"""Advantages from scores, and from token rewards with a critic's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

Uid = Sequence[str] | np.ndarray
"""The group of each row: one name per row."""


class Columns(Protocol):
    """The columns of a batch by name, as a DataProto has them."""

    def __contains__(self, name: object) -> bool: ...

    def __getitem__(self, name: str) -> Any: ...

    def __len__(self) -> int: ...


def episodes(batch: Columns) -> list[str]:
    """Return the name of each row's episode; rows with equal names are one sample, the branches of an episode.

    Seats of a game are episodes of their own, and so is each row of a run without an environment.
    """
    if "episode" not in batch:
        return [str(row) for row in range(len(batch))]
    seats = batch["seat"].tolist() if "seat" in batch else [0] * len(batch)
    return [f"{name} {seat}" for name, seat in zip(batch["episode"], seats, strict=True)]


def one_row_each(episode: Uid) -> tuple[Tensor, Tensor]:
    """Return the first row of each episode, int64 [episodes], and each row's place among these, int64 [rows].

    `values[first]` has one value per episode, and `per_episode[place]` one per row again.
    """
    place = group_index(episode)
    first = torch.full((int(place.max()) + 1 if len(place) else 0,), len(place))
    return first.scatter_reduce(0, place, torch.arange(len(place)), "amin"), place


def group_index(uid: Uid) -> Tensor:
    """Return each row's group number, int64 [rows]; groups are numbered in order of first appearance."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(str(u), len(numbers)) for u in uid], dtype=torch.int64)


def group_means(values: Tensor, uid: Uid, weights: Tensor | None = None, *, episode: Uid | None) -> Tensor:
    """Return the mean of `values` [rows] over the rows with each row's `uid`, fp64 [rows].

    `weights` [rows], such as numbers of tokens, make it a weighted mean; it is 0 where a group's weights are all 0.
    `episode`: the names that `episodes(batch)` returns; an episode counts once: the mean of its rows is one value.
    With None each row counts. Equal values have exactly their value as their mean. Raises ValueError when the lengths
    differ.
    """
    if values.ndim != 1 or len(values) != len(uid):
        raise ValueError(f"values has shape {tuple(values.shape)}, uid {len(uid)} rows; both must be one value per row")
    if (merged := _merged(episode, uid, values, weights)) is not None:
        own, place, (values, weights) = merged
        return group_means(values, own, weights, episode=None)[place]
    # fp64, so that equal values minus their mean give exactly 0 in groups of any size.
    shares = torch.ones_like(values) if weights is None else weights
    total = _group_sums(shares.double(), uid)
    return torch.where(total == 0, 0.0, _group_sums(values.double() * shares.double(), uid) / total)


def group_advantages(
    scores: Tensor,
    uid: Uid,
    *,
    episode: Uid | None,
    divide_by_std: bool = True,
    eps: float = 1e-6,
    weights: Tensor | None = None,
) -> Tensor:
    """Return each score's advantage over its group, fp32 [rows]: (score - mean) / (std + eps) over rows of equal `uid`.

    `scores` is [rows]. The standard deviation is the unbiased one, and 0 for a group of one row. A group of equal
    scores gets exactly 0. `divide_by_std=False` omits the division. `weights` [rows] are those of the mean that is
    subtracted. Sources: GRPO, arXiv 2402.03300, section 4.1; without the division: Dr. GRPO, arXiv 2503.20783; weights:
    OPO, arXiv 2505.23585. `episode`: the names that `episodes(batch)` returns; an episode counts once, with the mean of
    its rows, and its rows get its advantage. With None each row counts. Raises ValueError when the lengths differ.
    """
    if (merged := _merged(episode, uid, scores, weights)) is not None:
        own, place, (scores, weights) = merged
        alone = group_advantages(scores, own, episode=None, divide_by_std=divide_by_std, eps=eps, weights=weights)
        return alone[place]
    centred = scores.double() - group_means(scores, uid, weights, episode=None)
    if divide_by_std:
        squares = (scores.double() - group_means(scores, uid, episode=None)).square()
        variance = _group_sums(squares, uid) / (_group_sums(torch.ones_like(squares), uid) - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)
    return centred.float()


def leave_one_out(values: Tensor, uid: Uid, *, episode: Uid | None) -> Tensor:
    """Return each value minus the mean of the other values with its `uid`, fp32 [rows]; 0 for a group of one row.

    `values` is [rows]. Equal values of a group give exactly 0. `episode`: the names that `episodes(batch)`
    returns; an episode counts once, with the mean of its rows, and its rows get its result. With None each row counts.
    Source: RLOO, arXiv 2402.14740, equation 6. Raises ValueError when the lengths differ.
    """
    if (merged := _merged(episode, uid, values)) is not None:
        own, place, (values,) = merged
        return leave_one_out(values, own, episode=None)[place]
    centred = values.double() - group_means(values, uid, episode=None)
    count = _group_sums(torch.ones_like(centred), uid)
    # value - mean of the others = (value - mean of all) n / (n - 1)
    return (centred * (count / (count - 1).clamp(min=1))).float()


def _merged(episode: Uid | None, uid: Uid, *columns: Tensor | None) -> tuple[Uid, Tensor, list[Any]] | None:
    """Return the episodes' uid, each row's place among them, and the columns' means over an episode's rows.

    None when no episode has several rows.
    """
    if episode is None or len(set(episode)) == len(uid):
        return None
    first, place = one_row_each(episode)
    means = [None if each is None else group_means(each, episode, episode=None)[first] for each in columns]
    return np.asarray(uid)[first.numpy()], place, means


def _group_sums(values: Tensor, uid: Uid) -> Tensor:
    """Return the sum of `values` [rows] over the rows with each row's `uid`, [rows]."""
    index = group_index(uid).to(values.device)
    return values.new_zeros(len(values)).index_add_(0, index, values)[index]


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), [rows, tokens], by generalised advantage estimation; 0 where `mask` is 0.

    `rewards`, `values` and the 0/1 `mask` are [rows, tokens]. A value is the return expected before its token was
    chosen. The actions of a row are its tokens with mask 1; all other tokens are skipped, and may hold any number.
    Over a row's actions 1..n, with the value 0 after the last,

        delta_i = r_i + gamma V_{i+1} - V_i        A_i = delta_i + gamma lam A_{i+1}        R_i = A_i + V_i

    Source: arXiv 1506.02438, eq. 16. Raises ValueError when the shapes differ.
    """
    if rewards.ndim != 2 or not rewards.shape == values.shape == mask.shape:
        shapes = ", ".join(str(tuple(each.shape)) for each in (rewards, values, mask))
        raise ValueError(f"rewards, values and mask have the shapes {shapes}; all must be [rows, tokens]")
    # [tokens, rows], so that each iteration of the loop reads and writes contiguous memory.
    acts = mask.bool().T.contiguous()
    reward = torch.where(acts, rewards.T, 0.0)
    value = torch.where(acts, values.T, 0.0)
    advantages = torch.zeros_like(value)
    next_value = next_advantage = value.new_zeros(value.shape[1])
    for token in reversed(range(len(value))):
        delta = reward[token] + gamma * next_value - value[token]
        advantages[token] = torch.where(acts[token], delta + gamma * lam * next_advantage, 0.0)
        next_advantage = torch.where(acts[token], advantages[token], next_advantage)
        next_value = torch.where(acts[token], value[token], next_value)
    return advantages.T.contiguous(), (advantages + value).T.contiguous()
