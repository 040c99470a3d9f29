"""TRL's side of the benchmarks, run in a venv of its own: writes a JSON line for each step."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

Asked = dict[str, Any]
Rows = list[dict[str, str]]


class Clock(TrainerCallback):
    """Notes when each step ended, and the prompt and response tokens until then."""

    def __init__(self, file: Path, tokens: Callable[[Any], float]) -> None:
        self.file, self.count = file, tokens

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        self.last, self.tokens = time.perf_counter(), 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        now, tokens = time.perf_counter(), self.count(state)
        with self.file.open("a") as file:
            file.write(json.dumps({"seconds": now - self.last, "tokens": tokens - self.tokens}) + "\n")
        self.last, self.tokens = now, tokens


class Reward:
    """The workload's reward function, which also counts the prompt and response tokens that it was asked about."""

    def __init__(self, asked: Asked, rows: Rows, tokenizer: Any) -> None:
        self.module, self.tokenizer = load(asked["reward"]), tokenizer
        self.tokens = 0.0
        self.prompts = {tuple(prompt_ids(row["prompt"], tokenizer)): row for row in rows}
        self.lengths = {row["prompt"]: len(ids) for ids, row in self.prompts.items()}
        self.last_of_prompt = next(iter(self.prompts))[-1]

    def of_texts(
        self, prompts: list[Any], completions: list[Any], completion_ids: list[Any], answer: list[str], **_: Any
    ) -> list[float]:
        """Return the scores of conversations, as TRL asks a function for them; `completion_ids` may be padded."""
        scores = []
        for prompt, completion, ids, right in zip(prompts, completions, completion_ids, answer, strict=True):
            text = prompt[-1]["content"]
            self.tokens += self.lengths[text] + sum(token != self.tokenizer.pad_token_id for token in ids)
            scores.append(self.module.score(text, completion[-1]["content"], right))
        return scores

    def of_ids(self, ids: list[int]) -> float:
        """Return the score of a prompt and its response, without padding."""
        self.tokens += len(ids)
        start = ids.index(self.last_of_prompt) + 1
        row = self.prompts[tuple(ids[:start])]
        response = self.tokenizer.decode(ids[start:], skip_special_tokens=True)
        return self.module.score(row["prompt"], response, row["answer"])


class RewardModel(nn.Module):
    """The reward function in the form of a model, which is all that TRL's PPO takes."""

    base_model_prefix = "function"

    def __init__(self, reward: Reward) -> None:
        super().__init__()
        self.reward, self.score = reward, nn.Identity()

    def function(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> SimpleNamespace:
        """Return each row's score as the last hidden state of all its positions."""
        rows = zip(input_ids, attention_mask.bool(), strict=True)
        scores = torch.tensor([self.reward.of_ids(ids[mask].tolist()) for ids, mask in rows])
        return SimpleNamespace(hidden_states=[scores[:, None, None].expand(*input_ids.shape, 1)])


def load(path: str) -> ModuleType:
    """Import a file."""
    spec = importlib.util.spec_from_file_location("reward", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompt_ids(text: str, tokenizer: Any) -> list[int]:
    """Return a prompt's tokens, as a chat of one message."""
    chat = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer(rendered, add_special_tokens=False)["input_ids"]


def common(asked: Asked, rows: int) -> dict[str, Any]:
    """Return what all trainers are set to; a step takes `rows` of what the trainer counts its batches in."""
    micro = asked["micro_batch"] or rows
    return {
        "output_dir": asked["out"],
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // micro,
        "learning_rate": asked["lr"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "temperature": 1.0,
        "bf16": asked["bf16"],
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


def policy(asked: Asked) -> Any:
    """Load the policy."""
    return AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)


def grpo(asked: Asked, rows: Rows, tokenizer: Any, reward: Reward) -> Any:
    """Return TRL 1.16's trainer."""
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        **common(asked, asked["prompts"] * asked["samples"]),
        num_generations=asked["samples"],
        max_completion_length=asked["response_len"],
        max_steps=asked["steps"],
        logging_strategy="no",
        beta=0.0,
    )
    return GRPOTrainer(
        model=policy(asked),
        reward_funcs=reward.of_texts,
        args=args,
        train_dataset=conversations(rows),
        processing_class=tokenizer,
        callbacks=[Clock(Path(asked["file"]), lambda state: float(state.num_input_tokens_seen))],
    )


def online_dpo(asked: Asked, rows: Rows, tokenizer: Any, reward: Reward) -> Any:
    """Return TRL 1.16's experimental trainer, whose batches count prompts, each with two responses."""
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    assert asked["samples"] == 2
    args = OnlineDPOConfig(
        **common(asked, asked["prompts"]),
        max_new_tokens=asked["response_len"],
        max_length=asked["response_len"] + 128,
        max_steps=asked["steps"],
        logging_strategy="no",
        beta=0.1,
        missing_eos_penalty=None,
    )
    return OnlineDPOTrainer(
        model=policy(asked),
        reward_funcs=reward.of_texts,
        args=args,
        train_dataset=conversations(rows),
        processing_class=tokenizer,
        callbacks=[Clock(Path(asked["file"]), lambda state: reward.tokens)],
    )


def ppo(asked: Asked, rows: Rows, tokenizer: Any, reward: Reward) -> Any:
    """Return TRL 1.12's experimental trainer, whose batches count rows."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    args = PPOConfig(
        **common(asked, asked["prompts"]),
        response_length=asked["response_len"],
        total_episodes=asked["prompts"] * asked["steps"],
        local_rollout_forward_batch_size=asked["prompts"],
        stop_token="eos",
        num_ppo_epochs=1,
        num_mini_batches=1,
        num_sample_generations=0,
        kl_coef=0.01,
    )
    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy(asked),
        ref_model=policy(asked),
        reward_model=RewardModel(reward),
        value_model=AutoModelForSequenceClassification.from_pretrained(
            asked["model"], num_labels=1, dtype=torch.float32
        ),
        train_dataset=Dataset.from_list([{"input_ids": list(ids)} for ids in reward.prompts]),
        eval_dataset=Dataset.from_list([{"input_ids": list(ids)} for ids in [*reward.prompts][:8]]),
    )
    trainer.add_callback(Clock(Path(asked["file"]), lambda state: reward.tokens))
    return trainer


def conversations(rows: Rows) -> Dataset:
    """Return the data set as chats."""
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    )


TRAINERS = {"grpo": grpo, "online_dpo": online_dpo, "ppo": ppo}


def main() -> None:
    """Train as the JSON object in the first argument says."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    rows = [json.loads(line) for line in Path(asked["data"], "train.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(asked["model"], padding_side="left")
    reward = Reward(asked, rows, tokenizer)
    TRAINERS[asked["algorithm"]](asked, rows, tokenizer, reward).train()


if __name__ == "__main__":
    main()
