"""A judge: a language model behind an OpenAI-compatible HTTP endpoint says which of two responses is better.

`run.group("judge")` is a `Judge`. This module is the plugin; it imports the others when a run has a judge.
"""

from __future__ import annotations

import os
from pathlib import Path

from rlcore import Config, ConfigSpec, WorkerSpec, hookimpl
from rlcore_plugin_judge.config import JudgeConfig, check

RLCORE_API = 1


@hookimpl
def rlcore_configs() -> ConfigSpec[JudgeConfig]:
    """Register the keys `judge.*`."""
    return ConfigSpec("judge", JudgeConfig, check)


@hookimpl
def rlcore_workers(config: Config) -> list[WorkerSpec]:
    """Give the worker `judge` where `judge.url` names an endpoint."""
    judge = config.section(JudgeConfig)
    if judge.url is None:
        return []
    from rlcore_plugin_judge.handle import Judge
    from rlcore_plugin_judge.worker import TEMPLATE, JudgeWorker

    template = TEMPLATE if judge.template is None else Path(judge.template).read_text(encoding="utf-8")
    key = None if judge.api_key_env is None else os.environ[judge.api_key_env]
    return [WorkerSpec("judge", JudgeWorker, (judge, template, key), Judge)]
