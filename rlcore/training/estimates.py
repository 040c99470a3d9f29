"""Estimates of an evaluation from several samples per prompt: pass@k, maj@k, and intervals around them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rlcore.ops import group_index

Z95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""
ROUNDING = 1e-9
"""A probability this close to 0 or 1 is 0 or 1."""


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

    The exact mean over all C(n, k) subsets of the samples, so without bias and without a random draw; it is 0 or 1
    where all subsets agree. Between answers with equally many votes each wins with the same probability. If samples of
    one answer are scored differently, the answer counts as right by their share. A subset without any vote is wrong.
    """
    votes: dict[str, list[bool]] = {}
    for answer, correct in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(bool(correct))
    shares: dict[int, list[float]] = {}  # the share right of each answer, by its number of samples
    for members in votes.values():
        shares.setdefault(len(members), []).append(sum(members) / len(members))
    chance = _majority(shares, len(answers), k)
    return _exact_at_ends(chance)


def _exact_at_ends(share: float) -> float:
    """Return a share, or 0 or 1 where it differs from them by rounding errors only."""
    return 0.0 if share < ROUNDING else 1.0 if share > 1 - ROUNDING else share


def _majority(shares: Mapping[int, Sequence[float]], samples: int, k: int) -> float:
    """Return `maj_at_k`; shares: the share right of each answer, by its number of samples.

    With each sample drawn by the same chance, the votes of the answers are independent and binomial; given that k are
    drawn, all subsets of k are equally likely. The number drawn is a sum, so its distribution is a convolution, here a
    product of Fourier transforms. If `ties` other answers have as many votes, this one is chosen with probability
    1 / (1 + ties), the integral over x from 0 to 1 of x ** ties. Gauss-Legendre nodes integrate this polynomial
    exactly.
    """
    draw = (k + 0.5) / (samples + 1)  # k is then among the likeliest numbers drawn, and never impossible
    length = samples + 1
    waves = np.exp(-2j * math.pi / length * np.outer(np.arange(max(k, 1) + 1), np.arange(length // 2 + 1)))
    # The transform of an answer's votes up to each number, by its number of samples.
    up_to = {}
    for size in shares:
        terms = _binomial(size, draw)[: k + 1, None]
        up_to[size] = np.cumsum(terms * waves[: len(terms)], axis=0)
    total = np.zeros(length // 2 + 1, dtype=complex)
    for winning in range(1, min(k, max(shares, default=0)) + 1):
        able = {size: values for size, values in shares.items() if size >= winning}
        # Answers with fewer samples can neither win nor tie, so they are drawn freely, as samples without an answer.
        free = samples - sum(size * len(values) for size, values in able.items())
        answers = sum(map(len, able.values()))
        if free + winning * answers < k:
            continue  # no answer has more votes, so fewer than k are drawn
        nodes, weights = _nodes((min(answers, k // winning) + 1) // 2)
        drawn = np.fft.rfft(_binomial(free, draw), length)[None, :]  # no answer with more votes; x for each winner
        chosen = np.zeros_like(drawn)  # and one winner, which is right, chosen
        for size, values in able.items():
            fewer, wins = up_to[size][winning - 1], up_to[size][winning] - up_to[size][winning - 1]
            either = fewer + nodes[:, None] * wins
            chosen = chosen * either + (sum(values) * wins) * drawn
            drawn = drawn * either
            if len(values) > 1:
                others = either ** (len(values) - 1)
                chosen, drawn = chosen * others, drawn * others
        total += weights @ chosen
    return float(np.fft.irfft(total, length)[k] / _binomial(samples, draw)[k])


@lru_cache(maxsize=512)
def _nodes(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return Gauss-Legendre nodes between 0 and 1 and their weights, exact for polynomials below degree 2 * count."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return (1 + nodes) / 2, weights / 2


@lru_cache(maxsize=512)
def _binomial(trials: int, chance: float) -> np.ndarray:
    """Return the probabilities of 0 to `trials` successes; chance: of one, between 0 and 1."""
    logs = np.array([math.lgamma(number + 1) for number in range(trials + 1)])
    count = np.arange(trials + 1)
    ways = logs[-1] - logs - logs[::-1]
    values: np.ndarray = np.exp(ways + count * math.log(chance) + count[::-1] * math.log1p(-chance))
    return values


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
    mean = _exact_at_ends(float(np.mean(values)))
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
