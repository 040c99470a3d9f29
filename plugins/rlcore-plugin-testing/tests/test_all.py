"""Every algorithm in algorithms/ and plugins/ passes the checks of its own code, in one process.

About 5 s an algorithm on a quiet machine. The checks that start processes are in test_all_on_ray.py.
"""

import cloudpickle
import pytest

ON_RAY = ("kill_and_resume", "reaches_workers", "in_process_equals_ray", "one_worker_equals_two")


@pytest.mark.e2e
@pytest.mark.timeout(200)
def test_the_suite_in_one_process(algorithm_suite):
    checks = [check for check in algorithm_suite.checks if check not in ON_RAY]
    results = [algorithm_suite.result(check) for check in checks]
    print(*results, f"{algorithm_suite.name}: {sum(result.seconds for result in results):.0f} s", sep="\n")
    assert not [str(result) for result in results if result.outcome == "FAIL"]
    passed = {result.check for result in results if result.outcome == "pass"}
    # Whatever else does not apply to an algorithm, these do.
    always = {"config", "steps", "metrics", "same_seed", "micro_batch_split", "padding", "row_order", "rows_together"}
    assert passed >= {*always, "zero_learning_rate", "non_finite", "resume"}
    # A worker finds a loss by its module's name.
    losses = {item.loss for item in algorithm_suite.plain.record.items}
    assert {cloudpickle.loads(cloudpickle.dumps(loss)) for loss in losses} == losses


def test_all_are_there(every_algorithm):
    assert every_algorithm >= {
        *("grpo", "ppo", "online_dpo", "rejection_sampling"),
        *("rloo", "remax", "dapo", "safe_rlhf", "sft", "reward_model", "sppo", "dpo", "kto", "on_policy_distill"),
        *("gspo", "cispo", "sapo", "gmpo", "vespo", "dppo", "maxrl", "reinforce_pp", "pass_at_k", "gdpo"),
    }
