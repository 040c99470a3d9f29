"""Estimates of an evaluation from several samples per prompt: pass@k, maj@k, and intervals around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlcore.ops import group_index

Z95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


@dataclass(frozen=True)
class Estimate:
    """A mean, such as a share of 0 to 1, with the bounds of its 95 % interval, and its standard error."""

    value: float
    low: float
    high: float
    error: float


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the probability that k out of `samples` responses, `correct` of them right, include a right one.

    The unbiased estimator of arXiv 2107.03374, eq. 1: 1 - C(n - c, k) / C(n, k).
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def maj_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """Return the probability that the majority answer of k of a prompt's samples is right (arXiv 2203.11171).

    answers: the final answer of each sample; None for a sample without one, which has no vote.
    right: whether each sample is right.

    The exact mean over all C(n, k) subsets of the samples, so without bias and without a random draw. Between answers
    with equally many votes each wins with the same probability. If samples of one answer are scored differently, the
    answer counts as right by their share. A subset without any vote is wrong.
    """
    votes: dict[str, list[bool]] = {}
    for answer, correct in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(bool(correct))
    classes = [(len(members), sum(members)) for members in votes.values()]
    probability = 0.0
    for winning in range(1, min(k, max((size for size, _ in classes), default=0)) + 1):
        probability += _won_with(winning, classes, len(answers), k)
    return probability


def _won_with(winning: int, classes: Sequence[tuple[int, int]], samples: int, k: int) -> float:
    """Return the probability that the most votes of an answer are `winning`, and that the answer chosen is right.

    classes: number of samples, and of right ones, by answer.
    """
    # Answers with fewer samples can neither win nor tie, so they are drawn freely, as samples without an answer are.
    able = [(size, correct) for size, correct in classes if size >= winning]
    free = samples - sum(size for size, _ in able)
    # subsets[drawn, winners]: the ways to draw, and `winning` times their sum over the winners of the share right.
    subsets = {(drawn, 0): (math.comb(free, drawn), 0) for drawn in range(min(free, k) + 1)}
    for size, correct in able:
        longer: dict[tuple[int, int], tuple[int, int]] = {}
        for (drawn, winners), (ways, shares) in subsets.items():
            for taken in range(min(winning, k - drawn) + 1):
                wins = taken == winning
                times = math.comb(size, taken)
                # The share right, correct / size, times C(size, taken): a whole number when multiplied by `taken`.
                gain = correct * math.comb(size - 1, taken - 1) * ways if wins else 0
                key = (drawn + taken, winners + wins)
                old_ways, old_shares = longer.get(key, (0, 0))
                longer[key] = (old_ways + times * ways, old_shares + times * shares + gain)
        subsets = longer
    total = math.comb(samples, k) * winning
    return sum(
        shares / (winners * total) for (drawn, winners), (_, shares) in subsets.items() if drawn == k and winners
    )


def share_with_interval(values: Sequence[float], clusters: Sequence[str], samples: int) -> Estimate:
    """Return the mean of values of 0 to 1 with its 95 % interval, where values of one cluster are not independent.

    clusters: the prompt of each value. samples: number of samples behind the values.

    The standard error is clustered (arXiv 2411.00640, times sqrt(G / (G - 1)) for G prompts). The interval is Wilson's
    score interval with the number of independent samples that would have this standard error: at most `samples`, and
    the number of prompts where all values are 0 or all are 1. So it stays within 0 and 1, and its width is never 0.
    With one prompt it says nothing: 0 to 1. Without values all three are NaN.
    """
    if not len(values):
        return Estimate(math.nan, math.nan, math.nan, math.nan)
    mean = float(np.mean(values))
    error = clustered_error(values, clusters)
    prompts = len(set(clusters))
    variance = mean * (1 - mean)
    if prompts == 1:
        return Estimate(mean, 0.0, 1.0, error)
    if variance == 0:
        count = float(prompts)
    else:
        count = min(variance / error**2, samples) if error else float(samples)
    centre = (mean * count + Z95**2 / 2) / (count + Z95**2)
    half = Z95 / (count + Z95**2) * math.sqrt(count * variance + Z95**2 / 4)
    return Estimate(mean, max(0.0, min(centre - half, mean)), min(1.0, max(centre + half, mean)), error)


def mean_with_interval(values: Sequence[float], clusters: Sequence[str]) -> Estimate:
    """Return the mean of values of any size, such as differences, with its 95 % interval of 1.96 clustered errors."""
    mean = float(np.mean(values))
    error = clustered_error(values, clusters)
    return Estimate(mean, mean - Z95 * error, mean + Z95 * error, error)


def clustered_error(values: Sequence[float], clusters: Sequence[str]) -> float:
    """Return the standard error of the mean of values that are independent between clusters only; infinite for one."""
    deviations = np.asarray(values, dtype=float) - np.mean(values)
    sums = np.bincount(group_index(list(clusters)).numpy(), weights=deviations)
    count = len(sums)
    if count == 1:
        return math.inf
    return float(math.sqrt(count / (count - 1) * np.sum(sums**2)) / len(deviations))
