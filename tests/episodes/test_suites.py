"""Every algorithm's conformance suite passes with an environment."""

from importlib.resources import files
from pathlib import Path

import pytest
from rlcore_plugin_testing import conformance

WORLD = f"env.path={Path(__file__).with_name('worlds.py')}:Rounds"
EPISODES = ("env=file", WORLD, "rollout.response_len=60", "trainer.deterministic=true")
TEACHER = (f"algo.teacher={files('rlcore.assets') / 'tiny'}", "algo.task_coef=1")
COST = ("reward.functions={environment: 1, gsm8k_flexible: 0}", "algo.cost_function=gsm8k_flexible")

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(300)]

test_grpo = conformance("grpo", *EPISODES)
test_rloo = pytest.mark.slow(conformance("rloo", *EPISODES))
test_remax = pytest.mark.slow(conformance("remax", *EPISODES))
test_dapo = pytest.mark.slow(conformance("dapo", *EPISODES))
test_ppo = pytest.mark.slow(conformance("ppo", *EPISODES))
test_online_dpo = pytest.mark.slow(conformance("online_dpo", *EPISODES))
test_rejection_sampling = pytest.mark.slow(conformance("rejection_sampling", *EPISODES))
test_sppo = pytest.mark.slow(conformance("sppo", *EPISODES))
test_safe_rlhf = pytest.mark.slow(conformance("safe_rlhf", *EPISODES, *COST))
test_gspo = pytest.mark.slow(conformance("gspo", *EPISODES))
test_cispo = pytest.mark.slow(conformance("cispo", *EPISODES))
test_sapo = pytest.mark.slow(conformance("sapo", *EPISODES))
test_gmpo = pytest.mark.slow(conformance("gmpo", *EPISODES))
test_vespo = pytest.mark.slow(conformance("vespo", *EPISODES))
test_dppo = pytest.mark.slow(conformance("dppo", *EPISODES))
test_maxrl = pytest.mark.slow(conformance("maxrl", *EPISODES))
test_reinforce_pp = pytest.mark.slow(conformance("reinforce_pp", *EPISODES))
test_pass_at_k = pytest.mark.slow(conformance("pass_at_k", *EPISODES))
test_gdpo = pytest.mark.slow(conformance("gdpo", *EPISODES))
test_on_policy_distill = pytest.mark.slow(conformance("on_policy_distill", *EPISODES, *TEACHER))
