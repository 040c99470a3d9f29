"""Numbers worked by hand, stated beside each test."""

import math

import pytest
import torch

from rlcore.ops import group_advantages, group_index, group_means, kl_estimate, leave_one_out, masked_mean, masked_sum


def test_group_index_numbers_groups_in_order_of_first_appearance():
    assert group_index(["b", "a", "b", "c"]).tolist() == [0, 1, 0, 2]
    assert group_index([]).tolist() == []


def test_group_advantages_by_hand_with_interleaved_groups():
    # Group x: scores 1, 0, 0, 1: mean 0.5, unbiased std sqrt(4 * 0.25 / 3) = 0.57735; (1 - 0.5) / (0.57735 + 1e-6).
    # Group y: scores 2, 5: mean 3.5, std sqrt(2 * 2.25 / 1) = 2.12132; 1.5 / 2.12132 = 0.70711.
    uid = ["x", "y", "x", "x", "y", "x"]
    scores = torch.tensor([1.0, 2.0, 0.0, 0.0, 5.0, 1.0])
    x, y = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1.5 / (math.sqrt(4.5) + 1e-6)
    got = group_advantages(scores, uid, episode=None)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([x, -y, -x, -x, y, x], rel=1e-6)
    centred = group_advantages(scores, uid, divide_by_std=False, episode=None)
    assert centred.tolist() == pytest.approx([0.5, -1.5, -0.5, -0.5, 1.5, 0.5])


def test_group_means_by_hand():
    """Of x: (1 + 4) / 2, or weighted (3 + 4) / 4. Of y: 2, or 0 where no row has a weight."""
    uid, values, weights = ["x", "y", "x"], torch.tensor([1.0, 2.0, 4.0]), torch.tensor([3, 0, 1])
    assert group_means(values, uid, episode=None).tolist() == [2.5, 2.0, 2.5]
    assert group_means(values, uid, weights, episode=None).tolist() == [1.75, 0.0, 1.75]
    centred = group_advantages(values, uid, divide_by_std=False, weights=weights, episode=None)
    assert centred.tolist() == [-0.75, 2.0, 2.25]
    # The deviation is about the plain mean: sqrt(2 * 1.5^2 / 1) = 2.12132.
    divided = group_advantages(values, uid, weights=weights, episode=None)
    assert divided.tolist()[::2] == pytest.approx([-0.75 / 2.1213203, 2.25 / 2.1213203], rel=1e-5)
    equal = torch.full((3,), 0.1)
    assert group_advantages(equal, ["u"] * 3, weights=torch.tensor([3, 7, 9]), episode=None).tolist() == [0.0] * 3


@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_equal_scores_give_exactly_zero(size):
    assert group_advantages(torch.full((size,), 0.1), ["u"] * size, episode=None).tolist() == [0.0] * size


def test_group_advantages_refuses_lengths_that_differ():
    with pytest.raises(ValueError, match="uid 3 rows"):
        group_advantages(torch.zeros(2), ["a", "b", "c"], episode=None)


def test_leave_one_out_by_hand_with_groups_of_any_size_and_order():
    """Of 1, 2 and 6 the others' means are 4, 3.5 and 1.5. Equal values, exact in no float, give exactly 0."""
    values = torch.tensor([1.0, 0.1, 2.0, 7.0, 6.0, 0.1])
    got = leave_one_out(values, ["a", "b", "a", "alone", "a", "b"], episode=None)
    assert got.dtype == torch.float32
    assert got.tolist() == [-3.0, 0.0, -1.5, 0.0, 4.5, 0.0]


def test_kl_estimators_by_hand():
    # policy log(0.5), reference log(0.25): r = log 2 = 0.6931; k1 = r, k2 = r^2/2 = 0.2402, k3 = 1/2 - 1 + r = 0.1931.
    p, q = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    r = math.log(2)
    assert kl_estimate(p, q, "k1").item() == pytest.approx(r)
    assert kl_estimate(p, q, "k2").item() == pytest.approx(r * r / 2)
    assert kl_estimate(p, q, "k3").item() == pytest.approx(r - 0.5)
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(p, q, "k4")


def test_k3_is_at_most_10_and_its_gradient_finite():
    """exp(90) is infinite in fp32. At r = 10, k3 = exp(-10) - 1 + 10 = 9.0000454, with the gradient 1 - exp(-r)."""
    policy = torch.tensor([-95.0, 5.0, -2.0], requires_grad=True)
    k3 = kl_estimate(policy, torch.tensor([-5.0, -5.0, -3.0]), "k3")
    assert k3.tolist() == pytest.approx([10.0, 9.0000454, math.exp(-1)])
    (gradient,) = torch.autograd.grad(k3.sum(), policy)
    assert gradient.tolist() == pytest.approx([0.0, 0.9999546, 1 - math.exp(-1)])
    free = kl_estimate(policy, torch.tensor([-5.0, -5.0, -3.0]), "k3", bound=0)
    assert free[0].item() == math.inf
    assert torch.equal(free[1:], k3[1:])


def test_k1_and_k3_are_unbiased_and_k3_has_the_gradient_of_a_penalty():
    torch.manual_seed(0)
    policy, reference = torch.randn(6).log_softmax(0), torch.randn(6).log_softmax(0)
    true = (policy.exp() * (policy - reference)).sum()
    for kind in ("k1", "k3"):
        assert (policy.exp() * kl_estimate(policy, reference, kind)).sum().item() == pytest.approx(
            true.item(), rel=1e-5
        )
    # Where the policy is likelier than the reference, the penalty pushes its log-prob down: a positive gradient.
    x = torch.tensor([-0.5], requires_grad=True)
    kl_estimate(x, torch.tensor([-1.0]), "k3").sum().backward()
    assert x.grad.item() == pytest.approx(1 - math.exp(-0.5))


def test_masked_sums_ignore_even_nan():
    values = torch.tensor([[1.0, float("nan")], [3.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[1, 0], [1, 1]])
    assert masked_sum(values, mask).item() == 9
    assert masked_mean(values, mask, dim=-1).tolist() == [1, 4]
    assert masked_mean(values, torch.zeros_like(mask)).item() == 0
    masked_sum(values, mask).backward()
    assert values.grad.tolist() == [[1, 0], [1, 1]]
