"""TRL's side of the GRPO benchmarks, run in a venv of its own: writes a JSON line for each step."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Notes when each step ended, and the prompt and response tokens until then."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        self.last, self.tokens = time.perf_counter(), 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        now, tokens = time.perf_counter(), float(state.num_input_tokens_seen)
        with self.file.open("a") as file:
            file.write(json.dumps({"seconds": now - self.last, "tokens": tokens - self.tokens}) + "\n")
        self.last, self.tokens = now, tokens


def main() -> None:
    """Train as the JSON object in the first argument says."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    spec = importlib.util.spec_from_file_location("reward", asked["reward"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def reward(prompts: list[Any], completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [
            module.score(prompt[-1]["content"], completion[-1]["content"], right)
            for prompt, completion, right in zip(prompts, completions, answer, strict=True)
        ]

    rows = [json.loads(line) for line in Path(asked["data"], "train.jsonl").read_text().splitlines()]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    )
    batch = asked["prompts"] * asked["samples"]
    micro = asked["micro_batch"] or batch
    args = GRPOConfig(
        output_dir=asked["out"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        num_generations=asked["samples"],
        max_completion_length=asked["response_len"],
        max_steps=asked["steps"],
        learning_rate=asked["lr"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        beta=0.0,
        temperature=1.0,
        bf16=asked["bf16"],
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=args,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(asked["model"], padding_side="left"),
        callbacks=[Clock(Path(asked["file"]))],
    )
    trainer.train()


if __name__ == "__main__":
    main()
