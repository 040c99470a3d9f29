"""PKPO: its advantages by hand, over all sets of k responses, and what they maximise."""

from itertools import combinations, product

import pytest
import torch
from rlcore_plugin_pass_at_k import PassAtK, PassAtKConfig, pass_at_k_advantages

from rlcore.config import compose
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager
from rlcore.training.preflight import preflight


def over_all_sets(scores, k):
    """Return the advantages as the paper defines them (eq. 33), times the number of responses."""
    n = len(scores)
    sets = list(combinations(range(n), k))
    gains = [0.0] * n
    for chosen in sets:
        for i in chosen:
            gains[i] += max(scores[j] for j in chosen) - max(scores[j] for j in chosen if j != i)
    return [n * gain / len(sets) for gain in gains]


def test_advantages_by_hand():
    """Of 0, 1, 3 with k = 2: sets of 3: with 0 it adds 3, with 1 it adds 2; 1 adds 1 to 0. All over 3 sets, times 3."""
    got = pass_at_k_advantages(torch.tensor([1.0, 3.0, 0.0]), ["a"] * 3, 2)
    assert got.dtype == torch.float32
    assert got.tolist() == [1.0, 5.0, 0.0]


@pytest.mark.parametrize("k", [2, 3, 5, 6])
def test_advantages_are_the_mean_over_all_sets(k):
    draw = torch.Generator().manual_seed(k)
    groups = [torch.rand(6, generator=draw), torch.randint(3, (6,), generator=draw).float(), torch.full((6,), 0.1)]
    scores = torch.stack(groups, dim=1).flatten()  # rows of the groups in turn
    got = pass_at_k_advantages(scores, ["a", "b", "c"] * 6, k).view(6, 3)
    for number, group in enumerate(groups):
        assert got[:, number].tolist() == pytest.approx(over_all_sets(group.tolist(), k), abs=1e-6)
    assert got[:, 2].tolist() == [0.0] * 6
    assert (got >= 0).all()


@pytest.mark.parametrize("k", [2, 3])
def test_the_expected_gradient_is_that_of_pass_at_k(k):
    """Of samples that succeed with probability p: pass@k = 1 - (1 - p)^k, with the slope k (1 - p)^(k - 1) in p."""
    n, p = 4, 0.3
    expected = 0.0
    for outcome in product([1.0, 0.0], repeat=n):
        weight = torch.tensor([p if each else 1 - p for each in outcome]).prod()
        slopes = torch.tensor([1 - p if each else -p for each in outcome])  # of log p by the logit
        expected += float(weight * (pass_at_k_advantages(torch.tensor(outcome), ["a"] * n, k) * slopes).mean())
    assert expected == pytest.approx(k * (1 - p) ** (k - 1) * p * (1 - p), rel=1e-5)


def test_a_group_that_lost_responses_below_k_gets_nothing():
    assert pass_at_k_advantages(torch.tensor([1.0, 0.0, 1.0]), ["a", "a", "b"], 3).tolist() == [0.0] * 3
    assert pass_at_k_advantages(torch.zeros(0), [], 3).tolist() == []


def test_k_above_the_group_is_refused():
    plugins = PluginManager.load()
    config = compose(["algo=pass_at_k", "cluster=in_process", "algo.k=5", "algo.group_size=4"], plugins)
    with pytest.raises(ConfigError, match=r"make it at least algo\.k = 5"):
        preflight(config, plugins)
    with pytest.raises(ConfigError, match=r"algo\.k"):
        compose(["algo=pass_at_k", "algo.k=1"], plugins)


def test_bounds_that_could_not_act_are_no_keys():
    keys = set(PassAtKConfig.__dataclass_fields__) - {"clip_low", "delta"}
    assert not keys & {"divide_by_std", "baseline"}
    with pytest.raises(ConfigError, match="clip_low"):
        compose(["algo=pass_at_k", "algo.clip_low=0.1"], PluginManager.load())
    assert set(PassAtK(PassAtKConfig()).roles()) == {"actor"}


def test_grpos_own_check_remains():
    plugins = PluginManager.load()
    config = compose(["algo=pass_at_k", "cluster=in_process", "data.batch_size=2", "algo.mini_batches=3"], plugins)
    with pytest.raises(ConfigError, match=r"algo\.mini_batches is 3"):
        preflight(config, plugins)
