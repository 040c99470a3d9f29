"""A test that hangs fails with the stacks of its processes, and the session goes on.

They cost 20 s on a busy machine: 12 for a session with tests that hang, most of them waiting, and 6 for a Ray worker.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import pytest

from rlcore.config.schema import ClusterConfig
from rlcore.episodes.processes import EnvironmentPool, pack
from rlcore.rewards.compose import WeightedReward
from rlcore.rewards.process import RewardProcess
from rlcore.stacks import FOLDER_VARIABLE
from rlcore.workers import ClassWithInitArgs, Dispatch, Worker, make_executor, register

ROOT = Path(__file__).parents[2]
THIS = sys.modules[__name__]
SHORT = {"GRACE": 0.5, "ANSWER": 1.0}


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of a session with the tests of hanging.py; its conftest.py has less patience."""
    folder = tmp_path_factory.mktemp("hanging")
    conftest = (ROOT / "conftest.py").read_text()
    for name, seconds in SHORT.items():
        conftest, found = re.subn(rf"^{name} = [\d.]+", f"{name} = {seconds}", conftest, flags=re.MULTILINE)
        assert found == 1
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_hanging.py").write_text(Path(__file__).with_name("hanging.py").read_text())
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "xdist"]
    environment = {name: os.environ[name] for name in os.environ if not name.startswith(("PYTEST", FOLDER_VARIABLE))}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # four processes would take a second each to import them
    done = subprocess.run(
        [*command, "--numprocesses", "1", "--dist", "loadfile"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert not list(folder.glob("*.txt"))
    return done.stdout + done.stderr


def part(output: str, title: str) -> str:
    """Return the part of a session's output under a title, to the next one."""
    (found,) = re.findall(rf"^_{{3,}} {title} _{{3,}}\n(.*?)(?=^[_=]{{3,}} \S)", output, re.MULTILINE | re.DOTALL)
    return found


def test_a_test_that_hangs_fails_with_the_stacks_of_all_processes(hanging: str) -> None:
    shown = part(hanging, "test_hangs")
    assert "It took more than 2 s. Every process's stacks are below." in shown
    _, own, *others = re.split(r"^--- \d+: ", shown.partition("Captured stacks at the time-out")[2], flags=re.MULTILINE)
    assert "in hangs_in_the_test" in own
    assert "_pytest/" not in own
    assert len(others) == 3
    assert [("in hangs_in_the_child" in each, "(it prints no stacks)" in each) for each in others] == [
        (False, True),
        (True, False),
        (False, True),
    ]


def test_what_it_started_is_killed_and_the_session_goes_on(hanging: str) -> None:
    assert "PASSED test_hanging.py::test_after_a_hang" in hanging
    assert "PASSED test_hanging.py::test_last" in hanging
    assert "5 failed, 2 passed, 1 error" in hanging


def test_a_time_out_that_became_another_error_is_named(hanging: str) -> None:
    errors = re.findall(r"^E +(\w+): (.*)$", part(hanging, "test_swallows_its_failure"), re.MULTILINE)
    expired = ("Failed", "It took more than 0.5 s. Every process's stacks are below.")
    assert errors == [expired, ("SystemError", "another error"), expired]


def test_the_fixtures_of_a_failed_test_have_a_limit_too(hanging: str) -> None:
    shown = part(hanging, "ERROR at teardown of test_fails")
    assert "in hangs_at_its_end" in shown
    assert "in hangs_in_the_test" in shown


def test_a_hang_in_c_is_a_failed_test(hanging: str) -> None:
    assert "test_hanging.py::test_hangs_in_c took more than 0.5 s, and then did not end." in hanging
    last = hanging.partition("and then did not end.")[2].partition("node down")[0]
    assert "in hang_in_c" in last
    assert "in hangs_in_the_child" in last
    assert re.search(r"crashed while running 'test_hanging.py::test_hangs_in_c'", hanging)
    assert hanging.count("node down") == 2


def test_a_hang_in_c_that_stops_all_threads_is_a_failed_test(hanging: str) -> None:
    name = "test_hangs_in_c_with_the_lock_of_the_interpreter"
    assert re.search(rf"in hang_in_c\n  File \S+ line \d+ in {name}\n", hanging)
    assert f"crashed while running 'test_hanging.py::{name}'" in hanging


# Processes that rlcore starts


class Member(Worker):
    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def hangs_in_the_worker(self) -> None:
        time.sleep(600)


def hangs_in_the_reward(prompt: str, response: str, answer: str) -> float:
    time.sleep(600)
    return 0.0


class Environment:
    def reset(self) -> str:
        return self.hangs_in_the_environment()

    def hangs_in_the_environment(self) -> str:
        time.sleep(600)
        return ""


@pytest.fixture
def stacks(request: pytest.FixtureRequest) -> Iterator[object]:
    """The function of /conftest.py."""
    plugin = request.config.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    assert plugin is not None
    return plugin.stacks


def until_shown(stacks, *names: str) -> str:
    """Return the stacks as soon as all functions are in them."""
    until = time.monotonic() + 10
    while not all(f"in {name}\n" in (text := stacks()) for name in names):
        assert time.monotonic() < until, text
    return text


def test_reward_and_environment_processes_show_where_they_are(stacks) -> None:
    cloudpickle.register_pickle_by_value(THIS)
    process = RewardProcess([WeightedReward("hangs", 1.0, cloudpickle.dumps(hangs_in_the_reward))], 0)
    cloudpickle.unregister_pickle_by_value(THIS)
    scoring = ThreadPoolExecutor(1)  # which keeps the error of a process that is closed while it scores
    own = pack("mine", Environment, by_value=[THIS])
    with contextlib.closing(process), EnvironmentPool(own, processes=1, timeout=600, memory_mb=0) as pool:
        process.start()
        scored = scoring.submit(lambda: process.scores(0, ["p"], ["r"], ["a"], {}, 600))
        pool.reset("e", {}, 0)
        text = until_shown(stacks, "hangs_in_the_reward", "hangs_in_the_environment")
    while not scored.done():  # a call that was killed is made once more
        process.close()
        time.sleep(0.1)
    scoring.shutdown()
    children = [each for each in text.split("\n--- ") if "-m rlcore.episodes.child " in each]
    server, slot = children  # each in a file of its own
    assert "in _fork\n" not in server
    assert "in serve\n" in server
    assert "in hangs_in_the_environment\n" in slot


@pytest.mark.ray
def test_a_ray_worker_shows_where_it_is(stacks, ray_cluster: None) -> None:
    with make_executor(ClusterConfig(executor="ray", workers=1), by_value_modules=[THIS]) as executor:
        group = executor.worker_group(executor.resource_pool(), ClassWithInitArgs(Member), name="member")
        group.hangs_in_the_worker()
        text = until_shown(stacks, "hangs_in_the_worker")
    (worker,) = [each for each in text.split("\n--- ") if "in hangs_in_the_worker" in each]
    assert "ray::" in worker.splitlines()[0]
    assert re.search(r"raylet .*\n\(it prints no stacks\)", text)


def test_the_command_prints_its_stacks_on_the_signal_and_goes_on(tmp_path: Path) -> None:
    samples = tmp_path / "samples" / "step_1.jsonl"
    samples.parent.mkdir()
    os.mkfifo(samples)  # the command waits for what comes through it
    environment = {name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE}
    command = [sys.executable, "-m", "rlcore.cli", "samples", str(tmp_path)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        with samples.open("w") as pipe:  # returns when the command has opened it
            started.send_signal(signal.SIGUSR2)
            time.sleep(0.5)
            pipe.write('{"uid": "its only row"}\n')
        output, errors = started.communicate()
    assert "in _show\n" in errors
    assert "in main\n" in errors
    assert "its only row" in output
    assert started.returncode == 0
