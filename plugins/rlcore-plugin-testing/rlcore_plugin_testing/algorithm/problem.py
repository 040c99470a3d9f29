"""The suite's training data: a few arithmetic problems, with every column that some kind of algorithm reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcore.data.arithmetic import Problem, problems
from rlcore_plugin_testing.algorithm import reward
from rlcore_plugin_testing.report import PLAIN

PROMPTS = 24
STEPS = 2


def write_data(folder: Path) -> None:
    """Write train.jsonl and test.jsonl; rows have prompt, answer, completion, label, chosen and rejected."""
    for split, name, most in (("train", "train", PROMPTS), ("eval", "test", 4)):
        rows = [_row(*numbered) for numbered in enumerate(problems(split)[:most])]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _row(number: int, problem: Problem) -> dict[str, Any]:
    right, wrong = str(problem.result), str(problem.result + 7)
    good = number % 2 == 0
    given = {"answer": right, "completion": right if good else wrong, "label": good}
    return {"prompt": problem.prompt, **given, "chosen": right, "rejected": wrong}


def overrides(data: Path, settings: Sequence[str]) -> list[str]:
    """Return the overrides of the suite's runs: small runs that record every sample, with `settings` on top.

    If the settings name a reward, they replace the suite's own.
    """
    own_reward = any(setting.startswith("reward") for setting in settings)
    return [
        *PLAIN,
        *("model=tiny", "data=file", f"data.path={data}", "data.batch_size=4", "data.prompt_len=64"),
        *([] if own_reward else [f"reward.path={Path(reward.__file__)}:score"]),
        *("rollout.response_len=6", "engine.lr=1e-4", "tracker=none", "trainer.eval_every=0"),
        *(f"trainer.total_steps={STEPS}", "trainer.checkpoint_every=1", "trainer.keep_checkpoints=0"),
        *("trainer.samples_per_step=1000", "reward.max_failures=1"),
        *settings,
    ]
