"""The contract of an environment, in this process: what each form of a class gives, and how each fault is named."""

import random
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest

from rlcore.episodes.environment import (
    EnvironmentFailure,
    EpisodeEnvironment,
    Observation,
    ToolError,
    as_class,
    tool_names,
)

SAID = {"role": "assistant", "content": "said"}


def call(name, **arguments):
    return {"id": "c1", "name": name, "arguments": arguments}


def begun(target, row=None, seed=0, config=None):
    environment = EpisodeEnvironment(target, config)
    environment.reset(row or {}, seed)
    return environment


def environment_with(**members):
    return type("Env", (), members)


class Counter:
    """Like an environment of TRL: a reset of named columns, tools, get_reward."""

    def reset(self, start, seed, step_size=1, **rest):
        self.value, self.rest, self.draw = start, rest, random.random()
        return f"Count from {start}."

    def add(self, amount: int):
        """Add."""
        self.value += amount
        return self.value

    async def later(self):
        """Return text from a coroutine."""
        return "later"

    @staticmethod
    def fail(message: str):
        """Raise."""
        raise ValueError(message)

    def give(self, value):
        """Return the argument."""
        return value

    def get_reward(self):
        return self.value

    def _private(self):
        raise AssertionError


def test_tools_are_the_public_methods():
    class Child(Counter):
        done = False
        fail = None
        pattern = str.upper
        Nested = dict

        def step(self, messages):
            return None

        def close(self):
            pass

        @property
        def size(self):
            return 1

        def last(self):
            pass

    assert tool_names(Counter) == ["add", "later", "fail", "give"]
    assert tool_names(Child) == ["add", "later", "give", "last"]


def test_reset_gets_the_columns_that_it_names():
    environment = EpisodeEnvironment(Counter)
    row = {"start": 3, "other": "x", "seed": 99}
    assert environment.reset(row, 7) == {"prompt": "Count from 3.", "seat": 0}
    assert environment._object.rest == {"other": "x"}
    with pytest.raises(EnvironmentFailure, match="reset needs the column 'start'; the row has other"):
        EpisodeEnvironment(Counter).reset({"other": 1}, 0)

    seen = {}
    named = environment_with(reset=lambda self, seed: seen.update(seed=seed))
    assert EpisodeEnvironment(named).reset({"seed": 99, "start": 1}, 7) == {"prompt": None, "seat": 0}
    assert seen == {"seed": 7}
    assert EpisodeEnvironment(environment_with()).reset(row, 7) == {"prompt": None, "seat": 0}


def test_the_seed_sets_all_generators_before_the_constructor():
    class Env:
        def __init__(self):
            self.draws = [random.random(), float(np.random.rand())]

        def reset(self):
            return str([*self.draws, random.random(), float(np.random.rand())])

    first, again, other = (EpisodeEnvironment(Env).reset({}, seed)["prompt"] for seed in (2**62 + 1, 2**62 + 1, 3))
    assert first == again != other


def test_a_config_goes_to_the_constructor():
    class Env:
        def __init__(self, config):
            self.config = config

        def reset(self):
            return self.config["text"]

    assert EpisodeEnvironment(Env, {"text": "hello"}).reset({}, 0)["prompt"] == "hello"


def test_tool_calls_are_answered_in_order():
    environment = begun(Counter, {"start": 1})
    calls = [call("add", amount=2), {"error": "Error: not JSON"}, call("later"), call("fail", message="no such page")]
    answer = environment.turn(SAID, [*calls, call("_private"), call("reset"), call("add")])
    assert [message["content"] for message in answer.pop("messages")] == [
        "3",
        "Error: not JSON",
        "later",
        "Error: ValueError: no such page",
        "Error: unknown tool '_private'; the tools are add, fail, give, later",
        "Error: unknown tool 'reset'; the tools are add, fail, give, later",
        "Error: TypeError: Counter.add() missing 1 required positional argument: 'amount'",
    ]
    assert answer == {"reward": None, "done": False, "seat": 0, "tool_calls": 7, "tool_errors": 5, "scores": None}
    answer = environment.turn(SAID, [call("add", amount=1)])
    assert answer["messages"] == [{"role": "tool", "content": "4", "name": "add", "tool_call_id": "c1"}]
    assert environment.turn(SAID, []) == {
        **{"messages": [], "reward": None, "done": True, "seat": 0, "tool_calls": 0, "tool_errors": 0},
        "scores": [4.0],
    }
    environment.close()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as is", "as is"),
        ({"a": [1, None], "ä": True}, '{"a": [1, null], "ä": true}'),
        (None, "null"),
        (np.float64(0.5), "0.5"),
        ({"n": np.arange(2)}, '{"n": [0, 1]}'),
        ("bad \udc80 and \ud83d\ude00", "bad � and 😀"),
    ],
)
def test_results_are_text_or_json(value, text):
    answer = begun(Counter, {"start": 1}).turn(SAID, [call("give", value=value)])
    assert answer["messages"][0]["content"] == text


@pytest.mark.parametrize("value", [object(), {1, 2}, {(1, 2): 3}, Observation("x")])
def test_a_result_without_a_form_fails_the_episode(value):
    with pytest.raises(EnvironmentFailure, match=r"tool 'give' returned .*, which is neither text nor JSON"):
        begun(Counter, {"start": 1}).turn(SAID, [call("give", value=value)])


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (EnvironmentFailure("the database is down"), "tool 'use' failed: the database is down"),
        (MemoryError(), "tool 'use' raised MemoryError"),
        (SystemExit(3), "tool 'use' raised SystemExit: 3"),
    ],
)
def test_some_exceptions_of_tools_fail_the_episode(error, cause):
    def use(self):
        raise error

    with pytest.raises(EnvironmentFailure) as failure:
        begun(environment_with(use=use)).turn(SAID, [call("use")])
    assert failure.value.cause == cause
    assert "raise error" in failure.value.traceback
    assert "rlcore/episodes" not in failure.value.traceback.partition("The above exception")[0]


def test_an_exception_without_text_is_described():
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError

    def use(self):
        raise Silent

    answer = begun(environment_with(use=use)).turn(SAID, [call("use")])
    assert answer["messages"][0]["content"] == "Error: Silent: (its __str__ raised RuntimeError)"


def test_done_after_a_tool_ends_the_episode_before_the_next_call():
    class Env:
        done = False

        def finish(self):
            """End."""
            self.done = True
            return "over"

        def score(self):
            return True

    environment = begun(Env)
    answer = environment.turn(SAID, [call("finish"), call("finish")])
    assert (len(answer["messages"]), answer["done"], answer["scores"], answer["tool_calls"]) == (1, True, [1.0], 1)
    with pytest.raises(EnvironmentFailure, match="after the episode's end"):
        environment.turn(SAID, [])
    with pytest.raises(EnvironmentFailure, match="after its end"):
        environment.finish()


def test_a_tool_may_be_called_done():
    environment = begun(environment_with(done=lambda self: "really?"))
    answer = environment.turn(SAID, [call("done")])
    assert (answer["messages"][0]["content"], answer["done"]) == ("really?", False)


def stepping(*values, **members):
    """Return an environment whose steps return these values in turn."""
    queue = list(values)
    return begun(environment_with(step=lambda self, messages: queue.pop(0), **members))


def test_step_answers_turns_without_calls():
    seen = []

    class Env:
        def reset(self):
            return [{"role": "system", "content": "play"}]

        async def step(self, messages):
            seen.extend(messages)
            return "next" if len(seen) == 1 else None

    environment = EpisodeEnvironment(Env)
    assert environment.reset({}, 0)["prompt"] == [{"role": "system", "content": "play"}]
    answer = environment.turn(SAID, [])
    assert (answer["messages"], answer["done"]) == ([{"role": "user", "content": "next"}], False)
    answer = environment.turn(SAID, [])
    assert (answer["messages"], answer["done"], answer["scores"]) == ([], True, None)
    assert seen == [SAID, SAID]
    environment.close()


def test_observations_carry_reward_end_and_seat():
    environment = stepping(
        Observation("your turn", reward=np.float32(0.5), seat=1),
        [{"role": "user", "content": "same seat"}],
        Observation(reward=1, done=True),
        seats=2,
        score=lambda self: np.array([1, -1]),
    )
    answer = environment.turn(SAID, [])
    assert (answer["reward"], answer["seat"], answer["done"]) == (0.5, 1, False)
    assert environment.turn(SAID, [])["seat"] == 1
    answer = environment.turn(SAID, [])
    assert (answer["messages"], answer["reward"], answer["done"], answer["scores"]) == ([], 1.0, True, [1.0, -1.0])


def test_finish_gives_the_scores_of_an_episode_that_did_not_end():
    assert begun(Counter, {"start": 2}).finish() == {"scores": [2.0]}
    assert begun(environment_with()).finish() == {"scores": None}


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (3, r"step returned 3 \(int\); text, a list of messages or None"),
        (["text"], r"step returned 'text' \(str\) among its messages"),
        ([{"role": "user"}], r"step returned the message .* whose 'content' is not text"),
        (Observation("x", reward=float("nan")), "the reward of step is nan, not a finite"),
        (Observation("x", reward="1"), "the reward of step is '1'"),
        (Observation("x", seat=1), "step gave the turn to seat 1; the seats are 0 to 0"),
        (Observation(), "neither messages nor done=True"),
    ],
)
def test_a_wrong_step_fails_the_episode(value, cause):
    with pytest.raises(EnvironmentFailure, match=cause):
        stepping(value).turn(SAID, [])


@pytest.mark.parametrize(
    ("value", "seats", "cause"),
    [
        (None, 1, r"score is None \(NoneType\), not a number"),
        ("1", 1, r"score is '1' \(str\), not a number"),
        (float("inf"), 1, "score is inf, not a finite"),
        (1e39, 1, "score is 1e"),
        (1.0, 2, "score returned 1 numbers for 2 seats"),
        ([1.0, 2.0], 1, "score returned 2 numbers for 1 seats"),
        ([1.0, None], 2, "score is None"),
    ],
)
def test_a_wrong_score_fails_the_episode(value, seats, cause):
    target = environment_with(score=lambda self: value, seats=seats)
    with pytest.raises(EnvironmentFailure, match=cause):
        begun(target).turn(SAID, [])
    with pytest.raises(EnvironmentFailure, match=cause):
        begun(target).finish()


@pytest.mark.parametrize("value", [Observation("x", done=True), Observation("x", reward=1.0), 3, [{"content": "x"}]])
def test_a_wrong_reset_fails_the_episode(value):
    with pytest.raises(EnvironmentFailure, match="reset"):
        EpisodeEnvironment(environment_with(reset=lambda self: value)).reset({}, 0)


@pytest.mark.parametrize("method", ["__init__", "reset", "step", "score", "close"])
def test_an_exception_names_its_method(method):
    def raises(self, *arguments):
        raise KeyError("oops")

    def play():
        environment = begun(environment_with(**{method: raises}))
        environment.turn(SAID, [])
        environment.close()

    with pytest.raises(EnvironmentFailure, match=f"{method} raised KeyError: 'oops'") as failure:
        play()
    assert failure.value.traceback.splitlines()[1].endswith("in raises")


def test_close_ends_the_event_loop():
    class Env:
        closed = False

        async def use(self):
            """Keep a task."""
            import asyncio

            self.task = asyncio.ensure_future(asyncio.sleep(60))

        def close(self):
            Env.closed = True

    environment = begun(Env)
    environment.turn(SAID, [call("use")])
    task = environment._object.task
    environment.close()
    assert Env.closed
    assert task.cancelled()


def test_functions_become_an_environment():
    def double(x: int):
        """Double."""
        return 2 * x

    def triple(x: int):
        """Triple."""
        return 3 * x

    environment = begun(as_class([double, triple]))
    answer = environment.turn(SAID, [call("triple", x=2), call("double", x=2)])
    assert [message["content"] for message in answer["messages"]] == ["6", "4"]
    assert tool_names(as_class(double)) == ["double"]
    assert as_class(Counter) is Counter


def test_the_process_of_environments_imports_little():
    script = (
        "import sys, rlcore.episodes.child\n"
        "print(sorted({'torch', 'transformers', 'ray', 'numpy', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


class Dispatched:
    """Tools that the class states itself, with names that no method can have."""

    tool_schemas: ClassVar = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("get-time", "score", "fail")
    ]

    def call_tool(self, name, arguments):
        if name == "fail":
            raise ToolError("the text as it is")
        return [name, arguments]

    def helper(self):
        raise AssertionError


def test_a_class_can_state_its_tools_and_dispatch_their_calls():
    assert tool_names(Dispatched) == ["get-time", "score", "fail"]
    environment = begun(Dispatched)
    calls = [call("get-time", zone="utc"), call("score"), call("fail"), call("helper"), call("call_tool")]
    answer = environment.turn(SAID, calls)
    texts = [each["content"] for each in answer["messages"]]
    assert texts[:3] == ['["get-time", {"zone": "utc"}]', '["score", {}]', "the text as it is"]
    assert [text[:20] for text in texts[3:]] == ["Error: unknown tool "] * 2
    assert answer["tool_errors"] == 3


def test_stated_tools_without_a_dispatcher_are_methods():
    class Stated:
        tool_schemas: ClassVar = [{"type": "function", "function": {"name": "add"}}]

        def add(self, a, b):
            return a + b

        def helper(self):
            raise AssertionError

    answer = begun(Stated).turn(SAID, [call("add", a=1, b=2), call("helper")])
    assert [each["content"] for each in answer["messages"]] == ["3", "Error: unknown tool 'helper'; the tools are add"]


def test_a_failure_keeps_the_traceback_that_it_brings():
    def step(self, messages):
        raise EnvironmentFailure("the simulator is down", "its last words")

    with pytest.raises(EnvironmentFailure, match="step failed: the simulator is down") as raised:
        begun(environment_with(step=step)).turn(SAID, [])
    assert raised.value.traceback == "its last words"


class HearsEnough:
    """Ends the episode with the second turn; the tool that it calls is not used any more."""

    done = False

    def __init__(self):
        self.heard, self.used = [], 0

    async def on_turn(self, message, calls):
        self.heard.append((message["content"], [call.get("name") for call in calls]))
        self.done = len(self.heard) == 2

    def use(self) -> str:
        """Use the tool."""
        self.used += 1
        return "used"

    def step(self, messages):
        raise AssertionError("the episode is over")

    def score(self):
        return 10 * len(self.heard) + self.used


def test_an_environment_hears_each_turn_before_its_tools_and_may_end_the_episode_there():
    for last in ([{"id": "2", "name": "use", "arguments": {}}], []):
        environment = begun(HearsEnough)
        first = environment.turn({"role": "assistant", "content": "a"}, [{"id": "1", "name": "use", "arguments": {}}])
        assert (first["tool_calls"], first["done"]) == (1, False)
        second = environment.turn({"role": "assistant", "content": "b"}, last)
        assert (second["tool_calls"], second["done"], second["scores"]) == (0, True, [21.0])
        assert environment._object.heard == [("a", ["use"]), ("b", ["use"] if last else [])]
        environment.close()
    environment = begun(HearsEnough)
    assert environment.finish({"role": "assistant", "content": "cut"}) == {"scores": [10.0]}
    environment.close()
    assert "on_turn" not in tool_names(HearsEnough)
