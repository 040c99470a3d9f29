"""One token from logits: the distribution that is sampled, and its log-probs."""

import math

import pytest
import torch

from rlcore.engine.rollout import Sampling
from rlcore.engine.sampling import sample_tokens
from rlcore.ops import noise_key, uniform_noise


def draw(logits, noise, banned=None, **options):
    rows = torch.tensor(logits).log().expand(len(noise), -1)
    return sample_tokens(rows, torch.tensor(noise, dtype=torch.float64), Sampling(max_tokens=1, **options), banned)


def test_inverse_transform_by_hand():
    # Probabilities 0.5, 0.25, 0, 0.25: cumulative 0.5, 0.75, 0.75, 1; the token without probability is never drawn.
    tokens, log_probs = draw([0.5, 0.25, 0.0, 0.25], [0.0, 0.49, 0.5, 0.74, 0.75, 0.999999999])
    assert tokens.tolist() == [0, 0, 1, 1, 3, 3]
    assert log_probs.exp().tolist() == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.25, 0.25])


def test_a_draw_that_rounds_up_to_one_still_falls_on_a_possible_token():
    tokens, _ = draw([0.5, 0.5, 0.0, 0.0], [1 - 2**-53])
    assert tokens.tolist() == [1]


def test_temperature_by_hand():
    # Probabilities 0.8, 0.2 at temperature 2 become sqrt(0.8), sqrt(0.2) over their sum: 2/3, 1/3.
    tokens, log_probs = draw([0.8, 0.2], [0.66, 0.67], temperature=2.0)
    assert tokens.tolist() == [0, 1]
    assert log_probs.exp().tolist() == pytest.approx([2 / 3, 1 / 3])


def test_temperature_zero_takes_the_likeliest_with_certainty():
    tokens, log_probs = draw([0.2, 0.5, 0.3], [0.0, 0.99], temperature=0.0)
    assert tokens.tolist() == [1, 1]
    assert log_probs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, {0: 0.5 / 0.8, 1: 0.3 / 0.8}),
        ({"top_p": 0.7}, {0: 0.5 / 0.8, 1: 0.3 / 0.8}),  # 0.5 is not yet 0.7, so the second stays
        ({"top_p": 0.5}, {0: 1.0}),
        ({"top_k": 3, "top_p": 0.9}, {0: 0.5 / 0.95, 1: 0.3 / 0.95, 2: 0.15 / 0.95}),
        ({"top_k": 9}, {0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}),
    ],
)
def test_cuts_renormalise_what_they_leave(options, kept):
    noise = [(i + 0.5) / 200 for i in range(200)]
    tokens, log_probs = draw([0.5, 0.3, 0.15, 0.05], noise, **options)
    assert set(tokens.tolist()) == set(kept)
    for token, log_prob in zip(tokens.tolist(), log_probs.tolist(), strict=True):
        assert log_prob == pytest.approx(math.log(kept[token]), abs=1e-6)
    share = tokens.eq(0).double().mean().item()
    assert share == pytest.approx(kept[0], abs=0.01)


def test_banned_tokens_have_no_part_in_the_distribution():
    tokens, log_probs = draw([0.5, 0.25, 0.25], [0.1, 0.9], banned=torch.tensor([0]))
    assert tokens.tolist() == [1, 2]
    assert log_probs.exp().tolist() == pytest.approx([0.5, 0.5])


def test_many_draws_follow_the_distribution():
    torch.manual_seed(0)
    probs = torch.randn(20).softmax(-1)
    noise = uniform_noise(torch.tensor([noise_key("test")]), 0, 20_000)[0]
    tokens, _ = sample_tokens(probs.log().expand(20_000, -1), noise, Sampling(max_tokens=1))
    counts = torch.bincount(tokens, minlength=20)
    chi_square = ((counts - 20_000 * probs).square() / (20_000 * probs)).sum().item()
    assert chi_square < 43.8  # 19 degrees of freedom: exceeded once in a thousand
