"""`python -m benchmarks.check NAME...`: run benchmarks anew and say what has fallen behind the stored results.

What is compared are the bars' values, which are ratios to the peer where there is one, so that a slower machine alone
is no regression. Where a benchmark has no peer its values are the machine's own, and another machine may differ.

`python -m benchmarks.check --stored NAME...` runs nothing: it names the stored results whose bars are not those of
their program, or that are older than the code they measure. Without names it looks at all results, B=gpu's among them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import stored
from benchmarks.__main__ import BENCHMARKS, DECLARED, ON_CPU
from benchmarks.report import RESULTS

MOST = 0.15
"""By so much a value may be worse than the stored one."""


def worsened(before: Mapping, after: Mapping) -> list[str]:
    """Return a line for each bar whose value is worse than the stored one by more than `MOST` of that, or is gone."""
    lines = []
    now = {bar["name"]: bar for bar in after["bars"]}
    for bar in before["bars"]:
        name, old = bar["name"], bar["value"]
        if name not in now:
            lines.append(f"{before['name']}: {name}: was {old:.4g} and is measured no more")
            continue
        new = now[name]["value"]
        fall = (old - new if bar["at_least"] else new - old) / abs(old) if old else 0.0
        if fall > MOST and not _is_far_within(bar, new):
            lines.append(f"{before['name']}: {name}: was {old:.4g}, is {new:.4g}, {fall:.0%} worse")
    return lines


def _is_far_within(bar: Mapping, value: float) -> bool:
    """Whether a bar for something small is kept by a factor of ten: there a share of next to nothing is noise."""
    return not bar["at_least"] and value <= bar["bound"] / 10


def compare(name: str) -> list[str]:
    """Run a benchmark, without touching the stored results, and return what is worse."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return [f"{name}: there are no stored results; `make bench B={name}` writes them"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks", name]
        subprocess.run(command, env={**os.environ, "BENCH_RESULTS": folder})  # 1 where a bar is missed; that is no news
        fresh = Path(folder, file.name)
        if not fresh.exists():
            return [f"{name}: the benchmark failed"]
        return worsened(json.loads(file.read_text()), json.loads(fresh.read_text()))


def main(argv: Sequence[str]) -> int:
    """Check the named benchmarks, or all; the exit status is 1 when something is worse, or named by `--stored`."""
    asked = [word for word in argv if word != "--stored"]
    every, only_stored = asked in ([], ["all"]), "--stored" in argv
    names = asked if not every else list(BENCHMARKS) if only_stored else ON_CPU
    for name in names:
        if name not in BENCHMARKS:
            print(f"no benchmark {name!r}; there are: all, {', '.join(BENCHMARKS)}", file=sys.stderr)
            return 2
    if only_stored:
        lines = stored.check([DECLARED[name] for name in names], RESULTS, every_file=every)
        print("\n".join(lines) or f"stored with the program's bars and not older than the code: {', '.join(names)}")
        return 1 if lines else 0
    lines = [line for name in names for line in compare(name)]
    print("\n".join(lines) or f"nothing is more than {MOST:.0%} worse than stored: {', '.join(names)}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
