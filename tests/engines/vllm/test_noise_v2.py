"""Noise by name in vLLM's second model runner: vLLM's own sampler with it, on the CPU.

The runner itself needs a GPU (test_on_gpu.py): its kernels are Triton's. Its sampler launches none for these rows.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlcore.engine.rollout import Sampling
from rlcore.engine.sampling import sample_tokens
from rlcore.engines.vllm.internals import V2_PROCESSORS
from rlcore.ops import uniform_noise

VOCABULARY, SLOTS = 320, 8


@pytest.fixture
def sampler(monkeypatch):
    """vLLM's sampler of the second runner, with RowNoise as vLLM loads it."""
    buffers = pytest.importorskip("vllm.v1.worker.gpu.buffer_utils")
    pytest.importorskip("vllm." + V2_PROCESSORS.replace("/", "."))
    from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    from rlcore.engines.vllm import noise_v2

    # Pinned memory, which a GPU reads from the host.
    monkeypatch.setattr(buffers, "is_uva_available", lambda: False)
    monkeypatch.setattr(buffers, "UvaBuffer", buffers.NonUvaBuffer)
    config, device = SimpleNamespace(reasoning_config=None), torch.device("cpu")
    state = RequestState(SLOTS, 64, 64, 0, VOCABULARY, device)
    made = Sampler(
        config,
        SLOTS,
        VOCABULARY,
        device,
        state,
        logprobs_mode="processed_logprobs",
        custom_logits_processors=build_custom_logits_processors(config, state, False, [noise_v2.RowNoise]),
    )
    noise_v2.install(SimpleNamespace(sampler=made))
    return made


def add(sampler, slot, key, prompt, **settings):
    from vllm import SamplingParams

    settings = {"temperature": 1.0, "logprobs": 0, "seed": 0, **settings}
    sampler.add_request(slot, SamplingParams(extra_args={"rlcore_noise": (key, prompt)}, **settings))


def draw(sampler, logits, slots, lengths):
    """Return what vLLM's runner gets for rows that have `lengths` tokens."""
    sampler.apply_staged_writes()
    index, count = torch.tensor(slots), len(slots)
    fed, offsets = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    positions = torch.tensor(lengths) - 1
    return sampler.sample(
        logits, index, index, np.array(slots), positions, fed, offsets, np.array(lengths), return_logprobs=True
    )


def some_logits(rows, seed=1):
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def numbers(named):
    """Return the numbers `index` of `key`, for pairs of them."""
    return torch.cat([uniform_noise(torch.tensor([key]), index, 1)[:, 0] for key, index in named])


def test_rows_draw_by_their_names_in_any_order_of_slots(sampler):
    for slot, key, prompt in ((0, 11, 3), (5, -7, 20), (2, 2**62, 9)):
        add(sampler, slot, key, prompt)
    logits = some_logits(3)
    want, log_probs = sample_tokens(logits, numbers([(-7, 4), (11, 0), (2**62, 30)]), Sampling(max_tokens=1))
    tokens, drawn_from = draw(sampler, logits.clone(), [5, 0, 2], [24, 3, 39])
    assert torch.equal(tokens, want)
    # vLLM reads log-probs from these.
    torch.testing.assert_close(drawn_from.log_softmax(-1).gather(1, tokens[:, None])[:, 0], log_probs)
    alone, _ = draw(sampler, logits[1:2].clone(), [0], [3])
    assert alone == tokens[1]


def test_a_slot_that_another_request_takes_has_its_name_only(sampler):
    logits = some_logits(40)
    rows = [1] * len(logits)
    add(sampler, 1, 5, 10)
    lengths = list(range(10, 10 + len(logits)))
    first, _ = draw(sampler, logits.clone(), rows, lengths)
    add(sampler, 1, 6, 12)
    second, _ = draw(sampler, logits.clone(), rows, [each + 2 for each in lengths])
    for key, got in ((5, first), (6, second)):
        want, _ = sample_tokens(logits, numbers([(key, index) for index in range(40)]), Sampling(max_tokens=1))
        assert torch.equal(got, want)
    assert not torch.equal(first, second)


def test_greedy_rows_take_the_likeliest_token_beside_others(sampler):
    add(sampler, 0, 1, 2, temperature=0.0, logprobs=None)
    add(sampler, 1, 1, 2)
    logits = some_logits(1).repeat(30, 1)
    tokens, _ = draw(sampler, logits.clone(), [0, 1] * 15, list(range(2, 32)))
    assert (tokens[::2] == logits[0].argmax()).all()
    assert len(set(tokens[1::2].tolist())) > 3


def test_cuts_are_vllms_own_and_come_first(sampler):
    add(sampler, 0, 3, 1, top_k=2)
    logits = some_logits(1).repeat(60, 1)
    tokens, drawn_from = draw(sampler, logits.clone(), [0] * 60, list(range(1, 61)))
    assert set(tokens.tolist()) == set(logits[0].topk(2).indices.tolist())
    assert (drawn_from.isfinite().sum(-1) == 2).all()


def test_the_models_logits_stay_as_they_are_and_the_draw_is_in_fp32(sampler):
    """The model's are bf16, and vLLM copies them where a processor asks for it."""
    add(sampler, 0, 3, 1)
    logits = some_logits(1).bfloat16()
    given = logits.clone()
    _, drawn_from = draw(sampler, logits, [0], [1])
    assert torch.equal(logits, given)
    assert drawn_from.dtype is torch.float32


def test_only_steps_with_new_rows_send_anything_to_the_device(sampler):
    noise = sampler.logits_processors[-1]
    add(sampler, 0, 3, 1)
    seen = []
    for length in range(1, 4):
        draw(sampler, some_logits(1), [0], [length])
        seen.append(noise._names)
    assert seen[0] is seen[1] is seen[2]
    add(sampler, 1, 4, 1)
    draw(sampler, some_logits(1), [0], [4])
    assert noise._names is not seen[0]


def test_requests_with_which_vllm_warms_up_have_no_name(sampler):
    from vllm import SamplingParams

    sampler.add_request(0, SamplingParams())
    assert draw(sampler, some_logits(1), [0], [1])[0].shape == (1,)
