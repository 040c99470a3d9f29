"""The keys `env.*`: the environment of a run's episodes, and the limits of an episode."""

# ruff: noqa: RUF009  (`option` copies a mutable default for each object)

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlcore.config.schema import option


@dataclass(frozen=True)
class EnvConfig:
    """The environment that the policy acts in, and the limits of an episode."""

    name: str = option("", "environment: one of the installed ones; empty: one response to each prompt")
    path: str | None = option(None, "FILE.py:NAME of the class, function or list of functions, for env=file")
    command: str | None = option(None, "command of the agent, one process for each episode, for env=agent")
    mcp: str | None = option(None, "command of an MCP server whose tools the policy gets, for env=mcp")
    concurrency: int = option(256, "most episodes at a time in each sampling process", min=1, incidental=True)
    timeout: float = option(30.0, "seconds that one call of an environment may take", min=0.01, incidental=True)
    retries: int = option(1, "times that a failed episode is played again, with the same seed", min=0)
    max_failures: float = option(
        0.25, "share of a batch's episodes; if more fail, the run stops with a checkpoint", min=0.0, max=1.0
    )
    max_turns: int = option(8, "most turns of the policy in an episode", min=1)
    turn_len: int = option(0, "most tokens of one turn of the policy; 0: only rollout.response_len limits it", min=0)
    observation_len: int = option(512, "most tokens of one message of the environment; longer ones are cut", min=1)
    observation_cut: Literal["start", "middle", "end"] = option("middle", "part of a long message that is left out")
    template: Literal["exact", "incremental"] = option(
        "exact",
        "exact: the chat template must render a longer conversation as a continuation of the shorter one; incremental: "
        "earlier turns stay as they were sampled, whatever the template would do to them",
    )
    tools: Literal["auto", "off"] = option(
        "auto", "describe the tools in the prompt, by the chat template or in a system message; off: not at all"
    )
    tool_format: str = option("auto", "how the model writes tool calls: auto, hermes, llama, json or an installed one")
    memory_mb: int = option(2048, "address space of an environment's process, in MiB; 0 for no limit", min=0)
    keep_env: list[str] = option([], "environment variables that environments and agents get; others are left out")
