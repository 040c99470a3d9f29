"""Each engine on a GPU: sampling, update, weights, resume and offload, against the CPU or the plain form."""

import os
from dataclasses import replace

import pytest
import torch
import transformers
from rlcore_grpo import GRPOConfig, grpo_loss

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engine.collectives import Ranks
from rlcore.engine.rollout import Request, Sampling
from rlcore.engine.train import TrainSetup
from rlcore.engine.update.items import UpdateItem
from rlcore.engines.hf.rollout import HFRollout
from rlcore.engines.hf.static_decode import Heads
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.engine import TorchEngine
from rlcore.engines.torch.model import load_causal_lm
from rlcore.engines.torch.varlen import VARLEN_ATTENTION
from rlcore.ops import chunked_log_probs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),  # the compiler's own, which differ from version to version
]

GPU = torch.device("cuda", 0)


def rollout(folder, dtype="fp32", graphs="auto", shared=None):
    model = ModelConfig(path=str(folder), dtype=dtype)
    made = HFRollout(model, batch_size=32, graphs=graphs, device=GPU, shared=shared)
    made.version = 0
    return made


def sampled(engine, sampling, count=48):
    """Return rows by id; a few of the requests wait for a slot."""
    return answered(engine, [Request(str(i), tuple(range(5, 8 + i % 9)), 7919 * i + 1, sampling) for i in range(count)])


def answered(engine, requests):
    engine.add(requests)
    rows = {}
    while engine.in_flight:
        rows.update((row.id, row) for row in engine.step())
    return rows


def trained(folder, device=GPU, dtype="fp32", **options):
    setup = TrainSetup(
        ModelConfig(path=str(folder), dtype=dtype),
        EngineConfig(lr=1e-3, **options),
        TorchConfig(),
        ranks=Ranks(device=device),
        trains=True,
    )
    return TorchEngine(setup)


def update(engine, batch):
    return engine.update([UpdateItem(batch, [len(batch)], grpo_loss, GRPOConfig())], epochs=1, step=0)


def weights(engine):
    return {name: tensor.cpu().clone() for name, tensor in engine.export(torch.float32)}


@pytest.fixture(autouse=True)
def reasons(caplog):
    """A failed test shows which form of decoding was chosen, and why."""
    caplog.set_level("INFO", "rlcore")


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_graphs_sample_what_the_plain_step_samples(model_folder, kind):
    sampling = Sampling(max_tokens=60)
    by_graphs = rollout(model_folder(kind))
    assert by_graphs._slots is not None, "the log says why not"
    got, want = sampled(by_graphs, sampling), sampled(rollout(model_folder(kind), graphs="off"), sampling)
    assert [got[name].tokens for name in want] == [row.tokens for row in want.values()]
    for name, row in want.items():
        assert got[name].log_probs == pytest.approx(row.log_probs, abs=1e-4)


@pytest.mark.parametrize("options", [{"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}, {"min_tokens": 20}])
def test_graphs_serve_every_way_to_sample(model_folder, options):
    sampling = Sampling(max_tokens=40, **options)
    got = sampled(rollout(model_folder()), sampling)
    want = sampled(rollout(model_folder(), graphs="off"), sampling)
    assert [got[name].tokens for name in want] == [row.tokens for row in want.values()]


def test_turns_in_graphs_continue_kept_rows(model_folder):
    by_graphs, plain = rollout(model_folder()), rollout(model_folder(), graphs="off")
    wanted = [Request(str(i), tuple(range(5, 8 + i % 9)), i, Sampling(24), keep=True, row_limit=200) for i in range(48)]
    opened = []
    for turn in range(3):
        got = answered(by_graphs, wanted)
        want = answered(plain, [replace(each, keep=False, after=None) for each in wanted])
        assert [got[name].tokens for name in want] == [row.tokens for row in want.values()], turn
        assert len(by_graphs._kept) == 48
        opened.append(by_graphs._slots._step)
        wanted = [
            replace(each, prompt=(*each.prompt, *got[each.id].tokens, 9, 10), key=each.key + 100, after=each.id)
            for each in wanted
        ]
    assert opened[1:] == opened[:1] * 2, "slots are opened once"
    by_graphs.forget([each.id for each in wanted])


def test_log_probs_in_bf16_are_near_those_of_the_trainer(model_folder, random_batch):
    """Also after an update: graphs that were captured before see the weights that came since."""
    train = trained(model_folder(), dtype="bf16")
    own = rollout(model_folder(), dtype="bf16", shared=train.shared_module)
    assert own._slots is not None
    for _ in range(2):
        update(train, random_batch())
        rows = sampled(own, Sampling(max_tokens=30))
        for row in list(rows.values())[:8]:
            prompt = list(range(5, 8 + int(row.id) % 9))
            ids = torch.tensor([[*prompt, *row.tokens]], device=GPU)
            with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
                train.shared_module.config._attn_implementation, before = (
                    "sdpa",
                    train.shared_module.config._attn_implementation,
                )
                logits = train.shared_module(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
                train.shared_module.config._attn_implementation = before
            expected = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
            assert (expected.cpu() - torch.tensor(row.log_probs)).abs().mean() < 2e-2


def test_an_update_is_that_of_the_cpu(model_folder, random_batch):
    here, there = trained(model_folder()), trained(model_folder(), device=torch.device("cpu"))
    for seed in range(2):
        got, want = update(here, random_batch(seed=seed)), update(there, random_batch(seed=seed))
        assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=1e-4)
    apart = [(weights(here)[name] - tensor).abs().max() for name, tensor in weights(there).items()]
    assert max(apart) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fingerprint_is_that_of_the_cpu(model_folder, dtype):
    here, there = trained(model_folder()), trained(model_folder(), device=torch.device("cpu"))
    assert here.fingerprint(dtype) == there.fingerprint(dtype)


def test_training_goes_on_after_a_save_and_after_an_offload(model_folder, random_batch, tmp_path):
    straight, resumed = trained(model_folder()), trained(model_folder())
    update(straight, random_batch(seed=1))
    straight.save(tmp_path)
    resumed.restore(tmp_path)
    resumed.offload()
    for engine in (straight, resumed):
        update(engine, random_batch(seed=2))
    want = weights(straight)
    assert all(torch.allclose(want[name], tensor, atol=1e-6) for name, tensor in weights(resumed).items())


def test_a_large_model_in_bf16_decodes_with_the_attention_kernel(write_random, tmp_path, monkeypatch):
    folder = write_random(transformers.Qwen2Config, {"hidden_size": 64}, tmp_path)
    plain = sampled(rollout(folder, "bf16", graphs="off"), Sampling(max_tokens=60))
    monkeypatch.setattr("rlcore.engines.hf.slot_rows.pays_to_compile", lambda *_: True)
    own = rollout(folder, "bf16")
    assert own._slots is not None and own._slots.kernel, "the log says why not"  # noqa: PT018
    got = sampled(own, Sampling(max_tokens=60))
    same = sum(got[name].tokens[:4] == row.tokens[:4] for name, row in plain.items())
    assert same > len(plain) // 2, "rows part only where the noise is at the border between two tokens"


@pytest.mark.parametrize(("queries", "keys", "size"), [(14, 2, 64), (12, 2, 128), (4, 4, 32)])
def test_the_attention_kernel_is_masked_attention(queries, keys, size):
    from rlcore.engines.hf.decode_kernel import largest_error

    assert largest_error(Heads(queries, keys, size, size**-0.5, 1e-6), GPU) < 4e-2


PROMPTS = ([50, 51, 52, 53, 54] * 9, [7, 8, 9])
ROWS = [[*PROMPTS[row % 2], *range(5, 9 + 11 * row)] for row in range(7)]


def model_outputs(model, rows):
    packing = model.pack([torch.tensor(row) for row in rows], [len(PROMPTS[row % 2]) for row in range(len(rows))])
    select = torch.cat([packing.token(torch.tensor(i), torch.arange(len(row) - 1)) for i, row in enumerate(rows)])
    labels = torch.tensor([token for row in rows for token in row[1:]], device=GPU)
    with torch.autocast("cuda", torch.bfloat16), model.in_compiled_layers():
        return model(packing.to(GPU), select.to(GPU), labels, ("log_probs",), 1.0)["log_probs"]


def model_gradient(model, rows):
    (-model_outputs(model, rows).mean()).backward()
    made = torch.cat([each.grad.flatten() for each in model.hf.parameters()])
    model.hf.zero_grad(set_to_none=True)
    return made


@pytest.mark.parametrize("kind", ["Qwen2Config", "LlamaConfig", "Qwen3Config"])
def test_kernels_of_variable_length_and_compiled_layers_have_the_plain_outputs(write_random, tmp_path, kind):
    # The kernels take heads of a multiple of 8.
    folder = write_random(getattr(transformers, kind), {"hidden_size": 64, "head_dim": 16}, tmp_path)
    config = ModelConfig(path=str(folder), dtype="bf16")
    model = load_causal_lm(config, padding_free=True, chunk=64, device=GPU)
    assert model.attention == VARLEN_ATTENTION
    plain = load_causal_lm(replace(config, attention="sdpa"), padding_free=True, chunk=64, device=GPU)
    for compiled in (False, True):
        if compiled:
            model.compile_layers()
        for rows in (ROWS, ROWS[:3]):
            apart = (model_outputs(model, rows) - model_outputs(plain, rows)).abs()
            # bf16 rounds the large logits of this model by up to 0.1, in either form.
            assert apart.mean() < 0.02
            assert apart.max() < 0.3
            mine, want = model_gradient(model, rows), model_gradient(plain, rows)
            assert (mine - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize("used", [0, 1])
def test_compiled_passes_over_logits_give_the_plain_ones(used):
    torch.manual_seed(0)
    hidden = torch.randn(700, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(4096, 64, device=GPU) * 0.2).requires_grad_()
    labels = torch.randint(4096, (700,), device=GPU)
    found = []
    for compiled in (True, False):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = chunked_log_probs(hidden, weight, labels, chunk=256, compiled=compiled)[used]
        found.append([out.detach(), *torch.autograd.grad(out.sum(), [hidden, weight])])
    for got, want in zip(*found, strict=True):
        assert (got - want).float().norm() < 1e-2 * want.float().norm()


def test_a_run_in_bf16_trains_on_the_gpu(tmp_path):
    from rlcore.cli import main

    folder = tmp_path / "run"
    settings = ["cluster=in_process", "cluster.gpus_per_worker=1", "model.dtype=bf16", "trainer.total_steps=3"]
    argv = ["train", "experiment=quickstart", *settings, "trainer.eval_every=0", "tracker=none", f"run.dir={folder}"]
    assert not main(argv)
    assert (folder / "summary.json").exists()
    assert os.listdir(folder / "checkpoints")
