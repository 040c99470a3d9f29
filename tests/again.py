"""`python tests/again.py ARGUMENT ...`: `python -m pytest ARGUMENT ...`, and failed tests a second time.

.ci/run puts it in the place of `-m pytest`. The second time they run without the others, in one process. The exit
status is pytest's, and 0 if all have passed the second time. The names of those are added to
build/ci/passed_only_alone.txt, and those of the others to build/ci/failed.txt. Only failed tests run again: not a
session that was interrupted or used wrongly, nor one with a file that cannot be imported, nor one that has no test.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

FOLDER = Path("build/ci")
TESTS_FAILED = 1  # pytest's exit status


def main(arguments: Sequence[str]) -> int:
    """Run pytest, and again what failed; return the exit status."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rlcore-again-") as folder:
        cache, report = Path(folder) / "cache", Path(folder) / "again.xml"
        command = [sys.executable, "-m", "pytest", *arguments, "-o", f"cache_dir={cache}"]
        status = subprocess.run(command).returncode
        first = failed(cache)
        if status != TESTS_FAILED or not first:
            return status
        print(f"\n{len(first)} failed; they run again, by themselves\n", flush=True)
        command += ["--last-failed", "--last-failed-no-failures", "none", "--junitxml", str(report)]
        if any(argument.startswith("--numprocesses") for argument in arguments):
            command += ["--numprocesses", "0"]
        status = subprocess.run(command).returncode
        second = failed(cache) if status in (0, TESTS_FAILED) else first
        if status == 0 and skipped(report):
            print(f"{skipped(report)} of them were skipped the second time, which is no pass", flush=True)
            status, second = TESTS_FAILED, first
    note("passed_only_alone.txt", [name for name in first if name not in second])
    note("failed.txt", second)
    return status


def failed(cache: Path) -> list[str]:
    """Return the names of the tests that pytest's cache calls failed."""
    file = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(file.read_text())) if file.exists() else []


def skipped(report: Path) -> int:
    """Return how many tests of a report were skipped."""
    return sum(int(suite.get("skipped", 0)) for suite in ElementTree.parse(report).iter("testsuite"))


def note(name: str, tests: Sequence[str]) -> None:
    """Add names of tests to a file of FOLDER."""
    with (FOLDER / name).open("a") as file:
        file.writelines(f"{test}\n" for test in tests)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
