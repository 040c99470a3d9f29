"""verl's tutorial on online DPO, as docs/coming_from_verl.md shows it: on real Ray, against the same in plain torch."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.ops import Outputs

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_verl.md"
STEPS, PROMPTS, SAMPLES, TOKENS, BETA, RATE = 30, 5, 8, 8, 0.1, 0.1

KEPT = """
@ray.remote
class SampleGenerator(Worker):
def generate_sequences(self, data: DataProto) -> DataProto:
class ReferencePolicy(Worker):
def infer(self, data):
class DPOActor(Worker):
super().__init__()
def update(self, data):
self.optimizer.zero_grad()
self.optimizer.step()
def dispatch_data(worker_group, data):
def collect_data(worker_group, data):
return torch.cat(data)
@register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
@ray.remote(num_cpus=1)
def main_task(config):
ray_cls = RayClassWithInitArgs(SampleGenerator, config=config)
sample_gen = RayWorkerGroup(resource_pool, ray_cls)
ray_cls = RayClassWithInitArgs(ReferencePolicy)
ref_policy = RayWorkerGroup(resource_pool, ray_cls)
ray_cls = RayClassWithInitArgs(DPOActor)
dpo_policy = RayWorkerGroup(resource_pool, ray_cls)
for data in dataloader:
data = sample_gen.generate_sequences(data)
data = generate_scores(data)
data = generate_pairwise_data(data)
"""
"""The lines by which the tutorial's program is known; what stands between them is filled in."""


def block(file: str) -> str:
    (text,) = re.findall(rf"^```python file={file}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return text


def in_plain_torch() -> tuple[list[dict[str, Any]], torch.Tensor]:
    """Train in one process: a table of logits, loss -mean log sigmoid(beta D) over the pairs, Adam."""
    torch.manual_seed(0)
    table = (0.1 * torch.randn(TOKENS, TOKENS, dtype=torch.float64)).requires_grad_()
    ref = table.detach().clone()
    adam = torch.optim.Adam([table], lr=RATE)
    log = []

    def log_prob(weights: torch.Tensor, sequence: list[int]) -> torch.Tensor:
        steps = pairwise(sequence)
        return torch.stack([weights[a, b] - weights[a].logsumexp(0) for a, b in steps]).sum()

    for step in range(STEPS):
        scores, losses = [], []
        for seed in range(step * PROMPTS, (step + 1) * PROMPTS):
            generator = torch.Generator().manual_seed(seed)
            columns = [torch.full((SAMPLES,), seed % TOKENS)]
            for _ in range(4):
                probs = table.detach().softmax(1)[columns[-1]]
                columns.append(torch.multinomial(probs, 1, generator=generator).flatten())
            samples = torch.stack(columns, 1).tolist()
            right = [sum(b == (a + 1) % TOKENS for a, b in pairwise(s)) for s in samples]
            scores += right
            if max(right) > min(right):
                best, worst = samples[right.index(max(right))], samples[right.index(min(right))]
                policy = log_prob(table, best) - log_prob(table, worst)
                held = log_prob(ref, best) - log_prob(ref, worst)
                losses.append(torch.log1p(torch.exp(-BETA * (policy - held))))
        loss = torch.stack(losses).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        log.append({"score": sum(scores) / len(scores), "pairs": len(losses), "loss": loss.item()})
    return log, table.detach()


def test_it_is_the_tutorials_program() -> None:
    lines = {line.strip() for line in block("online_dpo_workers.py").splitlines()}
    assert [line for line in KEPT.strip().splitlines() if line not in lines] == []
    assert any("data.batch['ref_log_prob'] = ref_policy.infer(data)".replace("'", '"') == line for line in lines)


@pytest.mark.ray
def test_its_numbers_are_those_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "online_dpo_workers.py").write_text(block("online_dpo_workers.py"))
    done = subprocess.run(
        [sys.executable, "online_dpo_workers.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    log, table = in_plain_torch()
    assert log[0]["loss"] == pytest.approx(math.log(2)), "at the start the policy is the reference: -log sigmoid(0)"
    assert [row["pairs"] for row in made["log"]] == [row["pairs"] for row in log]
    for name in ("score", "loss"):
        assert [row[name] for row in made["log"]] == pytest.approx([row[name] for row in log], abs=1e-6)
    torch.testing.assert_close(torch.tensor(made["table"], dtype=torch.float64), table, atol=1e-6, rtol=0)
    scores = [row["score"] for row in made["log"]]
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 1, "of four tokens more are right"


def test_the_plugin_beside_it_has_the_same_loss() -> None:
    """Two pairs of responses with two tokens, in the order of the plugin's rows: chosen, rejected."""
    names: dict[str, Any] = {"__name__": __name__}
    for file in ("online_dpo_workers.py", "mini_dpo.py"):
        exec(compile(block(file), file, "exec"), names)
    tokens = torch.tensor([[-1.0, -2.0], [-3.0, -1.0], [-0.5, -0.5], [-2.0, -4.0]])
    ref = torch.tensor([[-1.5, -1.0], [-3.0, -2.0], [-2.0, -1.0], [-1.0, -1.0]])
    actor = names["RayClassWithInitArgs"](names["DPOActor"]).cls
    of_workers = actor.loss_fn(None, tokens.sum(1).view(2, 2), ref.sum(1).view(2, 2))
    batch = {
        "response_mask": torch.ones(4, 2),
        "ref_log_probs": ref,
        "mini_dpo_pair": torch.tensor([0, 0, 1, 1]),
        "mini_dpo_side": torch.tensor([1.0, -1.0, 1.0, -1.0]),
    }
    term = names["mini_dpo_loss"](Outputs({"log_probs": tokens}), batch, names["MiniDPOConfig"](beta=BETA))[
        "preference"
    ]
    # D is (-3 + 2.5) - (-4 + 5) = -1.5 and (-1 + 3) - (-6 + 2) = 6
    by_hand = math.log(1 + math.exp(0.15)) + math.log(1 + math.exp(-0.6))
    assert of_workers.item() == pytest.approx(by_hand)
    assert term.total.item() == pytest.approx(by_hand)
    assert term.count.item() == 2
