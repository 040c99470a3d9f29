"""The built-in rewards, as a plugin."""

from __future__ import annotations

from rlcore import RewardSpec, hookimpl
from rlcore.rewards.arithmetic import arithmetic, arithmetic_answer
from rlcore.rewards.code import code
from rlcore.rewards.environment import environment
from rlcore.rewards.gsm8k import gsm8k, gsm8k_answer, gsm8k_flexible, gsm8k_flexible_answer
from rlcore.rewards.math import math, math_answer
from rlcore.sandbox import log_isolation

RLCORE_API = 1


@hookimpl
def rlcore_rewards() -> list[RewardSpec]:
    """Return the rewards for arithmetic, GSM8K (strict and flexible), mathematics, programs and episodes."""
    return [
        RewardSpec("arithmetic", arithmetic, needs_answer=True, extract=arithmetic_answer),
        RewardSpec("environment", environment),
        RewardSpec("gsm8k", gsm8k, needs_answer=True, extract=gsm8k_answer),
        RewardSpec("gsm8k_flexible", gsm8k_flexible, needs_answer=True, extract=gsm8k_flexible_answer),
        RewardSpec("math", math, imports=("math_verify",), needs_answer=True, extract=math_answer),
        RewardSpec("code", code, on_start=log_isolation, needs_answer=True),
    ]
