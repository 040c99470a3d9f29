"""The suite of rollout engines finds what it is for: each broken engine by the check of that property."""

import importlib.util
from pathlib import Path

import pytest
from rlcore_plugin_testing import conformance
from rlcore_plugin_testing.rollout_engine.checks import CHECKS
from rlcore_plugin_testing.suites import open_suite

FILE = Path(__file__).parent / "fixtures" / "broken_rollout_engines.py"
spec = importlib.util.spec_from_file_location("broken_for_names", FILE)
fixtures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fixtures)

test_hf = pytest.mark.e2e(conformance("rollout=hf"))


@pytest.mark.parametrize("name", fixtures.BROKEN)
def test_each_broken_engine_is_found_by_its_check(name, tmp_path):
    broken = fixtures.BROKEN[name]
    with open_suite(f"rollout={name}", tmp_path, plugins=[str(FILE)], only=broken.check) as suite:
        result = suite.result(broken.check)
    assert result.outcome == "FAIL", result
    assert broken.says in result.text


def test_each_check_has_an_engine_that_breaks_it():
    assert {broken.check for broken in fixtures.BROKEN.values()} == set(CHECKS)


def test_an_engine_that_decodes_in_slots_passes_the_checks_on_its_rows(tmp_path):
    """As `rollout=hf` does on a GPU."""
    with open_suite("rollout=inslots", tmp_path, plugins=[str(FILE)]) as suite:
        for check in ("continued_rows", "kept_rows", "so_far", "abort"):
            assert suite.result(check).outcome == "pass", suite.result(check)
