"""A process that plays a batch, and in its middle kills the environments' processes and itself with SIGKILL.

`python -m rlcore_plugin_testing.environment.killed JOB.json`: the job has the suite's name, folder, settings and
plugins, the script's turns as `texts` ("UID/SAMPLE TURN": text), `after`, the number of the policy's turns after which
it ends, and `processes`, the file that it writes before: the environments' processes that then run, a list of
[pid, parent, start, command].
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from rlcore_plugin_testing.environment.processes import Process, descendants, kill_environments
from rlcore_plugin_testing.environment.suite import EnvironmentSuite, Played, data_rows
from rlcore_plugin_testing.report import CheckFailed


def play_until_killed(suite: EnvironmentSuite, plain: Played, after: int, seconds: float = 300.0) -> list[Process]:
    """Play the scripted batch in a process that is killed after some turns; return its environments' processes."""
    folder = suite.folder / "killed"
    folder.mkdir()
    job, written, log = folder / "job.json", folder / "processes.json", folder / "log"
    job.write_text(
        json.dumps(
            {
                "name": suite.name,
                "folder": str(suite.folder),
                "settings": suite.settings,
                "plugins": suite.plugins,
                "texts": _texts(suite, plain),
                "after": after,
                "processes": str(written),
            }
        )
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "rlcore_plugin_testing.environment.killed", str(job)],
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": path},
            timeout=seconds,
            check=False,
        )
    if done.returncode != -signal.SIGKILL:
        raise CheckFailed(f"the process to be killed ended with {done.returncode}: {log.read_text()[-500:]}")
    return [Process(*values) for values in json.loads(written.read_text())]


def _texts(suite: EnvironmentSuite, plain: Played) -> dict[str, str]:
    """Return the turns of the scripted policy by episode and number."""
    rows, count = data_rows(plain.batch), suite.setup.env.max_turns
    return {f"{_name(row)} {turn}": suite.writer.text(row, turn) for row in rows for turn in range(count)}


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['uid']}/{row['sample_index']}"


def main() -> None:
    """Play until the end of this process."""
    job = json.loads(Path(sys.argv[1]).read_text())

    def script(row: Mapping[str, Any], turn: int) -> str:
        text: str = job["texts"][f"{_name(row)} {turn}"]
        return text

    def end(turns: int) -> None:
        if turns >= job["after"]:
            Path(job["processes"]).write_text(json.dumps([astuple(each) for each in descendants()]))
            kill_environments()
            os.kill(os.getpid(), signal.SIGKILL)

    folder = Path(job["folder"])
    with (
        EnvironmentSuite(
            job["name"], folder, {}, settings=job["settings"], plugins=job["plugins"], script=script
        ) as suite,
        suite.source() as play,
    ):
        play(interrupt=end)


if __name__ == "__main__":
    main()
