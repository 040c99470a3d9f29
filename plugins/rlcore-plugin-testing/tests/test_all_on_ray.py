"""Algorithms pass the checks that start processes: on Ray, and killed and resumed.

These are checks of the core, so one algorithm for each kind of loop runs always, and the others in `make test-slow`.
About 30 s an algorithm on a quiet machine.
"""

import pytest


@pytest.mark.e2e
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_the_suite_with_processes(ray_cluster, algorithm_suite):
    checks = ("kill_and_resume", "reaches_workers", "in_process_equals_ray", "one_worker_equals_two")
    results = [algorithm_suite.result(check) for check in checks]
    print(*results, f"{algorithm_suite.name}: {sum(result.seconds for result in results):.0f} s", sep="\n")
    assert [str(result) for result in results if result.outcome != "pass"] == []
