"""Episodes: the policy acts in an environment over several turns, exactly in tokens and reproducible from a seed.

An author of an environment imports from here `Observation` and `EnvironmentFailure`; docs/environments.md has the
contract.
"""

from rlcore.episodes.environment import EnvironmentFailure, Observation

__all__ = ["EnvironmentFailure", "Observation"]
