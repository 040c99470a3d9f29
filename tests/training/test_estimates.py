"""Estimates of an evaluation: pass@k, maj@k and intervals, by hand and against all subsets."""

import itertools
import math
import random
import time
from collections import Counter
from fractions import Fraction

import pytest

from rlcore.training.estimates import clustered_error, maj_at_k, pass_at_k, share_with_interval


@pytest.mark.parametrize(
    ("samples", "correct", "k", "chance"),
    [
        (4, 1, 2, 1 / 2),  # the right one is in 3 of the 6 pairs
        (4, 2, 2, 5 / 6),  # all pairs but one
        (4, 3, 2, 1.0),  # no pair of wrong ones
        (8, 0, 4, 0.0),
        (8, 8, 1, 1.0),
        (8, 3, 1, 3 / 8),
        (5, 1, 5, 1.0),
    ],
)
def test_pass_at_k_by_hand(samples, correct, k, chance):
    assert pass_at_k(samples, correct, k) == pytest.approx(chance)


def test_pass_at_k_counts_the_subsets_that_hold_a_right_one():
    for samples in range(1, 7):
        for correct in range(samples + 1):
            right = [index < correct for index in range(samples)]
            for k in range(1, samples + 1):
                subsets = list(itertools.combinations(right, k))
                share = sum(any(subset) for subset in subsets) / len(subsets)
                assert pass_at_k(samples, correct, k) == pytest.approx(share), (samples, correct, k)


@pytest.mark.parametrize(
    ("answers", "right", "k", "chance"),
    [
        ("AAB", "110", 1, 2 / 3),
        ("AAB", "110", 2, 2 / 3),  # AA wins, and two of the three pairs are ties
        ("AAB", "110", 3, 1.0),
        ("AB-", "100", 2, 1 / 2),  # a tie; A alone; B alone: a sample without an answer has no vote
        ("--A", "001", 2, 2 / 3),  # the pair without a vote is wrong
        ("AABBC", "00110", 5, 1 / 2),
        ("AABC", "1000", 4, 1 / 2),  # samples of the winning answer were scored differently
        ("--", "11", 1, 0.0),
    ],
)
def test_maj_at_k_by_hand(answers, right, k, chance):
    given = [None if answer == "-" else answer for answer in answers]
    assert maj_at_k(given, [mark == "1" for mark in right], k) == pytest.approx(chance)


def majority(subset):
    """The chance that a fair choice among the most frequent answers, and then among its samples, is right."""
    votes = Counter(answer for answer, _ in subset if answer is not None)
    if not votes:
        return Fraction(0)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    shares = [[right for answer, right in subset if answer == winner] for winner in winners]
    return sum(Fraction(sum(share), len(share)) for share in shares) / len(winners)


def test_maj_at_k_is_the_mean_over_all_subsets_and_ties():
    draw = random.Random(0)
    for samples in range(1, 8):
        for _ in range(8):
            answers = [draw.choice(["A", "B", "C", None]) for _ in range(samples)]
            right = [draw.random() < 0.5 for _ in range(samples)]
            for k in range(1, samples + 1):
                subsets = list(itertools.combinations(zip(answers, right, strict=True), k))
                mean = sum(map(majority, subsets)) / len(subsets)
                assert maj_at_k(answers, right, k) == pytest.approx(float(mean), abs=1e-12), (answers, right, k)


def counted(answers, right, k):
    """maj@k in whole numbers: the subsets whose most votes are `most`, by samples drawn and number of winners."""
    members = {}
    for answer, correct in zip(answers, right, strict=True):
        if answer is not None:
            members.setdefault(answer, []).append(correct)
    chance = Fraction(0)
    for most in range(1, k + 1):
        able = [(len(each), sum(each)) for each in members.values() if len(each) >= most]
        free = len(answers) - sum(size for size, _ in able)
        subsets = {(drawn, 0): (math.comb(free, drawn), Fraction(0)) for drawn in range(min(free, k) + 1)}
        for size, correct in able:
            longer = {}
            for (drawn, winners), (ways, shares) in subsets.items():
                for taken in range(min(most, k - drawn) + 1):
                    key = (drawn + taken, winners + (taken == most))
                    old_ways, old_shares = longer.get(key, (0, 0))
                    gain = Fraction(correct, size) * ways if taken == most else 0
                    times = math.comb(size, taken)
                    longer[key] = (old_ways + times * ways, old_shares + times * (shares + gain))
            subsets = longer
        chance += sum(shares / winners for (drawn, winners), (_, shares) in subsets.items() if drawn == k and winners)
    return float(chance / math.comb(len(answers), k))


@pytest.mark.parametrize(("samples", "answers"), [(24, 2), (32, 7), (40, 60)])
def test_maj_at_k_agrees_with_whole_numbers(samples, answers):
    draw = random.Random(samples)
    votes = [draw.choice([None, *map(str, range(answers))]) for _ in range(samples)]
    right = [draw.random() < 0.4 for _ in range(samples)]
    for k in (1, 2, 3, 4, 8, 16, samples - 1, samples):
        assert maj_at_k(votes, right, k) == pytest.approx(counted(votes, right, k), abs=1e-12), k


@pytest.mark.parametrize("samples", [3, 10, 100, 256])
def test_maj_at_k_is_exact_where_all_subsets_agree(samples):
    for k in (1, 2, 3, samples // 2, samples):
        assert maj_at_k(["A"] * samples, [True] * samples, k) == 1.0
        assert maj_at_k(["A"] * samples, [False] * samples, k) == 0.0
    assert maj_at_k(["A"] * samples + ["B"], [True] * samples + [False], 3) == 1.0


def test_maj_at_k_of_256_samples_is_quick():
    """All k take 0.03 s; whole numbers take 2.5 s."""
    votes = [str(answer) for answer in range(23) for _ in range(answer)] + [None] * 3
    started = time.perf_counter()
    for power in range(1, 9):
        maj_at_k(votes, [vote == "22" for vote in votes], 2**power)
    assert time.perf_counter() - started < 1.0


def test_maj_at_k_of_many_samples():
    answers, right = ["A"] * 1100 + ["B"] * 900, [True] * 1100 + [False] * 900
    assert maj_at_k(answers, right, 1) == pytest.approx(0.55)
    # Three of them: by the hypergeometric distribution, two or three of the 1,100.
    three = (math.comb(1100, 3) + math.comb(1100, 2) * 900) / math.comb(2000, 3)
    assert maj_at_k(answers, right, 3) == pytest.approx(three)


def test_the_error_of_clusters_by_hand():
    # Sums of deviations from 1/2 by prompt: 1 and -1. sqrt(2 / (2 - 1) * (1 + 1)) / 4.
    assert clustered_error([1, 1, 0, 0], ["a", "a", "b", "b"]) == pytest.approx(1 / 2)
    # Prompts that are all alike inside: as if each had one sample, whose error is sqrt(s^2 / n), s^2 = 1/3, n = 4.
    alone = clustered_error([1, 0, 0, 1], list("abcd"))
    assert alone == pytest.approx(math.sqrt((4 * 0.25 / 3) / 4))
    assert clustered_error([1] * 5 + [0] * 10 + [1] * 5, sorted("abcd" * 5)) == pytest.approx(alone)
    assert clustered_error([1, 0], ["a", "a"]) == math.inf


def wilson(mean, count):
    square = 3.841458820694124
    centre = (mean * count + square / 2) / (count + square)
    half = math.sqrt(square) / (count + square) * math.sqrt(count * mean * (1 - mean) + square / 4)
    return centre - half, centre + half


@pytest.mark.parametrize(
    ("values", "clusters", "samples", "count"),
    [
        ([1, 0, 0, 1], "abcd", 4, 3),  # 0.25 / (1/12)
        ([1, 1, 0, 0], "aabb", 4, 1),  # 0.25 / (1/4): prompts whose samples agree count once
        ([1, 0, 1, 0], "aabb", 4, 4),  # no more than there are samples, where prompts do not differ
        ([0.5, 1.0, 0.5, 1.0], "abcd", 16, 9),  # pass@k: 3/16 / (1/16 * 4/3 / 4)
        ([1, 1, 1, 1], "aabb", 4, 2),  # all right: as many as there are prompts
        ([0] * 10, "abcdefghij", 10, 10),
        ([1 - 2e-16] * 10, "abcdefghij", 640, 10),  # rounding errors are no variance
        ([1 + 2e-16] * 10, "abcdefghij", 640, 10),
    ],
)
def test_intervals_by_hand(values, clusters, samples, count):
    found = share_with_interval(values, list(clusters), samples)
    assert found.value == pytest.approx(sum(values) / len(values))
    assert (found.low, found.high) == pytest.approx(wilson(found.value, count))
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.high > found.low


def test_no_success_in_ten_prompts_leaves_up_to_28_percent():
    assert share_with_interval([0] * 10, list("abcdefghij"), 10).high == pytest.approx(0.2775, abs=1e-4)


def test_one_prompt_says_nothing_about_others():
    found = share_with_interval([1, 1, 0], ["a"] * 3, 3)
    assert (found.value, found.low, found.high) == (pytest.approx(2 / 3), 0.0, 1.0)


def test_an_evaluation_without_a_scored_sample_has_no_numbers():
    found = share_with_interval([], [], 0)
    assert math.isnan(found.value)
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """Prompts of different difficulty with 4 samples each: 95 % within 3 standard errors of 1,000 draws."""
    draw = random.Random(1)
    inside = 0
    for _ in range(1000):
        chances = [draw.betavariate(0.7, 0.7) for _ in range(40)]
        values = [float(draw.random() < chance) for chance in chances for _ in range(4)]
        clusters = [str(prompt) for prompt in range(40) for _ in range(4)]
        found = share_with_interval(values, clusters, len(values))
        inside += found.low <= 0.5 <= found.high
    assert 0.93 <= inside / 1000 <= 0.97
