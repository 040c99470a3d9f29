"""TRL's side, run as a script: GRPO on the same rows as rlcore's, and the seconds of each step."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class Clock(TrainerCallback):
    """Notes the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        self.last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now


def main() -> None:
    """Train as the JSON object in the first argument says, and write `steps.json`."""
    asked = json.loads(sys.argv[1])
    spec = importlib.util.spec_from_file_location("reward", asked["reward"])
    assert spec is not None
    assert spec.loader is not None
    reward = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reward)

    def scores(prompts: list, completions: list, answer: list[str], **_: Any) -> list[float]:
        return [reward.score("", each[-1]["content"], right) for each, right in zip(completions, answer, strict=True)]

    rows = [json.loads(line) for line in Path(asked["data"], "train.jsonl").read_text().splitlines()]
    count, clock = asked["prompts"] * asked["samples"], Clock()
    args = trl.GRPOConfig(
        output_dir=asked["out"],
        per_device_train_batch_size=asked["micro_batch"],
        gradient_accumulation_steps=count // asked["micro_batch"],
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        bf16=asked["bf16"],
        use_cpu=asked["on_cpu"],
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        seed=0,
        beta=0.0,
        num_generations=asked["samples"],
        max_completion_length=asked["response_len"],
        max_steps=asked["steps"],
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32, attn_implementation="sdpa"),
        reward_funcs=scores,
        args=args,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
        ),
        processing_class=AutoTokenizer.from_pretrained(asked["model"], padding_side="left"),
        callbacks=[clock],
    )
    trainer.train()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    found = {"version": trl.__version__, "seconds": clock.seconds, "peak": peak}
    Path(asked["out"], "steps.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
