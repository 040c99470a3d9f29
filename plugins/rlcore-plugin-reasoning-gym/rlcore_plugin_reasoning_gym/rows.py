"""The rows of `data=reasoning_gym`.

Some generators iterate over sets of strings, so the same seed gives other entries in each process unless PYTHONHASHSEED
is fixed. `generate.py` therefore makes the rows in a process of its own where it is 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from rlcore import DataConfig, DataError
from rlcore_plugin_reasoning_gym.config import TasksConfig

GENERATE = "rlcore_plugin_reasoning_gym.generate"


def load(config: DataConfig, split: str, own: TasksConfig) -> list[dict[str, Any]]:
    """Return the rows of a split ("train" or "eval"): question, answer (None where many are right), and the entry.

    The column `reasoning_gym` has task, seed, index, level (-1 without a curriculum), options and metadata of the
    entry, and the form of the answer. Equal settings give equal rows in every process.
    Raises DataError for an unknown task or a parameter that its generator refuses.
    """
    given = json.dumps({**asdict(own), "split": split})
    done = subprocess.run(
        [sys.executable, "-m", GENERATE],
        input=given,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    if done.returncode != 0:
        raise DataError(f"reasoning-gym's generators ended with status {done.returncode}: {done.stderr[-2000:]}")
    reply = json.loads(done.stdout)
    if "error" in reply:
        raise DataError(f"data=reasoning_gym: {reply['error']}")
    return [
        {config.prompt_key: each["question"], config.answer_key: each["answer"], "reasoning_gym": each["entry"]}
        for each in reply["rows"]
    ]
