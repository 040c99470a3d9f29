"""The first lines of a run say on what and how it computes."""

import json

import pytest

from rlcore.engines.hf import fused_decode

ON_CPU = "device: this process, on the CPU; there is no GPU (CUDA_VISIBLE_DEVICES is empty)"


@pytest.fixture
def first_lines(train_small, tmp_path, capsys):
    def run(*overrides):
        train_small(tmp_path / "run", "trainer.total_steps=1", *overrides)
        records = (tmp_path / "run" / "rlcore.log").read_text().splitlines()
        logged = [
            record.partition("INFO rlcore.training.trainer: ")[2]
            for record in records
            if "rlcore.training.trainer" in record
        ]
        return logged, capsys.readouterr().out.splitlines()

    return run


def test_device_precision_attention_and_decoder(first_lines):
    logged, shown = first_lines("algo=grpo", "algo.kl_coef=0.1", "tracker=console")
    expected = [
        ON_CPU,
        "precision: fp32, as bf16 is chosen on a GPU only",
        "actor: CPU, fp32, attention sdpa, rows packed, decodes in few kernels",
        "ref: CPU, fp32, attention sdpa, rows packed",
    ]
    assert logged[:4] == expected
    assert shown[1:5] == expected


def test_a_fallback_gives_its_reason(first_lines, monkeypatch):
    monkeypatch.setattr(fused_decode, "LAYERS", set())
    logged, _ = first_lines("model.dtype=bf16", "engine.torch.padding_free=false")
    assert logged[1] == "precision: bf16, as model.dtype says so"
    assert logged[2].startswith(
        "actor: CPU, bf16, attention sdpa, rows padded, decodes with the module's own forward, as"
    )
    assert "no fast form of Qwen2DecoderLayer is known" in logged[2]


def test_the_schema_of_the_data_that_was_recognised(first_lines, tmp_path):
    """About 2 s."""
    rows = [
        {"data_source": "sums", "prompt": f"{i}+1=", "reward_model": {"style": "rule", "ground_truth": str(i + 1)}}
        for i in range(9)
    ]
    (tmp_path / "verl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    logged, _ = first_lines("data=file", f"data.path={tmp_path / 'verl.jsonl'}", "data.batch_size=2")
    assert "data train: columns of verl, prompt in 'prompt', answer in 'reward_model.ground_truth'" in logged
