"""make test-times, from a report that pytest writes. It costs 2 s."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SLOW = """
import time, pytest

@pytest.fixture
def slow():
    time.sleep(0.2)
    yield
    time.sleep(0.2)

class TestSlow:
    def test_sleeps(self, slow):
        time.sleep(0.2)
"""
QUICK = "def test_one():\n    pass\n\ndef test_two():\n    pass\n"
TESTS = {
    "tests/ops/test_slow.py": SLOW,
    "tests/ops/test_quick.py": QUICK,
    "plugins/rlcore-plugin-mine/tests/test_quick.py": QUICK,
}


def times(*reports: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tests" / "times.py", *reports], capture_output=True, text=True, check=False
    )


def test_the_slowest_files_and_the_sum_of_each_room(tmp_path: Path) -> None:
    """Set-up and tear-down count, also where a class holds the test."""
    for name, text in TESTS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "--junitxml", "build/report.xml"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL)
    done = times(tmp_path / "build" / "report.xml")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ *(\d+\.\d) s +(\d+)  (\S+)$", done.stdout, re.MULTILINE)
    assert re.search(r"report.xml: 5 tests, begun at \d{4}-", done.stdout)
    files, rooms, (total,) = rows[:3], rows[3:5], rows[5:]
    assert {name: tests for _, tests, name in files} == {name: str(TESTS[name].count("def test")) for name in TESTS}
    assert 0.6 <= float(files[0][0]) < 10
    assert files[0][2] == "tests/ops/test_slow.py"
    assert [(tests, name) for _, tests, name in rooms] == [("3", "tests/ops"), ("2", "rlcore-plugin-mine")]
    assert total[1:] == ("5", "all")


def test_without_a_report_it_names_the_command() -> None:
    done = times()
    assert done.returncode == 1
    assert "`make test` writes one" in done.stderr
