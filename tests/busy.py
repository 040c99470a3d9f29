"""`python tests/busy.py COMMAND ...`: run a command while an endless loop keeps each core busy.

A test that passes alone and fails here waits for the clock, not for an event. The loops end with the command, or with
this process. The exit status is the command's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

# It ends by itself when the process that started it is gone, also by SIGKILL.
LOOP = "import os\nwhile os.getppid() == {parent}:\n    sum(range(100_000))"


def main(command: Sequence[str]) -> int:
    """Run the command beside one loop for each core, and return its exit status."""
    if not command:
        print("usage: python tests/busy.py COMMAND ...", file=sys.stderr)
        return 2
    code = LOOP.format(parent=os.getpid())
    loops = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(os.cpu_count() or 1)]
    try:
        return subprocess.run(command).returncode
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
