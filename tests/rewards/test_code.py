"""The reward `code`: real programs, run isolated, and programs that try to pass without being right."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from rlcore.config.schema import RewardConfig
from rlcore.errors import DataError
from rlcore.plugins.specs import RewardSpec
from rlcore.rewards import code as module
from rlcore.rewards.code import code
from rlcore.rewards.compose import resolve
from rlcore.rewards.scoring import Rewards
from rlcore.sandbox import Limits, isolation, passed_tests, program_of

ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\n"
DOUBLE = [{"stdin": "2\n", "stdout": "4\n"}, {"stdin": "5\n", "stdout": "10"}]


def fenced(program, tag="python"):
    return f"Here it is:\n```{tag}\n{program}\n```\nDone."


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("print(1)", "print(1)"),
        (fenced("a"), "a\n"),
        (fenced("a") + fenced("b"), "b\n"),
        (fenced("a", "py") + fenced("b", "text"), "a\n"),
        (fenced("a", "Python3") + fenced("b", ""), "a\n"),
        (fenced("a", "") + fenced("b", "bash"), "a\n"),
        (fenced("s = '''```'''"), "s = '''```'''\n"),
        ("```python\nx = 1", "x = 1"),
        ("1. item\n   ```python\n   x = 1\n   ```\n", "   x = 1\n"),
        ("", ""),
    ],
)
def test_the_program_of_a_response(response, program):
    assert program_of(response) == program


@pytest.mark.parametrize(
    ("program", "score"),
    [
        (ADD, 1.0),
        (ADD + "\nif __name__ == '__main__':\n    print('log', add(1, 1))", 1.0),
        ("def add(a, b):\n    return 3", 0.0),
        ("def add(a, b:", 0.0),
        ("", 0.0),
        ("raise ValueError", 0.0),
    ],
)
def test_asserts(program, score):
    assert code("p", fenced(program), ASSERTS) == score
    assert code("p", program, ASSERTS) == score


@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("print(2 * int(input()))", 1.0),
        ("print(2 * int(input()), '  ')\nprint()", 1.0),
        ("print(4)", 0.0),
        ("print(2 * int(input()))\nraise SystemExit(1)", 0.0),
        ("print(' ', 2 * int(input()))", 0.0),
    ],
)
def test_inputs_and_outputs(program, score):
    assert code("p", fenced(program), DOUBLE) == score


CHEATS = {
    "exit": "import sys; sys.exit(0)",
    "os._exit": "import os; os._exit(0)",
    "exit when called": "import os\ndef add(a, b): os._exit(0)",
    "SystemExit when called": "def add(a, b): raise SystemExit(0)",
    "marker": 'print(\'passed\'); print(\'ok\'); print(\'{"id": "", "error": ""}\'); import os; os._exit(0)',
    "at exit": "import atexit, os; atexit.register(os._exit, 0)",
    "excepthook": "import sys, os; sys.excepthook = lambda *a: os._exit(0)",
    "replies everywhere": """
import os
for n in range(3, 256):
    try:
        os.write(n, b'{"id": "", "error": ""}\\n' * 3)
    except OSError:
        pass
""",
    "patched exec": "import builtins\nbuiltins.exec = builtins.compile = builtins.eval = lambda *a, **k: None",
    "patched json": """
import json, json.encoder
json.dumps = json.encoder.encode_basestring_ascii = lambda *a: '""'
json.loads = lambda *a: {"id": "", "code": ""}
""",
    "patched os": "import os\nos.read = lambda *a: b''\nos.write = lambda n, data: len(data)\nos.getpid = lambda: 1",
    "patched error": "import builtins\nbuiltins.AssertionError = builtins.NameError = StopIteration",
    "patched traceback": "import os, traceback\ntraceback.format_exception = lambda *a: os._exit(0)",
    "closed pipes": "import os\nos.closerange(0, os.sysconf('SC_OPEN_MAX'))",
    "fork": "import os\nif os.fork():\n    os._exit(0)",
    "parent": "import os\ntry:\n    os.kill(os.getppid(), 9)\nexcept OSError:\n    pass",
    "reads the asserts": "import gc\nassert not [o for o in gc.get_objects() if isinstance(o, str) and 'add(-1' in o]",
    "hang": "while True: pass",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_an_assert_is_not_passed_without_being_run(cheat, monkeypatch):
    monkeypatch.setattr(module, "LIMITS", Limits(seconds=2))
    assert code("p", CHEATS[cheat], ASSERTS) == 0.0


@pytest.mark.parametrize("cheat", CHEATS)
def test_an_output_is_not_passed_without_being_made(cheat):
    assert not any(passed_tests(CHEATS[cheat], DOUBLE[:1], Limits(seconds=1)))


def test_the_expected_output_is_nowhere_in_the_process():
    program = """
import gc, os
text = str([o for o in gc.get_objects() if isinstance(o, (str, list, dict))]) + str(os.environ) + str(os.listdir("."))
print("47110" + "815" in text)
"""
    assert code("p", program, [{"stdin": "", "stdout": "47110815"}]) == 0.0
    assert code("p", program, [{"stdin": "", "stdout": "False"}]) == 1.0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "the answer is 'None' (NoneType)"),
        (3, "the answer is '3' (int)"),
        ([], "the answer is '[]' (list)"),
        ("", "the answer is empty"),
        ("  \n", "the answer is empty"),
        ("assert add(1, 2 == 3", "are not Python"),
        ([{"stdin": "1"}], "test 1 of the answer is"),
        ([*DOUBLE, {"stdin": "1", "stdout": 2}], "test 3 of the answer is"),
        ([*DOUBLE, {"stdin": "1", "stdout": "2", "x": "3"}], "test 3 of the answer is"),
        (["assert True"], "test 1 of the answer is"),
        ({"stdin": "1", "stdout": "2"}, "(dict)"),
    ],
)
def test_a_wrong_answer_column_is_an_error(answer, words):
    with pytest.raises(DataError, match="tests of a program: ") as caught:
        code("p", ADD, answer)
    assert words in str(caught.value)


def test_the_shares_of_tests():
    tests = [*DOUBLE, {"stdin": "x", "stdout": "?"}]
    assert list(passed_tests(fenced("print(2 * int(input()))"), tests)) == [True, True, False]


def test_tests_share_their_time():
    begin = time.monotonic()
    slow = "import time\ntime.sleep(60)"
    assert list(passed_tests(slow, DOUBLE * 3, Limits(seconds=1), seconds=2)) == [False] * 6
    assert time.monotonic() - begin < 6


def test_tests_that_time_did_not_allow_are_not_failed_ones():
    """A right program that needs half a second: after one second, nothing is known of the other tests."""
    slow = fenced("import time\ntime.sleep(0.5)\nprint(2 * int(input()))")
    found = []
    with pytest.raises(TimeoutError, match=r"only \d of 6 tests could be run within 1 s"):
        found.extend(passed_tests(slow, DOUBLE * 3, Limits(seconds=5), seconds=1))
    wrong = fenced("import time\ntime.sleep(0.5)\nprint(input())")
    assert next(passed_tests(wrong, DOUBLE * 3, Limits(seconds=5), seconds=5)) is False


def test_a_program_without_the_time_for_its_tests_has_no_score(monkeypatch):
    monkeypatch.setattr("rlcore.rewards.code.SECONDS", 1.0)
    slow = fenced("import time\ntime.sleep(0.5)\nprint(2 * int(input()))")
    with pytest.raises(TimeoutError, match="tests could be run within 1 s"):
        code("p", slow, DOUBLE * 3)


def test_in_the_reward_process():
    """A program that spins is a score of zero, and a wrong answer column a failure, in the process that a run has."""
    settings = RewardConfig(functions={"code": 1.0})
    rewards = Rewards(resolve(settings, "code", {"code": RewardSpec("code", code)}), settings)
    try:
        answers = [ASSERTS, ASSERTS, DOUBLE, 7]
        responses = [ADD, "while True: pass", "print(2 * int(input()))", ADD]
        scored = rewards.score(["p"] * 4, responses, answers, {})
    finally:
        rewards.close()
    assert scored.totals[:3] == [1.0, 0.0, 1.0]
    assert [bool(failure) for failure in scored.failures] == [False, False, False, True]
    assert "DataError: tests of a program: the answer is '7' (int)" in scored.failures[3]["cause"]


def test_environment_of_the_run_is_not_there(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    program = "import os\nprint('WANDB_API_KEY' in os.environ)"
    assert code("p", program, [{"stdin": "", "stdout": "False"}]) == 1.0


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_run_says_at_its_start_how_programs_are_isolated(tmp_path):
    rows = [{"prompt": f"Double {n}.", "answer": [{"stdin": f"{n}", "stdout": f"{2 * n}"}]} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sets = ["algo=grpo", "cluster=in_process", "trainer.total_steps=1", "trainer.eval_every=0", "data=file"]
    sets += [
        f"data.path={tmp_path}/rows.jsonl",
        "data.batch_size=2",
        "data.max_rows=128",
        "data.eval_size=1",
        "rollout.response_len=4",
    ]
    sets += ["reward=code", f"run.dir={tmp_path}/run"]
    done = subprocess.run([sys.executable, "-m", "rlcore.cli", "train", *sets], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "run" / "rlcore.log").read_text()
    for line in isolation().lines():
        assert line in log
    for guard in isolation().guards:
        assert (str(guard) in done.stderr) is not guard.held
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["reward/errors"] == 0
