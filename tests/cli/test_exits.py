"""Code that rlcore calls cannot end the command in silence, nor hang it at import. About 20 s."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.cli import main

HOOK = "from rlcore import hookimpl\nRLCORE_API = 1\n@hookimpl\n"
EXITS = {"sys": "import sys; sys.exit(0)", "os": "import os; os._exit(0)", "raise": "raise SystemExit"}
RUN = ["train", "algo=grpo", "algo.group_size=2", "cluster=in_process", "data.batch_size=2", "rollout.response_len=4"]
RUN += ["trainer.total_steps=2", "data.max_rows=128", "trainer.eval_every=0", "tracker=none", "run.dir=run"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def command(*argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    argv = (sys.executable, "-m", "rlcore.cli", *argv)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.parametrize("exit_", EXITS)
@pytest.mark.parametrize(("key", "name"), [("reward.path", "reward"), ("env.path", "environment")])
def test_a_file_that_exits_while_it_loads_is_named(exit_, key, name, capsys):
    Path("mine.py").write_text(f"x = 1\n{EXITS[exit_]}\ndef f(prompt, response, answer): return 1.0\n")
    real = os._exit
    more = ["env=file", "~reward"] if name == "environment" else []
    assert main([*RUN, *more, f"{key}=mine.py:f"]) == 2
    assert os._exit is real
    printed = capsys.readouterr().err
    assert f"{name} 'mine.py:f': mine.py cannot be loaded: SystemExit: " in printed
    assert f"{Path('mine.py').resolve()}, line 2)" in printed
    assert not Path("run").exists()


@pytest.mark.parametrize("exit_", EXITS)
def test_a_plugin_that_exits_while_it_loads_is_named(exit_, stand_in, capsys):
    Path("mine.py").write_text(f"x = 1\n{EXITS[exit_]}\n")
    assert main([*stand_in, "config", "-p", "mine.py", "algo=echo"]) == 2
    assert f"importing it failed: SystemExit: {'os._exit(0)' if exit_ == 'os' else ''}" in capsys.readouterr().err


LOAD = (
    HOOK
    + """def rlcore_datasets():
    from rlcore import DatasetSpec
    return DatasetSpec('mine', lambda config, split: EXIT, 'gsm8k')
"""
)


@pytest.mark.parametrize(("exit_", "call"), [("exit(3)", "sys.exit(3)"), ("__import__('os')._exit(0)", "os._exit(0)")])
def test_code_that_exits_before_the_first_step_has_status_2(exit_, call, capsys):
    Path("mine.py").write_text(LOAD.replace("EXIT", exit_))
    assert main([*RUN, "-p", "mine.py", "data=mine"]) == 2
    place = f"{Path('mine.py').resolve()}, line 6, ended the command with {call}. Code that rlcore calls must not end"
    assert place in capsys.readouterr().err


STEP = (
    HOOK
    + """def rlcore_step_end(run, step):
    import os, sys
    EXIT
"""
)
TRACK = """
import os, sys
from rlcore import TrackerSpec, hookimpl
from rlcore.trackers import Tracker
RLCORE_API = 1
class Mine(Tracker):
    def log(self, step, metrics):
        EXIT
@hookimpl
def rlcore_trackers():
    return TrackerSpec("mine", lambda config, folder: Mine())
"""


@pytest.mark.parametrize("exit_", ["sys.exit(0)", "os._exit(0)"])
@pytest.mark.parametrize(
    ("code", "said"),
    [(STEP, "rlcore_step_end() failed: SystemExit: "), (TRACK, "mine.py, line 8, ended the command with ")],
)
def test_code_that_exits_during_a_run_has_status_1_and_the_run_is_closed(code, said, exit_, capsys):
    Path("mine.py").write_text(code.replace("EXIT", exit_))
    tracker = ["tracker.use=[console,mine]"] if code is TRACK else ["tracker=console"]
    assert main([*RUN, "-p", "mine.py", *tracker]) == 1
    printed = capsys.readouterr()
    assert said in printed.err
    assert str(Path("mine.py").resolve()) in printed.err
    assert json.loads(Path("run/summary.json").read_text())["status"] == "failed"
    assert "failed: 1 steps" in printed.out


def test_a_tool_in_the_place_of_sys_exit_is_not_named(stand_in, capsys, monkeypatch):
    """As wandb's, which notes the status."""

    def exit(status=None):
        raise SystemExit(status)

    monkeypatch.setattr(sys, "exit", exit)
    Path("mine.py").write_text(EXITS["sys"])
    assert main([*stand_in, "config", "-p", "mine.py", "algo=echo"]) == 2
    assert f"SystemExit: 0 ({Path('mine.py').resolve()}, line 1)" in capsys.readouterr().err


@pytest.mark.parametrize("exit_", ["sys.exit(0)", "os._exit(0)"])
def test_a_tracker_that_exits_at_the_end_leaves_the_others_to_finish(exit_, capsys):
    ending = TRACK.replace("def log(self, step, metrics)", "def finish(self, status, summary)")
    Path("mine.py").write_text(ending.replace("EXIT", exit_))
    assert main([*RUN, "-p", "mine.py", "tracker.use=[mine,console]"]) == 1
    printed = capsys.readouterr()
    assert "mine.py, line 8, ended the command with " in printed.err
    assert "finished: 2 steps" in printed.out


OPTIONS = (
    HOOK
    + """def rlcore_commands():
    from rlcore import CommandSpec
    return CommandSpec("mine", "has options", run=lambda line: 0, options=lambda parser: exit(0))
"""
)


def test_a_commands_options_may_not_exit(stand_in, capsys):
    Path("mine.py").write_text(OPTIONS)
    assert main([*stand_in, "-p", "mine.py", "mine"]) == 2
    assert "mine.py, line 6, ended the command with sys.exit(0)" in capsys.readouterr().err


THREAD = """
import os, threading
thread = threading.Thread(target=lambda: os._exit(0))
thread.start()
thread.join()
"""


def test_a_thread_that_exits_ends_the_command_with_an_error(stand_in):
    Path("mine.py").write_text(THREAD)
    done = command(*stand_in, "config", "-p", "mine.py", "algo=echo")
    assert done.returncode == 2
    assert f"rlcore: {Path('mine.py').resolve()}, line 3, ended the command with os._exit(0)." in done.stderr


FORK = """
import os, sys
child = os.fork()
if child == 0:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
SOUND = HOOK + "def rlcore_step_end(run): pass\n"


def test_a_forked_process_exits_as_it_asks_to(stand_in):
    Path("mine.py").write_text(FORK + SOUND)
    assert main([*stand_in, "plugins", "-p", "mine.py"]) == 0


COMMAND = (
    HOOK
    + """def rlcore_commands():
    from rlcore import CommandSpec
    return CommandSpec("mine", "reads its own words", main=lambda words: exit(int(words[0])))
"""
)


def test_a_command_that_reads_its_own_words_may_exit(stand_in):
    Path("mine.py").write_text(COMMAND)
    with pytest.raises(SystemExit) as caught:
        main([*stand_in, "-p", "mine.py", "mine", "5"])
    assert caught.value.code == 5


WAIT = "import time\ntime.sleep(100)\n"


@pytest.mark.parametrize(
    "argv", [["config", "-p", "mine.py"], ["train", "~reward", "reward.path=mine.py:f", "run.dir=run"]]
)
def test_a_file_that_hangs_at_import_ends_the_command(argv, stand_in):
    Path("mine.py").write_text(WAIT)
    # The stand-in keeps the import of torch out of the limit.
    done = command(*stand_in, *argv, "algo=echo", "algo.target=you", "cluster=in_process", RLCORE_IMPORT_TIMEOUT="2")
    assert done.returncode == 2
    assert f'{Path("mine.py").resolve()}", line 2, in <module>' in done.stderr
    assert "mine.py was not imported within 2 s; the stack above shows where" in done.stderr
    assert not Path("run").exists()


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(value, stand_in, capsys, monkeypatch):
    monkeypatch.setenv("RLCORE_IMPORT_TIMEOUT", value)
    assert main([*stand_in, "config", "algo=echo"]) == 2
    assert f"RLCORE_IMPORT_TIMEOUT={value!r} is no number of seconds" in capsys.readouterr().err


def test_zero_is_no_limit(stand_in, monkeypatch):
    monkeypatch.setenv("RLCORE_IMPORT_TIMEOUT", "0")
    Path("mine.py").write_text("import time\ntime.sleep(0.1)\n" + SOUND)
    assert main([*stand_in, "plugins", "-p", "mine.py"]) == 0
