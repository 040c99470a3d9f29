"""REINFORCE++: its numbers by hand, and against a second implementation."""

from functools import partial

import pytest
import torch
from rlcore_plugin_reinforce_pp import ReinforcePP, ReinforcePPConfig, reinforce_pp_loss, token_returns
from rlcore_plugin_testing.policy_losses import compare_policy_loss

from rlcore import DataProto, Ragged
from rlcore.config import compose
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager
from rlcore.training.preflight import preflight

MASKS = [[1, 0, 1], [1], [0, 1, 1, 0], [0]]
OLD = [[-1.0, -9.0, -2.0], [-3.0], [-9.0, -1.0, -1.0, -9.0], [-9.0]]
REF = [[-1.5, -1.0, -4.0], [-2.0], [-1.0, -1.0, -2.0, -1.0], [-1.0]]


def batch_of(scores):
    ragged = {"response_mask": MASKS, "old_log_probs": OLD, "ref_log_probs": REF}
    columns = {name: Ragged.from_list(rows) for name, rows in ragged.items()}
    return DataProto.from_dict({"scores": torch.tensor(scores), **columns}, {"uid": ["a", "b", "a", "b"]})


def rounded(column):
    return [[round(float(value), 5) for value in row] for row in column.to_list()]


@pytest.mark.parametrize(
    ("gamma", "kl_coef", "expected"),
    [
        # The KLs of actions are 0.5 and 2, -1, and 0 and 1. Tokens with mask 0 have no reward, and do not end a return.
        (1.0, 0.0, [[1.0, 0.0, 1.0], [2.0], [0.0, 3.0, 3.0, 0.0], [0.0]]),
        (1.0, 0.1, [[0.75, 0.0, 0.8], [2.1], [0.0, 2.9, 2.9, 0.0], [0.0]]),
        (0.5, 0.1, [[0.35, 0.0, 0.8], [2.1], [0.0, 1.45, 2.9, 0.0], [0.0]]),
    ],
)
def test_returns_by_hand(gamma, kl_coef, expected):
    batch = batch_of([1.0, 2.0, 3.0, 4.0])
    batch["reinforce_pp_scores"] = batch["scores"]
    returns = token_returns(batch, kl_coef=kl_coef, gamma=gamma)["reinforce_pp_returns"]
    assert rounded(returns) == expected


def normalised(values, mask):
    """Return the values of all actions minus their mean, over their deviation, as a list of rows."""
    acts = [v for row, m in zip(values, mask, strict=True) for v, act in zip(row, m, strict=True) if act]
    mean = sum(acts) / len(acts)
    std = (sum((v - mean) ** 2 for v in acts) / len(acts)) ** 0.5
    pairs = [list(zip(row, m, strict=True)) for row, m in zip(values, mask, strict=True)]
    return [[round((v - mean) / std, 4) if act else 0.0 for v, act in row] for row in pairs]


@pytest.mark.parametrize(
    ("settings", "returns"),
    [
        ({"kl_coef": 0.1}, [[0.75, 0.0, 0.8], [2.1], [0.0, 2.9, 2.9, 0.0], [0.0]]),
        # Group a: scores 1 and 3, minus 2; group b: 2 and 4, minus 3. The KL is not in the returns.
        ({"kl_coef": 0.1, "baseline": "group"}, [[-1.0, 0.0, -1.0], [-1.0], [0.0, 1.0, 1.0, 0.0], [0.0]]),
    ],
)
def test_advantages_are_normalised_over_the_actions_of_the_batch(settings, returns):
    algorithm = ReinforcePP(ReinforcePPConfig(group_size=2, **settings))
    made = algorithm.with_advantages(None, batch_of([1.0, 2.0, 3.0, 4.0]))["advantages"]
    for got, expected in zip(made.to_list(), normalised(returns, MASKS), strict=True):
        assert got.tolist() == pytest.approx(expected, abs=2e-4)


def written_out(config):
    """Return the loss as the paper writes it, token by token."""

    def by_hand(responses):
        terms = []
        for r in responses:
            each = zip(r.log_probs, r.old_log_probs, r.ref_log_probs, r.advantages, strict=True)
            for new, old, ref, advantage in each:
                ratio = (new - old).exp()
                clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
                kl = config.kl_coef * (new - ref) ** 2 / 2 if config.baseline == "group" else 0.0
                terms.append(-torch.minimum(ratio * advantage, clipped * advantage) + kl)
        return sum(terms) / len(terms)

    return by_hand


@pytest.mark.parametrize("baseline", ["none", "group"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_the_loss_is_the_formula_written_out(baseline, kl_coef):
    config = ReinforcePPConfig(baseline=baseline, group_size=2, kl_coef=kl_coef, clip_high=0.3)
    compare_policy_loss(reinforce_pp_loss, config, written_out(config), token_advantages=True)


def test_a_function_of_map_sees_any_rows():
    """The returns of a row do not depend on the others."""
    batch = batch_of([1.0, 2.0, 3.0, 4.0])
    batch["reinforce_pp_scores"] = batch["scores"]
    returns = partial(token_returns, kl_coef=0.1, gamma=0.9)
    whole, parts = returns(batch), [returns(batch[[row]]) for row in range(4)]
    assert rounded(whole["reinforce_pp_returns"]) == [rounded(p["reinforce_pp_returns"])[0] for p in parts]


@pytest.mark.parametrize(("size", "refused"), [(1, True), (2, False)])
def test_a_baseline_without_a_group_is_refused(size, refused):
    plugins = PluginManager.load()
    words = ["algo=reinforce_pp", "cluster=in_process", "algo.baseline=group", f"algo.group_size={size}"]
    config = compose(words, plugins)
    if not refused:
        preflight(config, plugins)
        return
    with pytest.raises(ConfigError, match=r"algo\.group_size to 2"):
        preflight(config, plugins)


def test_grpos_own_check_remains():
    plugins = PluginManager.load()
    config = compose(["algo=reinforce_pp", "cluster=in_process", "data.batch_size=2", "algo.mini_batches=3"], plugins)
    with pytest.raises(ConfigError, match=r"algo\.mini_batches is 3"):
        preflight(config, plugins)
