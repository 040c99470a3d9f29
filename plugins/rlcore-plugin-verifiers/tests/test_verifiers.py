"""Tasksets of verifiers as episodes: rows, tools, state, stops, scores and runs. verifiers itself judges the scores."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("verifiers") is None:
    pytest.skip("verifiers needs a venv of its own: make test-verifiers", allow_module_level=True)

from rlcore_plugin_verifiers.config import TasksetConfig
from rlcore_plugin_verifiers.environment import NoRuntime, load_environment, new_trace
from rlcore_plugin_verifiers.rows import load
from rlcore_plugin_verifiers.tasksets import open_taskset, tasks_of

from rlcore import ConfigError, DataConfig, DataError
from rlcore.cli import main
from rlcore.config import compose
from rlcore.episodes import EnvironmentFailure
from rlcore.episodes.environment import EpisodeEnvironment
from rlcore.plugins import PluginManager

TASKSETS = Path(__file__).parent / "tasksets"
SMALL = [
    "cluster=in_process",
    "tracker=none",
    "data=verifiers",
    "env=verifiers",
    "data.batch_size=4",
    "env.memory_mb=0",
]


@pytest.fixture(autouse=True, scope="module")
def path(tmp_path_factory):
    """The tasksets can be imported, here and in the processes of a run."""
    folder = tmp_path_factory.mktemp("refused")
    spec = importlib.util.spec_from_file_location("refused", TASKSETS / "refused.py")
    refused = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(refused)
    refused.write(folder)
    sys.path[:0] = [str(TASKSETS), str(folder)]
    yield
    sys.path[:2] = []


def words(taskset, *more):
    return [*SMALL, f"data.verifiers.taskset={taskset}", *more]


def environment(taskset, *more):
    manager = PluginManager.load()
    return load_environment(compose(words(taskset, *more), manager))


def begun(taskset, *more):
    """Return an episode of the taskset's first training row, and the row."""
    own = TasksetConfig(taskset=taskset, limit=8)
    row = load(DataConfig(), "train", own)[0]
    episode = EpisodeEnvironment(environment(taskset, "data.verifiers.limit=8", *more))
    episode.reset(row, 0)
    return episode, row


def call(name, **arguments):
    return {"id": f"call-{name}", "name": name, "arguments": arguments}


def say(content):
    return {"role": "assistant", "content": content}


# Rows


def test_rows_are_the_tasks_and_some_are_held_out():
    own = TasksetConfig(taskset="sums", options={"count": 30})
    train, held_out = load(DataConfig(), "train", own), load(DataConfig(), "eval", own)
    assert (len(train), len(held_out)) == (27, 3)
    rows = {json.loads(row["verifiers"])["idx"]: row for row in [*train, *held_out]}
    assert sorted(rows) == list(range(30))
    assert rows[4]["answer"] == "5"
    assert rows[4]["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "4+1="}]
    assert load(DataConfig(), "eval", own) == held_out


def test_an_infinite_taskset_needs_a_limit():
    with pytest.raises(ConfigError, match=r"counter yields tasks without end; set data\.verifiers\.limit"):
        load(DataConfig(), "train", TasksetConfig(taskset="counter"))
    assert len(load(DataConfig(), "train", TasksetConfig(taskset="counter", limit=5))) == 4


# Episodes


def judged(taskset, replies, *, limit=8):
    """Return the reward that verifiers' own lifecycle gives the first training row for these replies."""
    own = TasksetConfig(taskset=taskset, limit=limit)
    row = json.loads(load(DataConfig(), "train", own)[0]["verifiers"])
    opened = open_taskset(own)
    (task,) = [each for each in tasks_of(opened, own) if each.data.idx == row["idx"]]
    trace = new_trace(task)

    async def judge():
        from verifiers.v1.types import AssistantMessage

        await task.setup(trace, NoRuntime("setup"))
        for reply in replies:
            from verifiers.v1.graph import MessageNode

            trace.nodes.append(
                MessageNode(parent=len(trace.nodes) - 1, message=AssistantMessage(content=reply), sampled=True)
            )
        await task.score(trace)
        return trace.reward

    return asyncio.run(judge())


@pytest.mark.parametrize(("reply", "score"), [("right", 1.0), ("99", 0.25), ("far too long", 0.0)])
def test_a_single_turn_is_scored_by_the_tasks_own_rewards(reply, score):
    episode, row = begun("sums")
    text = row["answer"] if reply == "right" else reply
    out = episode.turn(say(text), [])
    assert (out["done"], out["scores"]) == (True, [score])
    assert judged("sums", [text]) == score
    trace = episode._object._trace
    assert (trace.num_turns, trace.stop_condition, trace.metrics) == (1, "agent_completed", {"length": len(text)})
    assert [message.role for message in trace.messages] == ["system", "user", "assistant"]
    episode.close()


def test_a_turn_that_a_limit_cut_off_is_scored_as_truncated():
    episode, row = begun("sums")
    assert episode.finish(say(row["answer"])) == {"scores": [0.75]}
    assert episode._object._trace.stop_condition == "max_total_tokens"
    episode.close()


def test_tools_share_the_traces_state_and_a_stop_ends_the_episode():
    """The task's setup begins at 10; two calls of one turn add 1 and 2, and 13 is the end."""
    episode, _ = begun("counter")
    first = episode.turn(say("a"), [call("counter_fail"), {"error": "Error: not JSON"}])
    texts = [message["content"] for message in first["messages"]]
    assert texts == ["Error executing tool fail: it broke", "Error: not JSON"]
    assert (first["tool_errors"], first["done"]) == (2, False)
    second = episode.turn(say("b"), [call("counter_add", times=1), call("counter_add", times=2)])
    assert [message["content"] for message in second["messages"]] == ["count 11", "count 13"]
    # 13, 100 for the stop, 2 turns, 3 results.
    assert (second["done"], second["scores"]) == (True, [13.0 + 100 + 2000 + 30000])
    episode.close()


def test_episodes_share_no_state():
    for _ in range(2):
        episode, _ = begun("counter")
        out = episode.turn(say("a"), [call("counter_add", times=1)])
        assert out["messages"][0]["content"] == "count 11"
        assert episode.turn(say("b"), [])["scores"] == [11.0 + 2000 + 10000]
        episode.close()


def test_tools_have_the_schemas_of_the_server():
    add, fail = environment("counter", "data.verifiers.limit=8").tool_schemas
    assert add["function"]["name"] == "counter_add"
    assert add["function"]["description"] == "Add the task's step some times."
    assert add["function"]["parameters"]["required"] == ["times"]
    assert fail["function"]["name"] == "counter_fail"
    assert environment("sums").tool_schemas == []


# Refusals


@pytest.mark.parametrize(
    ("taskset", "message"),
    [
        ("refused_container", "need a container"),
        ("refused_runtime", r"Task\.runs uses the runtime"),
        ("refused_intercept", "@intercept would change turns"),
        ("refused_request", r"Task\.early is a @stop on requests or responses"),
        ("no_such_taskset", "not found"),
        ("textarena", "data.verifiers.taskset=textarena"),
    ],
)
def test_what_cannot_be_played_is_refused_with_the_reason(taskset, message):
    with pytest.raises(ConfigError, match=message):
        load(DataConfig(), "train", TasksetConfig(taskset=taskset))


def test_settings_that_cannot_be_are_refused(capsys):
    with pytest.raises(ConfigError, match=r"data.verifiers.options=\{'cuont': 3\} is refused"):
        load(DataConfig(), "train", TasksetConfig(taskset="sums", options={"cuont": 3}))
    with pytest.raises(DataError, match="has 1 tasks; two are needed"):
        load(DataConfig(), "train", TasksetConfig(taskset="sums", limit=1))
    with pytest.raises(ConfigError, match=r"needs data\.verifiers\.taskset"):
        load(DataConfig(), "train", TasksetConfig())
    assert main(["train", "algo=grpo", "env=verifiers", "data=arithmetic", "tracker=none"]) != 0
    assert "env=verifiers plays the tasks of data=verifiers, but data=arithmetic" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("taskset", "message"),
    [("refused_setup", "setup uses 'write' of its runtime"), ("refused_unscored", "has no rewards")],
)
def test_an_episode_without_what_its_task_needs_fails_and_scores_no_zero(taskset, message):
    with pytest.raises(EnvironmentFailure, match=message):
        play_one_turn(taskset)


def play_one_turn(taskset):
    episode, _ = begun(taskset)
    episode.turn(say("1"), [])


# Runs


@pytest.mark.e2e
@pytest.mark.parametrize("taskset", ["sums", "counter"])
def test_a_run_trains_on_it(tmp_path, taskset):
    small = ["data.verifiers.limit=20", "rollout.response_len=24", "trainer.total_steps=2", "algo.group_size=2"]
    small += ["data.prompt_len=2048", "data.batch_size=4"]
    assert main(["train", "algo=grpo", *words(taskset, *small), f"run.dir={tmp_path / 'run'}"]) == 0
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len([step for step in steps if "loss/policy" in step]) == 2
    assert all(step.get("episodes/failed", 0) == 0 for step in steps)


@pytest.mark.e2e
def test_the_suite_of_environments(capsys):
    given = ["data=verifiers", "data.verifiers.taskset=sums"]
    settings = [word for each in given for word in ("--set", each)]
    assert main(["plugins", "test", "env=verifiers", *settings]) == 0, capsys.readouterr().out
