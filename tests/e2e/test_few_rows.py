"""Fewer rows than workers: a prompt alone in a batch, the same prompt twice, an evaluation of one. About 12 CPU s."""

import json

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
PROMPTS = ["7+1=", "7+1=", "12+5="]  # the first two may meet in a batch of two; the third row is then alone
COMPARED = ("reward/mean", "loss/policy", "loss/kl", "train/grad_norm", "health/equal_groups", "data/train_prompts")


def test_few_rows_train_and_are_evaluated_on_two_workers_as_on_one(ray_cluster, train_here, tmp_path):
    for split, prompts in {"train": PROMPTS, "test": ["2+2="]}.items():
        rows = [{"prompt": prompt, "answer": str(eval(prompt.rstrip("=")))} for prompt in prompts]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        *("algo=grpo", "algo.group_size=2", "data=file", f"data.path={tmp_path}", "reward=arithmetic"),
        *("data.batch_size=2", "data.drop_last=false", "data.shuffle=false", "rollout.response_len=4"),
        *("trainer.total_steps=4", "trainer.eval_every=2", "engine.lr=1e-4", "trainer.samples_per_step=64"),
    ]
    one = train_here(tmp_path / "one", *settings, "cluster=in_process")
    two = train_here(tmp_path / "two", *settings, "cluster.workers=2")
    for run in (one, two):
        folder = tmp_path / ("one" if run is one else "two") / "samples"
        uids = [
            sorted(json.loads(line)["uid"] for line in file.read_text().splitlines())
            for file in sorted(folder.glob("step_*.jsonl"))
        ]
        whole, alone = ["0:0", "0:0", "0:1", "0:1"], ["0:2", "0:2"]
        assert uids == [whole, alone, [f"1{uid[1:]}" for uid in whole], [f"1{uid[1:]}" for uid in alone]]
        assert [row["eval/samples"] for row in run.numbers if "eval/samples" in row] == [1, 1, 1]
    for here, there in zip(one.numbers, two.numbers, strict=True):
        for name in COMPARED:
            assert (name in here) == (name in there), name
            assert here.get(name, 0) == pytest.approx(there.get(name, 0), rel=1e-4, abs=1e-6), name
        assert here.get("eval/score") == there.get("eval/score")
