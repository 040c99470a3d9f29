"""Tools of MCP servers: a server made with the package `mcp`, and correct and broken ones written by hand."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from rlcore.config import compose
from rlcore.episodes.environment import EnvironmentFailure, EpisodeEnvironment
from rlcore.episodes.mcp import load_tools
from rlcore.episodes.mcp_client import McpClient
from rlcore.episodes.processes import EnvironmentPool, pack
from rlcore.episodes.tool_calls import ToolCall, check_call
from rlcore.episodes.tool_schema import schemas_of
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager
from rlcore.training.preflight import preflight

HERE = Path(__file__).parent
REAL = f"{sys.executable} {HERE / 'mcp_server.py'}"
SCRIPT = f"{sys.executable} {HERE / 'mcp_scripts.py'}"


def config_of(command, *overrides):
    plugins = PluginManager.load()
    quoted = f'env.mcp="{command}"'
    return compose(["algo=grpo", "cluster=in_process", "env=mcp", quoted, *overrides], plugins), plugins


def load(command, *overrides):
    return load_tools(config_of(command, *overrides)[0])


def script(name):
    """A client of a script, begun."""
    client = McpClient([*SCRIPT.split(), name], seconds=20)
    client.initialize()
    return client


@pytest.fixture(scope="module")
def real():
    """The class of the real server's tools."""
    return load(REAL)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def call(name, **arguments):
    return {"id": "c1", "name": name, "arguments": arguments}


def said(environment, *calls):
    answer = environment.turn({"role": "assistant", "content": "x"}, calls)
    return [message["content"] for message in answer["messages"]], answer["tool_errors"]


# Tools


def test_the_schemas_are_the_servers(real):
    schemas = schemas_of(real)
    assert [each["function"]["name"] for each in schemas] == [
        "double",
        "step",
        "divide",
        "get-picture",
        "progress",
        "end",
        "sleep",
    ]
    double = schemas[0]["function"]
    assert double["description"] == "Double a number, and add it to the total."
    assert double["parameters"]["properties"]["number"]["type"] == "integer"
    assert double["parameters"]["required"] == ["number"]
    assert check_call(ToolCall("double", {"number": 3}, "c"), schemas) is None
    assert "wrong arguments" in check_call(ToolCall("double", {"number": "x"}, "c"), schemas).error


def test_an_episode_calls_them_and_errors_are_answered(real):
    environment = EpisodeEnvironment(real)
    environment.reset({}, 0)
    texts, errors = said(environment, call("double", number=4), call("double", number=5), call("step"))
    assert texts[:2] == ["8", "10"]
    assert texts[2].startswith("the total is 9")
    assert errors == 0
    texts, errors = said(environment, call("get-picture"), call("progress"))
    assert (texts, errors) == (["a dot\n[image image/png]", "done"], 0)
    texts, errors = said(environment, call("divide", a=1, b=0), call("double", number="x"), call("nothing"))
    assert errors == 3
    assert texts[0] == "Error executing tool divide"
    assert "valid integer" in texts[1]
    assert texts[2].startswith("Error: unknown tool 'nothing'")
    environment.close()


def test_a_server_of_the_revision_without_initialize():
    client = script("modern_only")
    assert client.tools()[0]["function"]["name"] == "double"
    assert client.call("double", {"number": 4}) == ("8", False)
    client.close()


def test_lists_of_several_pages():
    client = script("pages")
    assert [tool["function"]["name"] for tool in client.tools()] == ["echo", "second"]
    client.close()


def test_requests_of_the_server_are_answered_and_other_output_is_passed_over():
    """Its standard error holds more than a pipe does."""
    client = script("asks")
    text, failed = client.call("echo", {})
    client.close()
    assert not failed
    replies, *parts = text.split("\n")
    assert '"id": "s0", "result": {}' in replies
    assert replies.count('"code": -32601') == 2
    assert "rlcore does not answer 'sampling/createMessage'" in replies
    assert parts == ["inside", "[resource file:///b]", "[audio audio/wav]"]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("structured", ('{"a": 1}', False)),
        ("input", ("Error: the tool asks for more input, which nobody here can give", True)),
        ("error", ("Error: no such argument", True)),
        ("wrong", ("as it is", True)),
    ],
)
def test_forms_of_results(text, result):
    client = script("structured")
    assert client.call("echo", {"text": text}) == result
    client.close()


def test_a_result_of_no_form_is_a_failure():
    client = script("structured")
    with pytest.raises(EnvironmentFailure, match="answered 'echo' with the content 'text'"):
        client.call("echo", {"text": "odd"})
    client.close()


# Processes


def answers(pool, names, patience=60.0):
    found, until = {}, time.monotonic() + patience
    while set(found) < set(names):
        assert time.monotonic() < until
        found.update(pool.poll(0.1))
    return found


def turn(pool, episode, *calls):
    pool.turn(episode, {"role": "assistant", "content": "x"}, calls)


def test_each_episode_has_a_server_and_a_dead_one_fails_its_own_only(real):
    with EnvironmentPool(pack("mcp", real), processes=3, timeout=30, memory_mb=4096) as pool:
        for name in "abc":
            pool.reset(name, {}, 0)
        assert all(isinstance(each, dict) for each in answers(pool, "abc").values())
        for number, name in enumerate("ab"):
            turn(pool, name, call("double", number=number + 1), call("step"))
        turn(pool, "c", call("end", status=3))
        found = answers(pool, "abc")
        texts = [found[name]["messages"][1]["content"] for name in "ab"]
        pids = [int(text.rpartition(" ")[2]) for text in texts]
        assert [text.partition(" in ")[0] for text in texts] == ["the total is 1", "the total is 2"]
        assert len(set(pids)) == 2
        failure = found["c"]
        assert "tool 'end' failed: the MCP server ended its process with status 3 before it answered" in str(failure)
        assert "the end is near" in failure.traceback
        # A released episode's server ends; so does that of an episode whose process is killed.
        pool.release("a")
        wait_until(lambda: not is_running(pids[0]))
        pool._timeout = 0.5
        turn(pool, "b", call("sleep", seconds=600))
        assert "within 0.5 s" in str(answers(pool, "b")["b"])
        wait_until(lambda: not is_running(pids[1]))
        # The next episode begins anew.
        pool._timeout = 30.0
        pool.reset("d", {}, 0)
        answers(pool, "d")
        turn(pool, "d", call("step"))
        assert answers(pool, "d")["d"]["messages"][0]["content"].startswith("the total is 0")


def test_a_server_that_does_not_end_is_killed():
    client = script("stubborn")
    pid = client._process.pid
    start = time.monotonic()
    client.close()
    assert not is_running(pid)
    assert 1.5 <= time.monotonic() - start < 5
    client.close()


@pytest.mark.parametrize("path", [None, "mine"])
def test_servers_get_neither_secrets_nor_this_process_import_path(tmp_path, monkeypatch, path):
    (tmp_path / "here.py").write_text(
        "import json, os, sys; sys.argv[1] = 'structured'\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "import mcp_scripts\n"
        "shown = {name: os.environ.get(name) for name in ('WANDB_API_KEY', 'GIVEN', 'PYTHONPATH')}\n"
        "mcp_scripts.serve(tools=[{**mcp_scripts.TOOL, 'description': json.dumps([shown, sys.executable])}])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("GIVEN", "yes")
    monkeypatch.setenv("PYTHONPATH", path) if path else monkeypatch.delenv("PYTHONPATH", raising=False)
    tools = load("python here.py x", "env.keep_env=[GIVEN]")
    shown = [{"WANDB_API_KEY": None, "GIVEN": "yes", "PYTHONPATH": path}, sys.executable]
    assert json.loads(tools.tool_schemas[0]["function"]["description"]) == shown
    # Also in an episode's process, which compares the tools with these.
    with EnvironmentPool(pack("mcp", tools), processes=1, timeout=30, memory_mb=0, keep_env=["GIVEN"]) as pool:
        pool.reset("a", {}, 0)
        assert isinstance(answers(pool, "a")["a"], dict)


def test_tools_that_change_fail_the_episode(tmp_path):
    tools = load(f"{SCRIPT} other_tools {tmp_path / 'started'}")
    with pytest.raises(EnvironmentFailure, match=r"tools have changed since the run's start; now: \['shout'\]"):
        EpisodeEnvironment(tools).reset({}, 0)


# Faults before anything starts


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dies", r"ended its process with status 3 before it answered initialize\..*no module named nothing"),
        ("silent", r"gave no answer to initialize within 3 s"),
        ("deaf", r"closed its output before it answered initialize"),
        ("babbles", r"does not speak JSON-RPC; its output holds 'hello', which is no JSON-RPC message"),
        ("future", r"speaks version '2031-01-01' of the protocol; known are 2024-11-05, "),
        ("no_tools", r"the server has no tools"),
        ("twice", r"two tools are called 'echo'"),
        ("nameless", r"holds .*each entry must be"),
        ("no_object", r"the parameters of 'echo' are no JSON schema of an object: \{'type': 'string'\}"),
        ("no_schema", r"the parameters of 'echo' are no JSON schema: 'text' is not valid"),
        ("no_list", r"listed its tools as 'echo'"),
        ("circle", r"goes on listing tools at the cursor 'a', which is no new text"),
        ("long_line", r"wrote a line of more than 16777216 bytes"),
        ("no_result", r"answered initialize with .*, which has neither a result nor an error"),
        ("refuses", r"refused the session: not today"),
    ],
)
def test_broken_servers_are_found_before_anything_starts(name, message):
    timeout = "3" if name == "silent" else "60"
    with pytest.raises(ConfigError, match=f"(?s)env\\.mcp='.*{name}'.*{message}"):
        load(f"{SCRIPT} {name}", f"env.timeout={timeout}")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_a_server_has_the_memory_that_an_episodes_server_has():
    assert load(f"{SCRIPT} hungry", "env.memory_mb=4096").tool_schemas
    with pytest.raises(ConfigError, match=r"(?s)It may map env\.memory_mb=300 MiB; servers on Node.*MemoryError"):
        load(f"{SCRIPT} hungry", "env.memory_mb=300")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env=mcp"], r"env=mcp needs env\.mcp, the command of a server"),
        (["env=mcp", "env.mcp=no-such-program x"], r"there is no program 'no-such-program'"),
        (["env=mcp", 'env.mcp="python \'x"'], r"cannot be divided into words: No closing quotation"),
        (["env=calculator", "env.mcp=python"], r"env\.mcp='python' is read by env=mcp only, not by env=calculator"),
    ],
)
def test_a_wrong_command_is_found_by_the_preflight(overrides, message):
    plugins = PluginManager.load()
    with pytest.raises(ConfigError, match=message):
        preflight(compose(["algo=grpo", "cluster=in_process", *overrides], plugins), plugins)
