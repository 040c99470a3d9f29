"""The checks on faults: failures that must not become rewards, killed batches, and leftovers."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import Any

from rlcore_plugin_testing.environment import killed
from rlcore_plugin_testing.environment.processes import descendants, kill_environments, left_running
from rlcore_plugin_testing.environment.suite import EnvironmentSuite, expect_same
from rlcore_plugin_testing.report import CheckFailed, NotApplicable

PATIENCE = 10.0
"""Seconds until processes must have ended."""
APART_SECONDS = 300.0
"""Seconds for all questions about a class in a process of its own."""
SHOWN = 3
"""Episodes whose environments are looked at in a process of their own."""


class Interrupted(Exception):
    """Breaks off a batch."""


def failures(suite: EnvironmentSuite) -> str:
    """A failed episode is played again with the same seed, or left out with its cause; it never gets a score."""
    plain, dead = suite.plain(), 0
    others = set(descendants())

    def kill_once(turns: int) -> None:
        nonlocal dead
        if turns >= len(plain.turns) // 3 and not dead:
            dead = kill_environments(others)

    def kill_always(turns: int) -> None:
        kill_environments(others)

    with suite.source(retries=1) as play:
        again = play(interrupt=kill_once)
    if not dead:
        raise NotApplicable("it has no processes that the suite could kill")
    expect_same(again, plain, "played again after its process was killed")
    with suite.source(retries=0) as play:
        failed = play(interrupt=kill_always)
    count = 0
    for (name, _), row in failed.rows.items():
        error, score, reason = row["episode_error"], row["episode_score"], row["stop_reason"]
        if error is None:
            continue
        count += 1
        if score is not None or reason != "failed" or row["responses"] or not error["cause"]:
            raise CheckFailed(
                f"episode {name} failed and has the score {score}, the stop reason {reason!r} and "
                f"{len(row['responses'])} tokens; it should have none, 'failed' and none"
            )
    if not count:
        raise CheckFailed("the processes of all episodes were killed, and none is told as failed")
    return f"{dead} processes killed, their episodes played again; {count} left out; {_faults(suite)}"


def _faults(suite: EnvironmentSuite) -> str:
    """Raise an exception in each line of the class, and expect a failure in each case."""
    if suite.setup.environment is None:
        return "it has no class to put faults into"
    found = _apart(suite, "faults")
    if found["hidden"]:
        raise CheckFailed(
            f"{len(found['hidden'])} of {found['faults'] + len(found['hidden'])} exceptions within the class gave an "
            f"episode in place of a failure, as in {found['hidden'][0]}. Catch only errors that the model's text causes"
        )
    return f"{found['faults']} exceptions within the class fail the episode"


def kill_and_resume(suite: EnvironmentSuite) -> str:
    """A batch that was broken off, or whose process was killed, gives the same rows when it is played again."""
    plain = suite.plain()
    half = max(1, len(plain.turns) // 2)

    def interrupt(turns: int) -> None:
        if turns >= half:
            raise Interrupted

    with suite.source() as play:
        try:
            play(interrupt=interrupt)
        except Interrupted:
            pass
        else:
            raise CheckFailed("a batch went on after an error of the engine")
        expect_same(play(), plain, "played again after the batch was broken off")
    processes = killed.play_until_killed(suite, plain, half)
    if left := left_running(processes, PATIENCE):
        raise CheckFailed(f"{len(left)} processes outlive a killed run by {PATIENCE:g} s: {left[0].command}")
    expect_same(suite.play(), plain, "played again after its run was killed")
    return f"killed after {half} of {len(plain.turns)} turns; {len(processes)} processes ended with it"


def nothing_left(suite: EnvironmentSuite) -> str:
    """Closed, an environment leaves no process, thread or temporary file; nor does an episode in its process."""
    suite.plain()
    shutil.rmtree(suite.temporary)
    suite.temporary.mkdir()
    before, threads = set(descendants()), set(threading.enumerate())
    suite.play()
    new = [each for each in descendants() if each not in before]
    if left := left_running(new, PATIENCE):
        raise CheckFailed(f"closed, it leaves {len(left)} processes, as {left[0].command!r}")
    if alive := [each.name for each in threading.enumerate() if each not in threads]:
        raise CheckFailed(f"closed, it leaves {len(alive)} threads in rlcore's process, as {alive[0]}")
    if files := sorted(os.listdir(suite.temporary)):
        raise CheckFailed(f"closed, it leaves {len(files)} temporary files, as {files[0]}")
    if suite.setup.environment is None:
        return "no processes, threads or temporary files"
    if found := _apart(suite, "leftovers"):
        raise CheckFailed(f"after close() of an episode there is still {found[0]}")
    return f"no processes, threads or files after {len(suite.batch)} episodes"


def _apart(suite: EnvironmentSuite, question: str) -> Any:
    """Ask `apart` about the class, with the calls of some episodes."""
    environment = suite.setup.environment
    assert environment is not None
    calls = [record.calls for record in suite.plain().records.values()][:SHOWN]
    if not calls:
        raise NotApplicable("its episodes made no calls of an environment")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    # Files, not pipes: a process that the class leaves running would hold a pipe open.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        pickle.dump((environment.imports, environment.data, calls), given)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-Pm", "rlcore_plugin_testing.environment.apart", question],
            stdin=given,
            stdout=out,
            stderr=errors,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(suite.temporary), "PYTHONHASHSEED": "0"},
        )
        try:
            status = process.wait(APART_SECONDS)
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"{len(calls)} episodes of its class take longer than {APART_SECONDS:g} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    if status:
        raise CheckFailed(f"its class cannot be played in a process of its own: {texts[1][-400:]}")
    return json.loads(texts[0])
