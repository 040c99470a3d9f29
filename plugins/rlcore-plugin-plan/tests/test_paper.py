"""The findings of HybridFlow's evaluation (arXiv 2409.19256, Figs. 12, 13 and 15) that a plan for its machines repeats.

docs/plan.md has both sides' figures, and the two findings that differ.
"""

from dataclasses import replace

import pytest
from rlcore_plugin_plan.problem import Fixed
from rlcore_plugin_plan.search import search

from rlcore.roles.pools import ROLLOUT

TOGETHER = [("actor", "critic", "ref", "reward_model")]
SPLIT = [("actor", "ref"), ("critic", "reward_model")]
STANDALONE = [("actor",), ("critic",), ("ref",), ("reward_model",)]


def tokens_per_second(problem, sets, counts=None):
    pools = {frozenset(roles): None if counts is None else counts[i] for i, roles in enumerate(sets)}
    return search(replace(problem, fixed=Fixed(pools)))[0].tokens_per_second


@pytest.mark.parametrize("gpus", [16, 24, 32, 64])
def test_on_small_clusters_all_models_together_win(paper, gpus):
    problem = paper("13b", "13b", gpus)
    assert len(search(problem)[0].pools) == 1
    assert tokens_per_second(problem, TOGETHER) > tokens_per_second(problem, SPLIT)
    assert tokens_per_second(problem, SPLIT) > tokens_per_second(problem, STANDALONE)


@pytest.mark.parametrize("gpus", [96, 128])
def test_on_large_clusters_a_split_wins(paper, gpus):
    best = search(paper("13b", "13b", gpus))[0]
    assert len(best.pools) > 1


@pytest.mark.parametrize(("gpus", "published"), [(16, 6.4e3), (24, 7.4e3), (32, 10.1e3), (64, 16.7e3), (128, 24.2e3)])
def test_throughput_is_of_the_published_size(paper, gpus, published):
    assert tokens_per_second(paper("13b", "13b", gpus), TOGETHER) == pytest.approx(published, rel=0.3)


def generation_seconds(problem, shards):
    fixed = Fixed({frozenset(problem.roles): None}, {"actor": (1, 8)}, {"actor": shards})
    return search(replace(problem, fixed=fixed))[0].stages[0]


def test_fewer_tensor_shards_generate_faster_than_as_many_as_in_training(paper):
    of_7b = {shards: generation_seconds(paper("7b", "7b", 16), shards) for shards in (1, 2, 4, 8)}
    of_13b = {shards: generation_seconds(paper("13b", "13b", 16), shards) for shards in (1, 2, 4, 8)}
    assert 0.45 < 1 - of_7b[2] / of_7b[8] < 0.75  # published: 60.3 %
    assert 0.2 < 1 - of_13b[4] / of_13b[8] < 0.5  # published: 36.4 %
    assert sorted(of_13b, key=of_13b.get) == [4, 2, 8, 1]  # as published


def test_large_critics_and_rewards_stay_together_with_small_actors_on_64(paper):
    problem = paper("13b", "70b", 64)
    assert len(search(problem)[0].pools) == 1
    assert tokens_per_second(problem, TOGETHER) > 1.2 * tokens_per_second(problem, SPLIT)  # published: 8.4k to 6.1k


def test_sampling_ahead_helps_where_the_cluster_is_large(paper):
    problem = paper("13b", "13b", 128)
    ahead = search(problem.sampled_apart("actor"))[0]
    assert any(part.role == ROLLOUT for pool in ahead.pools for part in pool.parts)
    assert ahead.seconds < search(problem)[0].seconds
