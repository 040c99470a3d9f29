"""Chunked log-probs against dense autograd, value and gradient."""

import math

import pytest
import torch

from rlcore.ops import chunked_log_probs, token_log_probs
from rlcore.ops.logprobs import _tiles


def test_token_log_probs_by_hand():
    # Logits log(1), log(3): probabilities 1/4 and 3/4; entropy -(1/4 log 1/4 + 3/4 log 3/4) = 0.5623.
    logits = torch.tensor([[0.0, math.log(3)]])
    log_probs, entropy = token_log_probs(logits, torch.tensor([1]))
    assert log_probs.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(0.25 * math.log(4) - 0.75 * math.log(0.75))


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunked_equals_dense_in_value_and_gradient(chunk, with_bias):
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True) if with_bias else None
    labels = torch.randint(0, 11, (7,))
    a, b = torch.randn(7), torch.randn(7)
    inputs = [hidden, weight] + ([bias] if with_bias else [])

    got = chunked_log_probs(hidden, weight, labels, bias=bias, temperature=0.7, chunk=chunk)
    got_grads = torch.autograd.grad((a * got[0] + b * got[1]).sum(), inputs)
    dense = token_log_probs(torch.nn.functional.linear(hidden, weight, bias).float() / 0.7, labels)
    want_grads = torch.autograd.grad((a * dense[0] + b * dense[1]).sum(), inputs)

    for x, y in zip([*got, *got_grads], [*dense, *want_grads], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_only_one_chunk_of_logits_exists_at_a_time():
    positions, vocab, chunk = 64, 512, 8
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] == vocab:
                largest = max(largest, out.shape[0])
            return out

    hidden, weight = torch.randn(positions, 4, requires_grad=True), torch.randn(vocab, 4, requires_grad=True)
    with Watch():
        log_probs, _ = chunked_log_probs(hidden, weight, torch.zeros(positions, dtype=torch.int64), chunk=chunk)
        log_probs.sum().backward()
    assert largest == chunk


def test_no_positions_give_empty_results_and_zero_gradient():
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    log_probs, entropy = chunked_log_probs(hidden, weight, torch.zeros(0, dtype=torch.int64))
    assert len(log_probs) == len(entropy) == 0
    log_probs.sum().backward()
    assert weight.grad.abs().max() == 0


@pytest.mark.parametrize("used", ["log_probs", "entropy", "both"])
def test_tiles_of_the_vocabulary_equal_dense_whichever_result_is_used(used, monkeypatch):
    monkeypatch.setattr("rlcore.ops.logprobs.TILE", 12)  # chunks of 3 positions: 4 tokens of 11, and then 3
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    bias = torch.linspace(-3, 3, 11, requires_grad=True)  # so that the maximum moves from tile to tile
    labels, upstream = torch.randint(0, 11, (7,)), torch.randn(2, 7)
    results = {"log_probs": [0], "entropy": [1], "both": [0, 1]}[used]

    def loss(pair):
        return sum((upstream[i] * pair[i]).sum() for i in results)

    got = chunked_log_probs(hidden, weight, labels, bias=bias, temperature=0.7, chunk=3)
    dense = token_log_probs(torch.nn.functional.linear(hidden, weight, bias) / 0.7, labels)
    inputs = [hidden, weight, bias]
    for x, y in zip(
        [*got, *torch.autograd.grad(loss(got), inputs)],
        [*dense, *torch.autograd.grad(loss(dense), inputs)],
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocabulary", [64, 96, 33])
@pytest.mark.parametrize("used", ["log_probs", "entropy", "both"])
def test_compiled_passes_equal_dense(vocabulary, used, monkeypatch):
    """Traced as torch.compile traces them, in one graph each, and run without a compiler."""
    traced = []

    def compiled(function):
        traced.append(function.__name__)
        return torch.compile(function, backend="eager", fullgraph=True)

    monkeypatch.setattr("rlcore.ops.logprobs._compiled", compiled)
    monkeypatch.setattr("rlcore.ops.logprobs.COMPILED_TILE", 64)
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5, requires_grad=True), torch.randn(vocabulary, 5, requires_grad=True)
    labels, upstream = torch.randint(0, vocabulary, (7,)), torch.randn(2, 7)
    results = {"log_probs": [0], "entropy": [1], "both": [0, 1]}[used]

    def loss(pair):
        return sum((upstream[i] * pair[i]).sum() for i in results)

    got = chunked_log_probs(hidden, weight, labels, temperature=0.7, chunk=3, compiled=True)
    dense = token_log_probs(torch.nn.functional.linear(hidden, weight) / 0.7, labels)
    inputs = [hidden, weight]
    for x, y in zip(
        [*got, *torch.autograd.grad(loss(got), inputs)],
        [*dense, *torch.autograd.grad(loss(dense), inputs)],
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert traced == ["_add_tile", "_tile_gradient"]
    torch._dynamo.reset()


@pytest.mark.parametrize(("vocabulary", "width"), [(151_936, 18_992), (128_256, 16_032), (50_257, 50_257), (640, 640)])
def test_compiled_tiles_are_of_one_width(vocabulary, width):
    _, columns = _tiles(torch.zeros(9000, 0), torch.zeros(vocabulary, 0), 4096, compiled=True)
    assert {part.stop - part.start for part in columns} == {width}
    assert columns[-1].stop == vocabulary


def test_under_autocast_forward_and_backward_see_the_same_logits():
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 32, requires_grad=True), torch.randn(50, 32, requires_grad=True)
    labels = torch.randint(0, 50, (6,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_probs, entropy = chunked_log_probs(hidden, weight, labels)
    # The same from logits that were rounded once, by the product in bf16.
    rounded = (hidden.bfloat16() @ weight.bfloat16().T).float().detach().requires_grad_()
    want = token_log_probs(rounded, labels)
    torch.testing.assert_close(log_probs, want[0])
    torch.testing.assert_close(entropy, want[1])
    (of_logits,) = torch.autograd.grad(want[0].sum() + want[1].sum(), rounded)
    got = torch.autograd.grad(log_probs.sum() + entropy.sum(), [hidden, weight])
    of_logits = of_logits.bfloat16()
    assert [grad.dtype for grad in got] == [torch.float32] * 2
    torch.testing.assert_close(got[0], (of_logits @ weight.bfloat16()).float(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(got[1], (of_logits.T @ hidden.bfloat16()).float(), rtol=0.02, atol=0.02)
