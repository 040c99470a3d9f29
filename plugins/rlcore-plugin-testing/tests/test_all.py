"""Every algorithm in algorithms/ and plugins/ passes the checks of its own code, in one process.

About 5 s an algorithm on a quiet machine. The checks that start processes are in test_all_on_ray.py.
"""

import cloudpickle
import pytest

ON_RAY = ("kill_and_resume", "reaches_workers", "in_process_equals_ray", "one_worker_equals_two")
DOES_NOT_APPLY = {
    **dict.fromkeys(("dpo", "kto", "sft"), ("better_sample", "failed_rewards", "branches")),
    "reward_model": ("masked_tokens", "better_sample", "failed_rewards", "branches"),
    "on_policy_distill": ("failed_rewards",),
}
"""The checks that do not apply to an algorithm, in their order. All others pass."""


@pytest.mark.e2e
@pytest.mark.timeout(200)
def test_the_suite_in_one_process(algorithm_suite):
    checks = [check for check in algorithm_suite.checks if check not in ON_RAY]
    results = [algorithm_suite.result(check) for check in checks]
    print(*results, f"{algorithm_suite.name}: {sum(result.seconds for result in results):.0f} s", sep="\n")
    assert len(results) == 15
    others = [str(result) for result in results if result.outcome != "pass"]
    absent = DOES_NOT_APPLY.get(algorithm_suite.name, ())
    assert [line.split()[:2] for line in others] == [["n/a", check] for check in absent], others
    # A worker finds a loss by its module's name.
    losses = {item.loss for item in algorithm_suite.plain.record.items}
    assert {cloudpickle.loads(cloudpickle.dumps(loss)) for loss in losses} == losses


def test_all_are_there(every_algorithm):
    assert every_algorithm >= {
        *("grpo", "ppo", "online_dpo", "rejection_sampling"),
        *("rloo", "remax", "dapo", "safe_rlhf", "sft", "reward_model", "sppo", "dpo", "kto", "on_policy_distill"),
        *("gspo", "cispo", "sapo", "gmpo", "vespo", "dppo", "maxrl", "reinforce_pp", "pass_at_k", "gdpo"),
    }
