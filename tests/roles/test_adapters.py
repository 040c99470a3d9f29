"""Runs in which roles train LoRA adapters (model.lora): all algorithms, the shared base, eval, and wrong settings."""

import json
from pathlib import Path

import peft
import pytest
import torch
from rlcore_plugin_testing.algorithm.problem import STEPS
from rlcore_plugin_testing.suites import open_suite
from transformers import AutoModelForCausalLM

from rlcore.adapter_folder import WEIGHTS
from rlcore.assets import TINY
from rlcore.cli import main
from rlcore.config import compose
from rlcore.engines.torch import engine
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager
from rlcore.training.preflight import preflight

BUILT_IN = ["grpo", "online_dpo", "ppo", "rejection_sampling"]
OTHERS = sorted(set(PluginManager.load([]).algorithms()) - set(BUILT_IN))
PLAIN = str(Path(__file__).parents[1] / "fixtures/engines/rlcore-plugin-plain/rlcore_plugin_plain.py")
SMALL = [
    *("experiment=quickstart", "cluster=in_process", "model.lora.rank=8", "engine.lr=3e-3", "data.max_rows=64"),
    *("data.batch_size=4", "algo.group_size=4", "data.eval_size=16", "trainer.eval_temperature=0"),
]


NEEDS = {
    "on_policy_distill": ["algo.teacher=tiny"],
    "safe_rlhf": ["reward.functions={arithmetic: 1, gsm8k_flexible: 0}", "algo.cost_function=gsm8k_flexible"],
}
"""What an algorithm has to be given."""


@pytest.mark.parametrize("name", [*BUILT_IN, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_an_algorithm_trains_adapters_and_resumes_bit_for_bit(name, tmp_path):
    settings = ["model.lora.rank=4", "engine.lr=1e-2", *NEEDS.get(name, [])]
    with open_suite(name, tmp_path, settings=settings) as suite:
        result = suite.result("resume")
        assert result.outcome == "pass", result.text
        first, last = suite.plain.saved(1), suite.plain.saved(STEPS)
    trained = [file for file in last if file.endswith(f"model/{WEIGHTS}")]
    assert trained
    for file in trained:
        assert last[file][1] != first[file][1], file
    assert not [file for file in last if file.endswith("model/model.safetensors")]


def test_a_run_has_one_model_and_its_checkpoint_is_evaluated(tmp_path, capfd):
    folder = tmp_path / "run"
    assert (
        main(["train", *SMALL, "algo.kl_coef=0.01", "engine.lr=3e-6", "trainer.total_steps=3", f"run.dir={folder}"])
        == 0
    )
    told = capfd.readouterr().out
    assert "adapters of rank 8 in 21 layers" in told
    assert "actor: a learning rate of 3e-06 is one for training all weights; an adapter wants about ten" in told
    assert "ref: CPU, fp32, attention sdpa, rows packed, on the weights of the adapter's base" in told
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line["eval/score"] for line in lines if "eval/score" in line]
    kl = [line["kl/mean"] for line in lines if "kl/mean" in line]
    assert kl[0] == 0
    assert kl[-1] > 0

    adapter = folder / "checkpoints" / "step_00000003" / "actor" / "model"
    scores = {}
    for target in (folder, adapter):
        assert main(["eval", str(target), "cluster=in_process", "data.eval_size=16", "trainer.eval_temperature=0"]) == 0
        told = capfd.readouterr().out
        scores[target] = float(next(line.split()[1] for line in told.splitlines() if line.startswith("score ")))
    for target, options in {"adapter": [], "merged": ["--merge"], "bf16": ["--merge", "--dtype", "bf16"]}.items():
        assert main(["export", str(folder), str(tmp_path / target), *options]) == 0
    assert (tmp_path / "adapter" / WEIGHTS).read_bytes() == (adapter / WEIGHTS).read_bytes()
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    want = dict(peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().named_parameters())
    for name, dtype in {"merged": torch.float32, "bf16": torch.bfloat16}.items():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert {each.dtype for each in model.parameters()} == {dtype}
        for key, weight in model.named_parameters():
            assert torch.allclose(weight.float(), want[key], atol=1e-6 if dtype is torch.float32 else 4e-3), key
    assert main(["export", str(folder), str(tmp_path / "merged")]) == 2
    assert "exists already" in capfd.readouterr().err
    assert main(["export", str(folder), str(tmp_path / "other"), "--role", "critic"]) == 2
    assert "holds no model of it; it holds those of actor" in capfd.readouterr().err

    assert scores[folder] == scores[adapter] == pytest.approx(evaluated[-1], rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["roles.ref.lora={rank: 4}", "algo.kl_coef=0.1"], "roles.ref.lora={'rank': 4}: role 'ref' does not train"),
        (["roles.actor.lora={rnk: 4}"], "unknown key 'roles.actor.lora.rnk'"),
        (["cluster=local", "engine.tp=2", "model.lora.rank=5"], "rank 5 cannot be divided by engine.tp=2"),
        (["cluster=local", "engine.tp=2", "model.lora.dropout=0.1"], "model.lora.dropout=0.1 with engine.tp=2"),
        (["model.lora.alpha=0"], "model.lora.alpha=0 multiplies the adapter by 0"),
        (["roles.actor.lora={dropout: 1}"], "roles.actor.lora.dropout=1 drops every input"),
        (["model.lora.targets=[]"], "model.lora.targets=[] adapts no layer"),
        (["model.lora.rank=0", "model.lora.targets=[k_proj]"], "model.lora.targets is set, but there is no adapter"),
        (["model.lora.path=/nowhere"], "model.lora.path=/nowhere does not exist"),
        (["engine=plain"], "engine=plain, which trains the role 'actor', has no adapters; choose one that has: torch"),
        (["model.lora.rank=-1"], "model.lora.rank = -1 is out of bounds"),
    ],
)
def test_wrong_settings_are_named_before_the_run(overrides, message):
    plugins = PluginManager.load([PLAIN])
    with pytest.raises(ConfigError) as raised:
        preflight(compose([*SMALL, *overrides], plugins), plugins)
    assert message in str(raised.value)


def test_a_role_trains_all_of_its_weights_beside_one_that_starts_from_an_adapter(tmp_path, monkeypatch):
    ppo = [*(each for each in SMALL if "group_size" not in each and "rank" not in each), "trainer.eval_every=0"]
    ppo += ["algo=ppo", "trainer.total_steps=1", "roles.critic.lora={rank: 0}"]
    saved = {name: tmp_path / name / "checkpoints" / "step_00000001" for name in ("first", "second")}
    start = saved["first"] / "actor" / "model"
    assert main(["train", *ppo, "model.lora.rank=8", f"run.dir={tmp_path / 'first'}"]) == 0
    own = f"roles.actor.lora={{path: '{start}'}}"
    assert main(["train", *ppo, own, f"run.dir={tmp_path / 'second'}"]) == 0
    for checkpoint in saved.values():
        assert (checkpoint / "actor" / "model" / WEIGHTS).is_file()
        assert (checkpoint / "critic" / "model" / "model.safetensors").is_file()
    # The evaluation is of the trained adapter, and not of the one that the config names as the start.
    merged = []
    merge = engine.merge_adapter
    monkeypatch.setattr(engine, "merge_adapter", lambda hf, start: (merged.append(start.path), merge(hf, start)))
    assert main(["eval", str(tmp_path / "second"), "cluster=in_process", "data.eval_size=2"]) == 0
    assert merged == [saved["second"] / "actor" / "model"]
