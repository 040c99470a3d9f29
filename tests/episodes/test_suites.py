"""Every algorithm's conformance suite passes with an environment."""

from pathlib import Path

import pytest
from rlcore_plugin_testing import conformance

WORLD = f"env.path={Path(__file__).with_name('worlds.py')}:Rounds"
EPISODES = ("env=file", WORLD, "rollout.response_len=60", "trainer.deterministic=true")
COST = ("reward.functions={environment: 1, gsm8k_flexible: 0}", "algo.cost_function=gsm8k_flexible")

pytestmark = [pytest.mark.e2e, pytest.mark.ray]

test_grpo = conformance("grpo", *EPISODES)
test_rloo = pytest.mark.slow(conformance("rloo", *EPISODES))
test_remax = pytest.mark.slow(conformance("remax", *EPISODES))
test_dapo = pytest.mark.slow(conformance("dapo", *EPISODES))
test_ppo = pytest.mark.slow(conformance("ppo", *EPISODES))
test_online_dpo = pytest.mark.slow(conformance("online_dpo", *EPISODES))
test_rejection_sampling = pytest.mark.slow(conformance("rejection_sampling", *EPISODES))
test_sppo = pytest.mark.slow(conformance("sppo", *EPISODES))
test_safe_rlhf = pytest.mark.slow(conformance("safe_rlhf", *EPISODES, *COST))
