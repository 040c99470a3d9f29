"""`python tests/times.py REPORT.xml ...`, or `make test-times`: where the seconds of a test run went.

The reports are pytest's own. The seconds of a test are those of its set-up, call and tear-down. With several processes
at work, their sum is larger than the time that a person waited. A fixture that tests share is counted in the first.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

FILES = 40


def main(reports: Sequence[str]) -> int:
    """Print the slowest files and the sum of each room."""
    if not reports:
        print("No test run has left a report in build/tests. `make test` writes one.", file=sys.stderr)
        return 1
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for report in reports:
        suite = next(ElementTree.parse(report).iter("testsuite"))
        print(f"{report}: {suite.get('tests')} tests, begun at {suite.get('timestamp')}")
        for case in suite.iter("testcase"):
            file = file_of(case.get("classname", ""))
            seconds[file] += float(case.get("time", 0))
            tests[file] += 1
    show(f"the {FILES} slowest files", seconds.most_common(FILES), tests)
    rooms: Counter[str] = Counter()
    tests_of_rooms: Counter[str] = Counter()
    for file, number in seconds.items():
        rooms[room_of(file)] += number
        tests_of_rooms[room_of(file)] += tests[file]
    show("rooms", rooms.most_common(), tests_of_rooms)
    print(f"\n{seconds.total():9.1f} s {tests.total():6}  all")
    return 0


def show(title: str, rows: Sequence[tuple[str, float]], tests: Counter[str]) -> None:
    """Print a table of seconds and numbers of tests."""
    print(f"\n{'seconds':>11}  tests  {title}")
    for name, number in rows:
        print(f"{number:9.1f} s {tests[name]:6}  {name}")


def file_of(classname: str) -> str:
    """Return the file of a report's classname, such as tests.ops.test_gae or tests.ops.test_gae.TestClass."""
    words = classname.split(".")
    for place, word in enumerate(words):
        if word.startswith("test_"):
            return "/".join(words[: place + 1]) + ".py"
    return "/".join(words)


def room_of(file: str) -> str:
    """Return tests/ROOM, or the name of the plugin."""
    top, *rest = Path(file).parts or ("",)
    if top == "plugins" and rest:
        return rest[0]
    return f"{top}/{rest[0]}" if len(rest) > 1 else top


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
