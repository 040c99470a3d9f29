""".ci/run on a small project: red or not, what runs again, and what is printed last.

They cost 6 s: ten small sessions of pytest.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MAKEFILE = """
PYTEST = -m pytest
check:
\t{check}
test-together:
\t{python} $(PYTEST) -q -p xdist --numprocesses 2 test_together.py
test-alone:
\t{alone}
test-vllm:
\t{vllm}
test-verifiers:
\t{verifiers}
"""
GREEN = dict.fromkeys(("check", "alone", "vllm", "verifiers"), "true")

PASSES_ALONE = """
from pathlib import Path

def test_passes_only_alone():
    first = not Path("was_here").exists()
    Path("was_here").touch()
    assert not first

def test_passes():
    with open("passed", "a") as file:
        file.write("once ")
"""

FAILS = """
def test_fails():
    assert 1 == 2
"""

CRASHES = """
import os
from pathlib import Path

def test_crashes_once():
    if not Path("crashed").exists():
        Path("crashed").touch()
        os._exit(1)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with .ci/run and tests/again.py."""
    for name in (".ci/run", "tests/again.py"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run(project: Path, together: str, **commands: str) -> tuple[int, str, dict[str, str]]:
    """Run .ci/run with these tests and commands of parts; return its exit status, output, and each part's result."""
    (project / "test_together.py").write_text(together)
    (project / "Makefile").write_text(MAKEFILE.format(python=sys.executable, **{**GREEN, **commands}))
    done = started([project / ".ci" / "run"], "/")
    return done.returncode, done.stdout, dict(re.findall(r"^ +\d+ s  (\S+) +(\S+)$", done.stdout, re.MULTILINE))


def started(command: Sequence[str | Path], folder: Path | str) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MAKE"))}
    environment = {**outside, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take a second to import
    return subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def test_what_passes_alone_is_printed_last(project: Path) -> None:
    status, output, parts = run(project, PASSES_ALONE + CRASHES)
    assert status == 0, output
    assert list(parts.items()) == [
        (name, "passed") for name in ("check", "test-together", "test-alone", "test-vllm", "test-verifiers")
    ]
    assert "2 failed; they run again, by themselves" in output
    assert (project / "passed").read_text() == "once "
    assert output.endswith(
        "\npassed only alone:\ntest_together.py::test_crashes_once\ntest_together.py::test_passes_only_alone\n"
    )


def test_what_fails_again_is_red_and_so_is_what_is_no_failed_test(project: Path) -> None:
    """Only failed tests run again, and the parts after a red one run."""
    (project / "test_broken.py").write_text("import no_such_module\n")
    pytest = f"{sys.executable} $(PYTEST) -q"
    status, output, parts = run(
        project,
        PASSES_ALONE + FAILS,
        alone=f"{pytest} --no-such-option",
        vllm=f"{pytest} test_together.py -k no_such_test",
        verifiers=f"{pytest} test_broken.py",
    )
    assert status == 1
    assert parts == {"check": "passed"} | dict.fromkeys(
        ("test-together", "test-alone", "test-vllm", "test-verifiers"), "FAILED"
    )
    assert output.count("run again") == 1
    for message in ("unrecognized arguments: --no-such-option", "3 deselected", "No module named 'no_such_module'"):
        assert message in output
    assert output.endswith(
        "\nfailed:\ntest_together.py::test_fails\n\npassed only alone:\ntest_together.py::test_passes_only_alone\n"
    )


def test_a_test_that_is_skipped_the_second_time_is_red(project: Path) -> None:
    skipped = PASSES_ALONE.replace("assert not first", "import pytest\n    assert not first\n    pytest.skip()")
    (project / "test_skips.py").write_text(skipped)
    done = started([sys.executable, "tests/again.py", "-q", "test_skips.py"], project)
    assert done.returncode == 1
    assert "1 of them were skipped the second time, which is no pass" in done.stdout
    assert (project / "build/ci/failed.txt").read_text() == "test_skips.py::test_passes_only_alone\n"


def test_red_lint_ends_at_once(project: Path) -> None:
    status, _, parts = run(project, FAILS, check="false")
    assert status == 1
    assert parts == {"check": "FAILED"}
