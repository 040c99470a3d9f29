"""The sampler in vLLM's place: the drawn tokens, and the work of a step on host and device."""

from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlcore.engine.rollout import Sampling
from rlcore.engine.sampling import sample_tokens

PLAIN = Sampling(max_tokens=1)


class Calls(TorchDispatchMode):
    """Records the operations of torch, with the elements of their largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in (out if isinstance(out, (tuple, list)) else [out]) if torch.is_tensor(each)]
        self.seen.append((func.__name__.split(".")[0], max(sizes, default=0)))
        return out


@pytest.mark.parametrize("vocabulary", [320, 1 << 12, 997])
def test_it_draws_the_tokens_of_sample_tokens(vocabulary):
    from rlcore.engines.vllm.noise import draw

    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, vocabulary, generator=generator) * 3
    logits[:, ::3] = -torch.inf
    noise = torch.rand(200, generator=generator, dtype=torch.float64)
    want, log_probs = sample_tokens(logits, noise, PLAIN)
    got = draw(logits.clone(), noise)
    assert torch.equal(got[0], want)
    torch.testing.assert_close(got[1], log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-53])
def test_noise_at_either_end_draws_a_possible_token(noise):
    from rlcore.engines.vllm.noise import draw

    logits = torch.full((3, 320), -torch.inf)
    logits[:, 100:200] = torch.randn(3, 100)
    tokens, log_probs = draw(logits, torch.full((3,), noise, dtype=torch.float64))
    assert ((tokens >= 100) & (tokens < 200)).all()
    assert log_probs.isfinite().all()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_noise_at_the_border_of_two_blocks_draws_no_banned_token(temperature):
    """The first token of each block is banned. The point of a draw falls onto the end of the block before, or near."""
    from rlcore.engine import block_size
    from rlcore.engines.vllm.noise import draw

    blocks = 64
    size = block_size(256 * blocks)
    logits = torch.randn(size * blocks, generator=torch.Generator().manual_seed(5)) / temperature
    logits[::size] = -torch.inf
    masses = (logits - logits.amax()).view(blocks, size).exp().sum(-1)
    ends = masses.cumsum(-1)
    border = ends[:-1] / ends[-1]
    above, below = (border.nextafter(torch.tensor(to)) for to in (1.0, 0.0))
    noise = torch.cat([border, above, below]).double()
    at_border = noise.float() * ends[-1] == ends[:-1].repeat(3)
    assert at_border.sum() > blocks // 2
    tokens, log_probs = draw(logits.repeat(len(noise), 1), noise)
    assert (tokens % size != 0).all()
    assert log_probs.isfinite().all()


def test_a_draw_writes_the_vocabulary_twice_and_reads_nothing_on_the_host():
    """The shifted logits in their place and their exponentials; a log_softmax and a cumulative sum would be more."""
    from rlcore.engines.vllm.noise import draw

    logits, noise = torch.randn(8, 4096), torch.rand(8, dtype=torch.float64)
    with Calls() as calls:
        draw(logits, noise)
    whole = [name for name, size in calls.seen if size == logits.numel() and name not in ("view", "_unsafe_view")]
    assert whole == ["sub_", "exp"]
    assert not {"_local_scalar_dense", "_to_copy", "nonzero"} & {name for name, size in calls.seen if size > 8}
    assert "_local_scalar_dense" not in dict(calls.seen)


def test_only_steps_whose_rows_changed_send_anything_to_the_device(make_pair, prompts, monkeypatch):
    from rlcore.engines.vllm.noise_v1 import RowNoise

    pair = make_pair("qwen2", True)
    pair.draw(seed=1)
    pair.sync(1)
    tables = []
    following = RowNoise.next
    monkeypatch.setattr(
        RowNoise, "next", lambda self, lengths: [tables.append(self._on_device), following(self, lengths)][1]
    )
    out = pair.rollout.generate(prompts([20], 4), Sampling(max_tokens=30, min_tokens=30))
    assert out["response_length"].tolist() == [30] * 4
    assert len(tables) >= 30
    changes = sum(one is not other for one, other in pairwise(tables))
    assert changes <= 3, "the rows join in the first steps, and no copy follows"
