"""vLLM on a GPU; these need vLLM's CUDA build. They are not part of CI."""

import pytest
import torch

from rlcore.config import ModelConfig
from rlcore.engine.rollout import Sampling
from rlcore.engines.vllm.config import VLLMConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SAMPLING = Sampling(max_tokens=12)


def tokens(out):
    return [row.tolist() for row in out["responses"].to_list()]


@pytest.fixture
def folder(make_model, tmp_path):
    return make_model(tmp_path / "model", "qwen2", tied=True)


@pytest.fixture
def weights(folder):
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    return {name: each.detach() for name, each in hf.named_parameters()}


@pytest.fixture
def make_rollout(folder):
    from rlcore.engines.vllm.rollout import VLLMRollout

    made = []

    def make(**options):
        config = VLLMConfig(**{"memory": 512, "batch_size": 16, **options})
        model = ModelConfig(path=str(folder), dtype="bf16")
        for earlier in made:
            earlier.close()
        made[:] = [VLLMRollout(model, config=config, device=torch.device("cuda", 0), beside_training=True)]
        return made[0]

    yield make
    made[0].close()


def sync(rollout, weights, version):
    rollout.sync(iter(weights.items()), version, {name: tuple(each.shape) for name, each in weights.items()})


def test_its_memory_is_free_while_it_sleeps_and_its_rows_are_the_same_after_it(make_rollout, weights, prompts):
    rollout, rows = make_rollout(sleep="on"), []
    for version in (1, 2):
        sync(rollout, weights, version)
        rows.append(tokens(rollout.generate(prompts([20, 60], 4), SAMPLING)))
        awake = torch.cuda.mem_get_info()[0]
        rollout.sleep()
        assert torch.cuda.mem_get_info()[0] - awake > 500 << 20
        assert rollout.metrics["memory/rollout_sleep_freed_gb"] > 0.5
    assert rows[0] == rows[1]


def test_cuda_graphs_and_chunked_prefill_are_on(make_rollout):
    config = make_rollout(sleep="off").llm.llm_engine.vllm_config
    assert not config.model_config.enforce_eager
    assert config.compilation_config.cudagraph_mode.name != "NONE"
    assert config.scheduler_config.enable_chunked_prefill


def test_samples_do_not_depend_on_order_or_company(make_rollout, weights, prompts):
    """First tokens only: in bf16 later ones may differ by rounding."""
    rollout, sampling = make_rollout(), Sampling(max_tokens=1, temperature=4.0)
    sync(rollout, weights, 1)
    batch = prompts([20, 33], 8)
    want = tokens(rollout.generate(batch, sampling))
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(2)).tolist()
    got = tokens(rollout.generate(batch[order], sampling))
    assert sum(a != want[i] for a, i in zip(got, order, strict=True)) <= 1
    assert len({tuple(row) for row in want}) > 4


def test_drawing_never_waits_for_the_device(make_rollout, weights, monkeypatch):
    """torch refuses calls that wait; RowNoise and the draw are called as by vLLM, on rows that do not change."""
    from rlcore.engines.vllm.noise import draw
    from rlcore.engines.vllm.noise_v1 import RowNoise

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    rollout = make_rollout()
    assert rollout.runner == "V1"
    sync(rollout, weights, 1)
    runner = rollout.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    noise = next(each for each in runner.input_batch.logitsprocs.argmax_invariant if isinstance(each, RowNoise))
    noise._on_device = torch.arange(16, device="cuda").view(8, 2)
    lengths, logits = torch.full((8,), 20, device="cuda", dtype=torch.int32), torch.randn(8, 320, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn, log_probs = draw(logits, noise.next(lengths))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert drawn.shape == log_probs.shape == (8,)


def test_the_second_runner_draws_by_name_as_the_first(make_rollout, weights, prompts, monkeypatch):
    """First tokens and their log-probs. Where vLLM has no second runner for rlcore's noise, there is nothing to see."""
    from rlcore.engines.vllm.internals import choose_runner

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if choose_runner(on_cpu=False) == "V1":
        pytest.skip("this vLLM's second runner takes no logits processors")
    sampling, outs = Sampling(max_tokens=1, temperature=4.0), {}
    for runner in ("V2", "V1"):
        if runner == "V1":
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        rollout = make_rollout(memory=256)
        assert rollout.runner == runner
        sync(rollout, weights, 1)
        outs[runner] = rollout.generate(prompts([20, 33], 8), sampling)
    different = sum(a != b for a, b in zip(*(tokens(out) for out in outs.values()), strict=True))
    assert different <= 1
    again = tokens(rollout.generate(prompts([20, 33], 8), sampling))
    assert again == tokens(outs["V1"])
