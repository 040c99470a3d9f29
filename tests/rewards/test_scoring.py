import math
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlcore.config.schema import RewardConfig
from rlcore.errors import ConfigError
from rlcore.plugins.specs import RewardSpec
from rlcore.rewards.arithmetic import arithmetic
from rlcore.rewards.compose import resolve
from rlcore.rewards.scoring import Rewards, check

FILE = Path(__file__).parent / "functions.py"
INSTALLED = {"arithmetic": RewardSpec("arithmetic", arithmetic)}


@pytest.fixture
def make():
    made = []

    def build(*functions, weights=None, **config):
        references = [name if name in INSTALLED else f"{FILE}:{name}" for name in functions]
        weighted = dict(zip(references, weights or [1.0] * len(references), strict=True))
        settings = RewardConfig(functions=weighted, **config)
        rewards = Rewards(resolve(settings, "arithmetic", INSTALLED), settings)
        made.append(rewards)
        return rewards

    yield build
    for rewards in made:
        rewards.close()


def living(wanted):
    """The processes that have not ended (zombies have) and that `wanted(id, group)` picks."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if state not in "ZX" and wanted(int(stat.parent.name), int(group)):
            found.append(stat.parent.name)
    return found


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def score(rewards, responses, **columns):
    return rewards.score(["p"] * len(responses), responses, ["a"] * len(responses), columns)


def test_rows_and_replies_that_fill_both_pipes_are_no_hang(make):
    """Requests of many rows go out ahead of the replies, which here are long as well."""
    responses = ["shout " + "\u00fc" * 40_000] * 40
    scored = score(make("misbehave", timeout=5.0), responses)
    assert all(failure["cause"].startswith("raised ValueError: \u00fc\u00fc") for failure in scored.failures)


def test_replies_to_rows_that_nobody_waits_for_reach_nobody_else(make):
    rewards = make("index_of")
    process = rewards._process
    rows = list(map(str, range(40)))

    class Interrupted(Mapping):
        """Columns whose 30th reading is interrupted, when replies to 16 rows or more are under way."""

        reads = 0

        def __getitem__(self, name):
            raise KeyError(name)

        def __iter__(self):
            self.reads += 1
            if self.reads == 30:
                raise KeyboardInterrupt
            return iter(())

        def __len__(self):
            return 0

    with pytest.raises(KeyboardInterrupt):
        process.scores(0, rows, rows, rows, Interrupted(), 5.0)
    scores = process.scores(0, rows[20:], rows[20:], rows[20:], {}, 5.0)
    assert [score.value for score in scores] == list(map(float, range(20, 40)))


def test_each_kind_of_failure_is_reported_with_its_cause_and_spares_its_neighbours(make):
    causes = {
        "raise": 'raised ValueError: cannot judge "this"',
        "exit": "raised SystemExit: 5",
        "interrupt": "raised KeyboardInterrupt: ",
        "hang": "gave no answer within 0.5 s",
        "hang in C": "gave no answer within 0.5 s",
        "fork and hang": "gave no answer within 0.5 s",
        "_exit": "ended its process with status 7",
        "kill": "ended its process by SIGKILL (it may have used more memory than the machine has)",
        "real-time signal": "ended its process by signal 40",
        "segfault": "ended its process by SIGSEGV",
        "orphan": "ended its process with status 3",
        "babble": "sent no proper reply",
        "recurse": "raised RecursionError: maximum recursion depth exceeded",
        "nan": "returned nan, not a finite 32-bit number",
        "inf": "returned inf, not a finite 32-bit number",
        "huge": "returned 1e+39, not a finite 32-bit number",
        "string": "returned '1.0' (str), not a number",
        "list": "returned [1.0] (list), not a number",
    }
    responses = [response for act in causes for response in (act, "fine")]
    started = time.monotonic()
    scored = score(make("misbehave", timeout=0.5, error_value=-7.0), responses)
    assert time.monotonic() - started < 20
    assert scored.totals == [-7.0, 0.25] * len(causes)
    assert scored.failures[1::2] == [None] * len(causes)
    for failure, cause in zip(scored.failures[::2], causes.values(), strict=True):
        assert failure["function"] == "functions.misbehave"
        assert failure["cause"] == cause
    traceback = scored.failures[0]["traceback"]
    assert "in raise_error" in traceback
    assert "rewards/child.py" not in traceback


def test_a_number_too_large_for_a_float_is_no_number(make):
    (failure,) = score(make("misbehave"), ["int"]).failures
    assert failure["cause"].endswith("(int), not a number")


def test_memory_beyond_the_limit_fails_the_sample_alone(make):
    scored = score(make("misbehave", memory_mb=512, error_value=0.0), ["fine", "hoard", "fine"])
    assert scored.totals == [0.25, 0.0, 0.25]
    assert scored.failures[1]["cause"] == "raised MemoryError: "


def test_bool_and_whatever_converts_to_float_are_numbers(make):
    assert score(make("misbehave"), ["bool", "object"]).totals == [1.0, 2.0]


def test_killing_takes_what_the_reward_started_along(make):
    rewards = make("misbehave", timeout=0.5)
    rewards.start()
    group = rewards._process._process.pid
    assert living(lambda process, process_group: process_group == group)
    score(rewards, ["fork and hang"])
    wait_until(lambda: not living(lambda process, process_group: process_group == group))


def test_prints_do_not_disturb_the_answers_and_columns_arrive(make, capfd):
    scored = score(make("everything"), ["r", "r"], uid=["0:0", "0:1"], extra=[None, {"a": [1]}], prompt=["clash"] * 2)
    assert scored.totals == [1.0, 1.0]
    assert capfd.readouterr().err.count("chatter on stdout\nand straight on the descriptor\n") == 2


def test_a_function_gets_only_the_columns_that_it_names(make):
    scored = score(make("level"), ["r", "r"], uid=["0:0", "0:1"], level=[1, 2], prompt=["clash"] * 2, other=[0, 0])
    assert scored.totals == [1.0, 2.5]
    (failure,) = score(make("level"), ["r"]).failures
    assert "missing 1 required positional argument: 'level'" in failure["cause"]


def test_weighted_sum_and_scores_by_function(make):
    rewards = make("length", "arithmetic", weights=[0.5, -2.0])
    scored = rewards.score(["p", "p"], ["abc", "4"], ["3", "4"], {})
    assert scored.totals == [1.5, 0.5 - 2.0]
    assert scored.by_function == {"functions.length": [3.0, 1.0], "arithmetic": [0.0, 1.0]}


def test_one_failing_function_makes_the_whole_sample_an_error(make):
    scored = score(make("length", "misbehave", weights=[1.0, 1.0], error_value=-1.0), ["raise", "fine"])
    assert scored.totals == [-1.0, 4.25]
    assert scored.failures[0]["function"] == "functions.misbehave"
    assert scored.by_function == {"functions.length": [5.0, 4.0], "functions.misbehave": [-1.0, 0.25]}


def test_without_a_value_for_failures_there_is_no_score(make):
    scored = score(make("length", "misbehave"), ["raise", "fine"])
    assert math.isnan(scored.totals[0])
    assert scored.totals[1] == 4.25
    assert scored.by_function["functions.length"] == [5.0, 4.0]
    assert math.isnan(scored.by_function["functions.misbehave"][0])


def test_a_reward_that_returns_none_takes_no_part_in_the_sum(make):
    scored = score(make("length", "misbehave", weights=[0.5, 2.0]), ["none", "fine"])
    assert scored.totals == [2.0, 2.5]
    assert scored.failures == [None, None]
    assert math.isnan(scored.by_function["functions.misbehave"][0])


def test_a_sample_for_which_every_reward_returns_none_has_failed(make):
    scored = score(make("misbehave"), ["none", "fine"])
    assert math.isnan(scored.totals[0])
    assert scored.failures[0]["cause"] == "is missing: every reward returned None"
    assert scored.failures[1] is None


def test_a_function_of_weight_zero_is_no_reward(make):
    """It is there for its column, as the cost of Safe RLHF is; without the other the sample has no reward."""
    scored = score(make("misbehave", "length", weights=[1.0, 0.0]), ["none", "fine"])
    assert math.isnan(scored.totals[0])
    assert scored.failures[0]["cause"] == "is missing: every reward returned None"
    assert scored.totals[1] == 0.25


def test_beside_a_reward_model_a_sample_without_a_function_keeps_the_models_score(make):
    scored = score(make("misbehave", model="some/folder"), ["none", "raise"])
    assert scored.totals[0] == 0.0
    assert scored.failures[0] is None
    assert scored.failures[1] is not None


def test_a_call_that_was_killed_or_ran_out_of_time_by_itself_is_made_once_more(make, tmp_path):
    """The first call about a file makes it and fails; the second finds it."""
    rewards = make("fails_once")
    acts = [f"{act} {tmp_path / act}" for act in ("kill", "time", "raise")]
    scored = score(rewards, [*acts, "fine"])
    assert scored.totals[:2] == [1.0, 1.0]
    assert scored.totals[3] == 1.0
    assert scored.failures[2]["cause"] == "raised ValueError: once"
    always = score(rewards, ["kill always", "fine"])
    assert always.failures[0]["cause"].startswith("ended its process by SIGKILL")
    assert always.totals[1] == 1.0


def test_a_batched_call_that_was_killed_is_made_once_more(make, tmp_path):
    assert score(make("batched_fails_once"), [f"kill {tmp_path / 'one'}", "fine"]).totals == [1.0, 1.0]


def test_a_total_that_overflows_is_an_error(make):
    (failure,) = score(make("length", weights=[3e38]), ["long"]).failures
    assert failure["function"] == "total"


def test_batched_functions_get_lists_and_the_time_of_all_rows(make):
    rewards = make("batched", timeout=0.5, error_value=-1.0)
    assert score(rewards, ["slow", "b", "ccc"]).totals == [4.0, 1.0, 3.0]
    for act, cause in {
        "short": "returned 1 values for 3 samples",
        "scalar": "returned 1.0 (float), not a list of 3 numbers",
        "text": "returned '111' (str), not a list of 3 numbers",
        "one bad": "returned 'b' (str), not a number",
        "hang": "gave no answer within 1.5 s",
    }.items():
        scored = score(rewards, [act, "b", "ccc"])
        assert scored.totals == [-1.0] * 3
        assert [failure["cause"] for failure in scored.failures] == [cause] * 3


def test_no_rows(make):
    scored = score(make("batched", "length"), [])
    assert (scored.totals, scored.failures) == ([], [])


def test_a_process_that_dies_between_calls_is_replaced(make):
    rewards = make("length")
    rewards.start()
    rewards._process._process.kill()
    rewards._process._process.wait()
    assert score(rewards, ["ab"]).totals == [2.0]


def test_large_rows_pass_both_ways(make):
    text = "x" * 3_000_000
    assert score(make("batched"), [text] + ["y"] * 20_000).totals == [3e6] + [1.0] * 20_000


def test_a_file_that_cannot_be_loaded_in_the_process_is_an_error_before_the_run(tmp_path):
    file = tmp_path / "greedy.py"
    file.write_text("import os\nTABLE = bytes(200 * 2**20)\ndef score(p, r, a):\n    return len(TABLE)\n")
    config = RewardConfig(path=f"{file}:score", memory_mb=150)
    with pytest.raises(Exception, match=r"(?s)'greedy.score' cannot be loaded .* MemoryError.*memory_mb is 150"):
        check(resolve(config, "", {}), config)
    missing = RewardSpec("needs", arithmetic, imports=("no_such_module",))
    config = RewardConfig()
    with pytest.raises(Exception, match=r"'needs' cannot be loaded .* No module named 'no_such_module'"):
        check(resolve(config, "needs", {"needs": missing}), config)


def test_a_killed_run_leaves_no_reward_process_behind(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(f"""
import sys
from rlcore.config.schema import RewardConfig
from rlcore.rewards.compose import resolve
from rlcore.rewards.scoring import Rewards
config = RewardConfig(path={f"{FILE}:misbehave"!r}, timeout=60)
rewards = Rewards(resolve(config, "", {{}}), config)
rewards.start()
print(rewards._process._process.pid, flush=True)
rewards.score(["p"], ["hang"], ["a"], {{}})
""")
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as run:
        child = int(run.stdout.readline())
        assert living(lambda process, process_group: process == child)
        time.sleep(0.2)  # it hangs by now
        run.kill()
    wait_until(lambda: not living(lambda process, process_group: process == child))


EXTRACTING = """
from rlcore import RewardSpec

def score(prompt, response, answer):
    return 1.0

def extract(response):
    return {"a": "A", "none": None, "number": 7}[response]

def of_two(response, answer):
    return None

good = RewardSpec("good", score, extract=extract)
batched = RewardSpec("batched", lambda prompts, responses, answers: [1.0] * len(prompts), batched=True, extract=extract)
plain = score
bad = RewardSpec("bad", score, extract=of_two)
"""


@pytest.mark.parametrize("name", ["good", "batched"])
def test_answers_are_extracted_where_asked_and_a_failure_is_the_rows(tmp_path, name):
    (tmp_path / "extracting.py").write_text(EXTRACTING)
    functions = {f"{tmp_path / 'extracting.py'}:{function}": 1.0 for function in ("plain", name)}
    config = RewardConfig(functions=functions)
    rewards = Rewards(resolve(config, "", {}), config)
    try:
        fine = rewards.score(["p"] * 2, ["a", "none"], [None] * 2, {}, extracts=True)
        assert (fine.extracted, fine.totals) == (["A", None], [2.0, 2.0])
        assert rewards.score(["p"], ["a"], [None], {}).extracted == [None]
        failed = rewards.score(["p"] * 2, ["number", "missing"], [None] * 2, {}, extracts=True)
    finally:
        rewards.close()
    assert [failure["function"] for failure in failed.failures] == [f"extracting.{name}"] * 2
    causes = [failure["cause"] for failure in failed.failures]
    if name == "good":
        assert causes == ["extracted 7 (int), neither text nor None", "raised KeyError: 'missing'"]
    else:  # one call for both
        assert causes == ["raised KeyError: 'missing'"] * 2
    assert all(math.isnan(total) for total in failed.totals)


def test_an_extract_of_other_parameters_is_refused(tmp_path):
    (tmp_path / "extracting.py").write_text(EXTRACTING)
    config = RewardConfig(path=f"{tmp_path / 'extracting.py'}:bad")
    with pytest.raises(ConfigError, match=r"its `extract` cannot be called with a response alone: .*answer"):
        resolve(config, "", {})
