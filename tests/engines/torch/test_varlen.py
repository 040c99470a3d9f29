"""Packed attention by kernels of variable length, compiled layers, and weights rounded once a call.

The kernels need a GPU. Here plain formulas stand in for them, which leave unwritten what the kernels leave unwritten.
"""

import math
from contextlib import contextmanager

import pytest
import torch
from rlcore_grpo import GRPOConfig, grpo_loss
from torch import nn

from rlcore.config import ModelConfig
from rlcore.engine.update.items import UpdateItem
from rlcore.engines.torch import model as models
from rlcore.engines.torch import varlen
from rlcore.engines.torch.model import load_causal_lm
from rlcore.engines.torch.packing import MULTIPLE, Packing
from rlcore.engines.torch.rounded import rounded_weights
from rlcore.engines.torch.varlen import VARLEN_ATTENTION, _SegmentAttention

LOADING = {"padding_free": True, "chunk": 4, "device": torch.device("cpu")}
PROMPT = [50, 51, 52, 53, 54]
ROWS = [
    [5, 9, 11, 40, 41, 42, 7],
    [*PROMPT, 8],
    [8, 9],
    [30, 31, 32],
    [*PROMPT, *range(55, 95)],
    PROMPT,
    [*PROMPT, 8, 9],
]
PROMPTS = [3, 5, 1, 3, 5, 5, 5]


def pairs(own, keys):
    """Yield the slices of queries and keys that see each other, and the keys of each query head."""
    for a, b, c, d in zip(own[:-1].tolist(), own[1:].tolist(), keys[:-1].tolist(), keys[1:].tolist(), strict=True):
        if c < d:
            yield slice(a, b), slice(c, d)


def scores(query, key, causal, scale):
    found = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(query.shape[1] // key.shape[1], 1)) * scale
    return found.masked_fill(~torch.ones(found.shape[1:]).tril().bool(), -math.inf) if causal else found


def flash(query, key, value, own, keys, longest, of, causal, scale):
    out, normaliser = torch.full_like(query, math.nan), torch.full((query.shape[1], len(query)), math.nan)
    assert int(own.diff().max()) <= longest[of[0]]
    assert int(keys.diff().max()) <= longest[of[1]]
    for q, k in pairs(own, keys):
        found, groups = scores(query[q], key[k], causal, scale), query.shape[1] // key.shape[1]
        normaliser[:, q] = found.logsumexp(-1)
        out[q] = torch.einsum("hqk,khd->qhd", found.softmax(-1), value[k].repeat_interleave(groups, 1))
    return out, normaliser


def flash_backward(grad, query, key, value, out, normaliser, own, keys, longest, of, causal, scale):
    made = [torch.full_like(each, math.nan) for each in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    for q, k in pairs(own, keys):
        shares = (scores(query[q], key[k], causal, scale) - normaliser[:, q, None]).exp()
        by_key = torch.einsum("qhd,khd->hqk", grad[q], value[k].repeat_interleave(groups, 1))
        inner = shares * (by_key - (grad[q] * out[q]).sum(-1).T[:, :, None]) * scale
        made[0][q] = torch.einsum("hqk,khd->qhd", inner, key[k].repeat_interleave(groups, 1))
        by_head = [torch.einsum("hqk,qhd->khd", *each) for each in ((inner, query[q]), (shares, grad[q]))]
        made[1][k], made[2][k] = (each.unflatten(1, (-1, groups)).sum(2) for each in by_head)
    return tuple(made)


def in_fp32(kernel):
    def call(*tensors_and_options):
        floats = [e.float() if torch.is_tensor(e) and e.is_floating_point() else e for e in tensors_and_options]
        dtype = tensors_and_options[0].dtype
        return tuple(each.to(dtype) if each.dim() == 3 else each for each in kernel(*floats))

    return call


@contextmanager
def registered(backward=flash_backward):
    with torch.library._scoped_library("rlcore", "IMPL") as library:
        library.impl("flash", in_fp32(flash), "CPU")
        library.impl("flash_backward", in_fp32(backward), "CPU")
        yield


@pytest.fixture
def kernels():
    with registered():
        yield


def test_prompts_stand_first_and_the_responses_of_one_prompt_together():
    packing = Packing.in_segments([torch.tensor(row) for row in ROWS], PROMPTS)
    prompts = [*ROWS[0][:3], *PROMPT, 8, *ROWS[3]]
    assert packing.input_ids.tolist()[:60] == [*prompts, *ROWS[0][3:], 8, *range(55, 95), 8, 9, 9]
    assert len(packing.input_ids) == MULTIPLE
    for number, row in enumerate(ROWS):
        tokens = packing.token(torch.tensor(number), torch.arange(len(row)))
        assert packing.input_ids[tokens].tolist() == row
        assert packing.positions[tokens].tolist() == list(range(len(row)))
    # Four prompts, then the responses to each, and the filling with those of the last.
    assert packing.segments.prompts[:6].tolist() == [0, 3, 8, 9, 12, 12]
    assert packing.segments.responses[:6].tolist() == [12, 16, 59, 60, 64, 64]
    assert packing.segments.longest.tolist() == [40, 43, 5]


def test_a_packing_may_be_filled_up_further():
    packing = Packing.in_segments([torch.tensor(ROWS[0])], [3], total=200)
    assert len(packing.input_ids) == 200
    assert packing.segments.own[-1] == packing.segments.responses[-1] == 200


def test_a_single_token_without_a_response_can_be_packed(kernels):
    packing = Packing.in_segments([torch.tensor([4])], [1])
    values = torch.randn(len(packing.input_ids), 2, 8)
    assert torch.equal(_SegmentAttention.apply(values, values, values, *packing.segments, 0.3)[0], values[0])


@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_gradients_are_those_of_attention_row_by_row(kernels, compiled):
    torch.manual_seed(0)
    packing = Packing.in_segments([torch.tensor(row) for row in ROWS], PROMPTS)
    parts = [torch.randn(len(packing.input_ids), heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    attention = _SegmentAttention.apply
    if compiled:  # in one graph: no length is read on the host
        attention = torch.compile(attention, backend="aot_eager", fullgraph=True)
    got = attention(*parts, *packing.segments, 0.3)
    rows = [packing.token(torch.tensor(number), torch.arange(len(row))) for number, row in enumerate(ROWS)]
    slopes = [torch.randn(len(row), 4, 8) for row in ROWS]
    plain = []
    for tokens in rows:
        query, key, value = (each[tokens].transpose(0, 1)[None] for each in parts)
        key, value = (each.repeat_interleave(2, 1) for each in (key, value))
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)
        plain.append(out[0].transpose(0, 1))
    for tokens, want in zip(rows, plain, strict=True):
        torch.testing.assert_close(got[tokens], want, rtol=1e-5, atol=1e-6)
    sums = [
        sum((each * slope).sum() for each, slope in zip(outs, slopes, strict=True))
        for outs in ([got[t] for t in rows], plain)
    ]
    for mine, want in zip(*(torch.autograd.grad(each, parts) for each in sums), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("asked", [True, False])
def test_the_backward_is_deterministic_also_where_torch_only_warns(asked):
    seen = []

    def backward(*given):
        seen.append(torch.are_deterministic_algorithms_enabled() and not warns())
        return flash_backward(*given)

    warns = torch.is_deterministic_algorithms_warn_only_enabled
    torch.use_deterministic_algorithms(asked, warn_only=asked)
    try:
        with varlen._strictly_deterministic():
            backward(*[torch.zeros(1, 1, 8)] * 5, torch.zeros(1, 1), *[torch.tensor([0, 1])] * 2, None, None, True, 1.0)
        assert seen == [asked]
        assert (torch.are_deterministic_algorithms_enabled(), warns()) == (asked, asked)
    finally:
        torch.use_deterministic_algorithms(False)


def outputs(model, rows=ROWS, prompts=PROMPTS):
    packing = model.pack([torch.tensor(row) for row in rows], prompts)
    places = [(torch.tensor(number), torch.arange(len(row) - 1)) for number, row in enumerate(rows)]
    select = torch.cat([packing.token(*place) for place in places])
    labels = torch.tensor([token for row in rows for token in row[1:]])
    with model.in_compiled_layers():
        return model(packing, select, labels, ("log_probs",), 1.0)["log_probs"]


def gradients(model, values):
    values.square().sum().backward()
    made = {name: parameter.grad for name, parameter in model.hf.named_parameters()}
    model.hf.zero_grad(set_to_none=True)
    return made


def loaded(folder):
    return load_causal_lm(ModelConfig(path=str(folder)), **LOADING)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_a_model_has_the_outputs_and_gradients_of_its_plain_form(kernels, model_folder, assert_close, kind):
    model = loaded(model_folder(kind))
    want = outputs(model)
    of_plain = gradients(model, want)
    model.hf.config._attn_implementation = VARLEN_ATTENTION
    got = outputs(model)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert_close(gradients(model, got), of_plain, 1e-4)


@pytest.fixture
def as_on_a_gpu(monkeypatch, caplog):
    """Have kernels and compiled layers tried, as on a GPU; returns a function that loads a model."""
    monkeypatch.setattr(models, "_has_kernels", lambda config, device: True)
    monkeypatch.setattr(models, "pays_to_compile", lambda device, parameters: True)
    caplog.set_level("INFO", "rlcore")
    return lambda folder: load_causal_lm(ModelConfig(path=str(folder)), **LOADING, compiles_layers=True)


def test_the_plain_form_serves_where_a_kernel_is_missing(as_on_a_gpu, model_folder, caplog):
    model = as_on_a_gpu(model_folder())
    assert model.attention == "rlcore_packed"
    assert "packing without padding (rlcore_varlen) does not work for Qwen2ForCausalLM" in caplog.text


def test_the_plain_form_serves_where_a_kernel_has_another_gradient(as_on_a_gpu, model_folder, caplog):
    with registered(lambda *given: tuple(each * 0.5 for each in flash_backward(*given))):
        model = as_on_a_gpu(model_folder())
    assert model.attention == "rlcore_packed"
    assert "packing without padding (rlcore_varlen) has a gradient that is off by" in caplog.text


@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("works", [True, False])
def test_layers_are_compiled_where_that_works(as_on_a_gpu, kernels, model_folder, caplog, monkeypatch, works):
    def broken(graph, inputs):
        raise RuntimeError("no compiler on this machine")

    compiler, backend = torch.compile, "aot_eager" if works else broken
    monkeypatch.setattr(models.torch, "compile", lambda function: compiler(function, backend=backend))
    model = as_on_a_gpu(model_folder())
    torch._dynamo.reset()
    assert model.attention == VARLEN_ATTENTION
    assert ("layers compiled" in model.description) == works
    assert ("compiling layers does not work" in caplog.text) != works
    assert all(parameter.grad is None for parameter in model.parameters())  # the probe's is of one parameter


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compiled_layers_have_the_plain_outputs_and_serve_all_lengths(kernels, model_folder, assert_close, monkeypatch):
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return aot(graph, inputs)

    aot = torch._dynamo.lookup_backend("aot_eager")
    compiler = torch.compile
    monkeypatch.setattr(models.torch, "compile", lambda function: compiler(function, backend=backend, fullgraph=True))
    model = loaded(model_folder())
    model.hf.config._attn_implementation = VARLEN_ATTENTION
    batches = [(ROWS, PROMPTS), (ROWS[:1], PROMPTS[:1]), ([[*ROWS[4], *ROWS[0] * 20], *ROWS], [5, *PROMPTS])]
    want = [(values := outputs(model, *batch), gradients(model, values)) for batch in batches]
    model.compile_layers()
    for batch, (values, of_plain) in zip(batches, want, strict=True):
        got = outputs(model, *batch)
        torch.testing.assert_close(got, values, rtol=1e-4, atol=1e-5)
        assert_close(gradients(model, got), of_plain, 1e-4)
    assert len(made) == 1  # two layers, three lengths
    assert all("forward" not in vars(layer) for layer in model.base.layers)  # the rollout engine's own calls are plain
    assert "layers compiled" in model.description
    torch._dynamo.reset()


def test_weights_rounded_once_give_the_gradients_of_autocast():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 5), nn.Linear(5, 3, bias=False))
    layers[2].weight.requires_grad_(False)
    linear = [each for each in layers if isinstance(each, nn.Linear)]
    own, batches = list(layers.parameters()), torch.randn(3, 7, 4)

    def trained(chosen):
        layers.zero_grad(set_to_none=True)
        with rounded_weights(chosen, torch.bfloat16) as collect:
            for batch in batches:
                with torch.autocast("cpu", torch.bfloat16):
                    out = layers(batch)
                out.float().square().sum().backward()
                collect()
                assert all(each.grad is None for each in layers.parameters()) or not chosen
        return [each.grad for each in own]

    for got, want in zip(trained(linear), trained([]), strict=True):
        assert (got is None) == (want is None)
        assert got is None or (got.dtype is torch.float32 and torch.equal(got, want))
    assert [id(each) for each in layers.parameters()] == [id(each) for each in own]


def test_layers_get_their_own_weights_back_after_an_error():
    layer = nn.Linear(2, 2)
    own = layer.weight

    def fail():
        with rounded_weights([layer], torch.bfloat16):
            assert layer.weight.dtype is torch.bfloat16
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        fail()
    assert layer.weight is own


@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_is_that_of_the_plain_form(kernels, make_engine, random_batch, monkeypatch, checkpointing):
    options = {"micro_batch_tokens": 60, "activation_checkpointing": checkpointing}
    plain = make_engine(**options)
    compiler = torch.compile
    monkeypatch.setattr(models.torch, "compile", lambda function: compiler(function, backend="aot_eager"))
    monkeypatch.setattr(models, "_has_kernels", lambda config, device: True)
    engine = make_engine(**options)
    engine.model.compile_layers()
    assert engine.model.attention == VARLEN_ATTENTION != plain.model.attention
    for seed in range(2):
        batch = random_batch(groups=2, seed=seed)
        item = UpdateItem(batch, [len(batch)], grpo_loss, GRPOConfig())
        got, want = (each.update([item], epochs=1, step=seed) for each in (engine, plain))
        assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=1e-4)
    ours, theirs = (dict(each.export(torch.float32)) for each in (engine, plain))
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
