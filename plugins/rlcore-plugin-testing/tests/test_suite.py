"""The suite finds what it is for: each broken algorithm by the check of that property; a sound one passes all."""

from pathlib import Path

import pytest
from rlcore_plugin_testing import conformance
from rlcore_plugin_testing.suites import open_suite

from rlcore.errors import PluginError

pytestmark = pytest.mark.e2e
FIXTURES = Path(__file__).parent / "fixtures"
ON_RAY = ("reaches_workers", "in_process_equals_ray", "one_worker_equals_two")

test_sound = pytest.mark.ray(conformance("sound", plugins=[str(FIXTURES / "sound.py")]))


def test_each_broken_property_is_found_by_its_check(broken, tmp_path):
    chosen, file = broken
    with open_suite("sound", tmp_path, plugins=[file]) as suite:
        result = suite.result(chosen.check)
    assert result.outcome == "FAIL", result
    assert chosen.says in result.text


def test_a_mask_that_an_advantage_leaves_out_is_found(tmp_path):
    """GAE that takes masked tokens for actions: the losses that follow are sound, so only the map shows it."""
    text = (Path(__file__).parents[3] / "algorithms" / "rlcore_ppo.py").read_text()
    for old, new in (
        ("gae(rewards, values, mask,", "gae(rewards, values, mask * 0 + 1,"),
        ('Spec("ppo"', 'Spec("leaky"'),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "leaky.py").write_text(text)
    with open_suite("leaky", tmp_path, plugins=[str(tmp_path / "leaky.py")]) as suite:
        result = suite.result("masked_tokens")
    assert result.outcome == "FAIL", result
    assert (
        "map of estimate_advantages: ppo_advantages changes with values of tokens with response_mask 0" in result.text
    )


def test_what_does_not_apply_follows_from_what_the_algorithm_does(tmp_path):
    """A sampler without training or scores: what is left is its config, its steps, its metrics, its repetition."""
    with open_suite("sampler", tmp_path, plugins=[str(FIXTURES / "sampler.py")]) as suite:
        results = {result.check: result for result in map(suite.result, _in_process())}
    applies = {"config", "steps", "metrics", "same_seed", "branches", "resume", "kill_and_resume"}
    assert {name for name, result in results.items() if result.outcome == "pass"} == applies
    assert {name for name, result in results.items() if result.outcome == "n/a"} == set(results) - applies
    assert results["micro_batch_split"].text == "no policy or critic or reward model trains"
    assert results["better_sample"].text == "no policy trains"
    assert results["zero_learning_rate"].text == "no role trains"
    assert results["non_finite"].text == "it scores nothing and updates nothing"


def _in_process() -> list[str]:
    from rlcore_plugin_testing.algorithm.checks import CHECKS

    return [name for name in CHECKS if name not in ON_RAY]


def test_unknown_names(tmp_path):
    with pytest.raises(PluginError, match=r"is called 'grop'\. Did you mean 'grpo'.*Installed: algorithm: grpo,"):
        open_suite("grop", tmp_path)
    with pytest.raises(PluginError, match=r"no suite tests data=gsm8k\..* Groups: algo"):
        open_suite("data=gsm8k", tmp_path)
    with (
        open_suite("algo=grpo", tmp_path) as suite,
        pytest.raises(ValueError, match=r"unknown check 'step'\. Did you mean"),
    ):
        suite.result("step")
