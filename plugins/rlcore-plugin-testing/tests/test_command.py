"""`rlcore plugins test NAME`, and what the pytest plugin costs those who do not use it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rlcore_plugin_testing.algorithm.checks import CHECKS

from rlcore.cli import main

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.slow  # docs/write_a_plugin.md runs the command on an algorithm that passes
@pytest.mark.e2e
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_command_prints_a_report_card_and_fails_with_a_check(ray_cluster, broken_map, capsys):
    """A map function that looks at all rows that are in one place."""
    assert main(["plugins", "test", "sound", "-p", broken_map, "--set", "algo.pair_coef=0.02"]) == 1
    lines = ["from rlcore_plugin_testing import conformance", 'test_mine = conformance("grpo", "algo.group_size=2")']
    (tmp_path / "test_mine.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "test_mine.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if "::" in line] == [
        f"test_mine.py::test_mine[{check}]" for check in CHECKS
    ]
