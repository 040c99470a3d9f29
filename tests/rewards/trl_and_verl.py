"""Rewards in the forms of TRL's and verl's documentation, as their users have them."""

import re


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


def right(prompts, completions, answer):
    assert isinstance(prompts, list)
    return [float(text == wanted) if wanted else None for text, wanted in zip(completions, answer, strict=True)]


def conversational(completions, **kwargs):
    """TRL's format reward: a completion is a list of messages."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^2$", content) else 0.0 for content in contents]


def by_column(completions, solution, level):
    return [float(text == wanted) * value for text, wanted, value in zip(completions, solution, level, strict=True)]


def by_ground_truth(completions, ground_truth):
    return [float(text == wanted) for text, wanted in zip(completions, ground_truth, strict=True)]


def with_state(completions, trainer_state):
    return [0.0] * len(completions)


def with_optional_state(completions, trainer_state=None):
    return [0.0 if trainer_state is None else 1.0] * len(completions)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    bonus = extra_info["index"] if extra_info else 0
    return {"score": float(solution_str == ground_truth) + bonus, "acc": 1.0, "source": data_source}


def short_score(solution_str, ground_truth, **kwargs):
    return len(kwargs["data_source"]) if solution_str == ground_truth else 0


def no_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}


def more_score(data_source, solution_str, ground_truth, extra_info, tokenizer):
    return 0.0
