"""The clipped surrogate and the clipped value error: values and gradients worked by hand."""

import math

import pytest
import torch

from rlcore.ops import Outputs

# Six tokens, clipped at 0.8 and 1.3.    inside  above, A>0  above, A<0  below, A>0  below, A<0  inside, A<0
RATIOS = torch.tensor([[1.1, 2.0, 2.0], [0.5, 0.5, 0.9]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[2.0, 2.0, -1.0], [3.0, -2.0, -1.0]], dtype=torch.float64)
# min(r A, clip(r) A): 2.2, min(4, 2.6), min(-2, -1.3); min(1.5, 2.4), min(-1, -1.6), -0.9.
SURROGATE = torch.tensor([[2.2, 2.6, -2.0], [1.5, -1.6, -0.9]], dtype=torch.float64)
CLIPPED = torch.tensor([[False, True, False], [False, True, False]])


def surrogate_of(log_probs, old, advantages):
    return Outputs({"log_probs": log_probs}).clipped_surrogate(old, advantages, 0.2, 0.3)


def test_the_surrogate_is_the_lower_of_the_plain_and_the_clipped_product():
    old = torch.full_like(RATIOS, -1.5)
    surrogate, clipped = surrogate_of(old + RATIOS.log(), old, ADVANTAGES)
    assert torch.allclose(surrogate, SURROGATE)
    assert torch.equal(clipped, CLIPPED)


def test_its_gradient_is_r_times_a_where_it_is_not_clipped_and_0_where_it_is():
    old = torch.full_like(RATIOS, -1.5)
    log_probs = (old + RATIOS.log()).requires_grad_()
    surrogate, _ = surrogate_of(log_probs, old, ADVANTAGES)
    surrogate.sum().backward()
    # d(r A) / d(log pi) = r A.
    assert torch.allclose(log_probs.grad, torch.tensor([[2.2, 0.0, -2.0], [1.5, 0.0, -0.9]], dtype=torch.float64))


@pytest.mark.parametrize("advantage", [2.0, 0.0, -2.0])
def test_a_ratio_that_would_overflow_has_a_finite_gradient(advantage):
    """Behind a minimum, an infinite ratio has the gradient 0 * inf. e^20 = 4.85165e8."""
    log_probs = torch.tensor([[100.0, -1.0]], requires_grad=True)
    out = Outputs({"log_probs": log_probs})
    assert out.ratio(torch.tensor([[0.0, -1.0]])).tolist()[0] == pytest.approx([4.85165e8, 1.0])
    surrogate, _ = out.clipped_surrogate(torch.tensor([[0.0, -1.0]]), torch.tensor([[advantage]]), 0.2, 0.3)
    surrogate.sum().backward()
    assert log_probs.grad.tolist() == [[0.0, advantage]]
    assert Outputs({"log_probs": log_probs}, log_ratio_bound=0).ratio(torch.zeros(1, 2))[0, 0] == math.inf


def test_at_the_old_policy_the_gradient_is_the_advantage():
    log_probs = torch.full((2, 3), -0.7, requires_grad=True)
    surrogate, clipped = surrogate_of(log_probs, log_probs.detach(), ADVANTAGES.float())
    surrogate.sum().backward()
    assert torch.equal(log_probs.grad, ADVANTAGES.float())
    assert not clipped.any()


def test_one_advantage_per_row_counts_for_each_token():
    old = torch.full((2, 3), math.log(0.5), dtype=torch.float64)
    per_row = torch.tensor([[2.0], [-1.0]], dtype=torch.float64)
    in_full, _ = surrogate_of(old + RATIOS.log(), old, per_row.expand(2, 3))
    broadcast, clipped = surrogate_of(old + RATIOS.log(), old, per_row)
    assert torch.equal(in_full, broadcast)
    assert broadcast.shape == clipped.shape == (2, 3)


# V_old 1, clip 0.5.      V:  1.2 (inside), 3 (above), 3 (above), 0 (below)
VALUES, RETURNS = torch.tensor([[1.2, 3.0, 3.0, 0.0]]), torch.tensor([[2.0, 1.0, 4.0, 2.0]])


@pytest.mark.parametrize(
    ("clip", "error", "clipped", "gradient"),
    [
        # (V - R)^2: 0.64, 4, 1, 4. Clipped V 1.2, 1.5, 1.5, 0.5: 0.64, 0.25, 6.25, 2.25. Gradient 2 (V - R), or 0.
        (0.5, [[0.64, 4.0, 6.25, 4.0]], [[False, False, True, False]], [[-1.6, 4.0, 0.0, -4.0]]),
        (0.0, [[0.64, 4.0, 1.0, 4.0]], [[False] * 4], [[-1.6, 4.0, -2.0, -4.0]]),
    ],
)
def test_the_value_error_is_the_larger_of_the_plain_and_the_clipped(clip, error, clipped, gradient):
    values = VALUES.clone().requires_grad_()
    found, was_clipped = Outputs({"values": values}).clipped_value_error(torch.ones(1, 4), RETURNS, clip)
    found.sum().backward()
    assert torch.allclose(found, torch.tensor(error))
    assert torch.equal(was_clipped, torch.tensor(clipped))
    assert torch.allclose(values.grad, torch.tensor(gradient))
