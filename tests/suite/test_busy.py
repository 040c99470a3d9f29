"""tests/busy.py keeps the cores busy as long as its command runs. About 1 s."""

import os
import subprocess
import sys
from pathlib import Path

BUSY = Path(__file__).parents[1] / "busy.py"
SEEN = """
import os, sys, time
from pathlib import Path

def loops():
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getppid() and int(stat.parent.name) != os.getpid():
            found.append((int(stat.parent.name), int(fields[11])))
    return found

until = time.monotonic() + 60
while not (len(loops()) == os.cpu_count() and all(ticks > 0 for _, ticks in loops())):
    assert time.monotonic() < until, loops()
    time.sleep(0.05)
print(*[pid for pid, _ in loops()])
sys.exit(7)
"""


def test_the_cores_are_busy_until_the_command_ends():
    done = subprocess.run([sys.executable, BUSY, sys.executable, "-c", SEEN], capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    loops = [int(pid) for pid in done.stdout.split()]
    assert len(loops) == os.cpu_count()
    assert not [pid for pid in loops if Path(f"/proc/{pid}").exists()]
