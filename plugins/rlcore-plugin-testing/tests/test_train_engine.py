"""The suite of train engines finds what it is for: each broken engine by the check of that property."""

import importlib.util
from pathlib import Path

import pytest
from rlcore_plugin_testing import conformance
from rlcore_plugin_testing.suites import find_suite, open_suite
from rlcore_plugin_testing.train_engine.checks import CHECKS

from rlcore.errors import PluginError

FILE = Path(__file__).parent / "fixtures" / "broken_train_engines.py"
spec = importlib.util.spec_from_file_location("broken_for_names", FILE)
fixtures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fixtures)

test_torch = conformance("engine=torch")


@pytest.mark.parametrize("name", fixtures.BROKEN)
def test_each_broken_engine_is_found_by_its_check(name, tmp_path):
    broken = fixtures.BROKEN[name]
    with open_suite(name, tmp_path, plugins=[str(FILE)], only=broken.check) as suite:
        result = suite.result(broken.check)
    assert result.outcome == "FAIL", result
    assert broken.says in result.text


def test_each_check_has_an_engine_that_breaks_it():
    assert {broken.check for broken in fixtures.BROKEN.values()} == set(CHECKS)


def test_a_check_that_needs_several_ranks_does_not_apply_to_an_engine_without_layouts(tmp_path):
    (tmp_path / "alone.py").write_text(
        "from rlcore import TrainEngineSpec, hookimpl\n"
        "from rlcore.engines.torch.config import TorchConfig\n"
        "from rlcore.engines.torch.engine import TorchEngine\n"
        "RLCORE_API = 1\n"
        "@hookimpl\n"
        "def rlcore_train_engines():\n"
        "    return TrainEngineSpec('alone', TorchEngine, TorchConfig)\n"
    )
    with open_suite("alone", tmp_path, plugins=[str(tmp_path / "alone.py")]) as suite:
        result = suite.result("ranks")
    assert (result.outcome, result.text) == ("n/a", "its capabilities have no layouts, so it runs in one process")


def test_a_name_that_plugins_of_two_kinds_have_needs_its_group(tmp_path):
    (tmp_path / "twin.py").write_text(
        "from rlcore import TrainEngineSpec, hookimpl\n"
        "RLCORE_API = 1\n"
        "@hookimpl\n"
        "def rlcore_train_engines():\n"
        "    return TrainEngineSpec('grpo', dict)\n"
    )
    twin = [str(tmp_path / "twin.py")]
    with pytest.raises(PluginError, match=r"write algo=grpo \(the algorithm\) or engine=grpo \(the train engine\)"):
        find_suite("grpo", twin)
    assert find_suite("engine=grpo", twin)[0].suite.noun == "train engine"
