"""Episodes: the policy acts in an environment over several turns, exactly in tokens and reproducible from a seed.

An author of an environment imports from here `Observation`, `EnvironmentFailure` and `ToolError`; docs/environments.md
has the contract.
"""

from rlcore.episodes.environment import EnvironmentFailure, Observation, ToolError

__all__ = ["EnvironmentFailure", "Observation", "ToolError"]
