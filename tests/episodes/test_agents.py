"""env=agent: episodes played by processes of an agent that knows nothing of rlcore."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcore.assets import TINY
from rlcore.config import ModelConfig, compose
from rlcore.config.environment import EnvConfig
from rlcore.data.chat import OfferedTools, PromptEncoder, load_tokenizer
from rlcore.engine.rollout import Sampling
from rlcore.episodes.agents import AgentEpisodes
from rlcore.episodes.setup import EpisodeSetup
from rlcore.episodes.tool_calls import FORMATS
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager
from rlcore.protocol import DataProto, Ragged
from rlcore.training.trainer import train

MODEL = ModelConfig(path=str(TINY))
SAMPLING = Sampling(max_tokens=60, seed=3, step=1)
AGENT = Path(__file__).with_name("agent.py")


def batch_of(groups=2, size=2):
    """Return rows of arithmetic prompts."""
    encoder = PromptEncoder(load_tokenizer(MODEL))
    texts = [f"{number}{number}+{number}=" for number in range(1, groups + 1) for _ in range(size)]
    tokens = encoder.token_ids([encoder.render(text) for text in texts])
    return DataProto.from_dict(
        {
            "prompts": Ragged.from_list(tokens, dtype=torch.int64),
            "sample_index": torch.arange(size).repeat(groups),
            "episode_row": torch.arange(groups * size),
        },
        {"uid": [f"0-{number}" for number in range(groups) for _ in range(size)], "prompt_text": texts},
    )


@pytest.fixture
def play(tiny_engine, tmp_path, monkeypatch):
    """Play a batch with the agent, in one of its ways, and return the rows."""
    monkeypatch.setenv("FLAKY", f"{tmp_path}/")
    opened = []

    def run(how, batch, *, sampling=SAMPLING, prompt_len=100, model=MODEL, **keys):
        env = EnvConfig(
            name="agent",
            **{"command": f"python {AGENT} {how}", "timeout": 60.0, "keep_env": ["FLAKY"], "concurrency": 4, **keys},
        )
        forms = FORMATS["hermes"]
        setup = EpisodeSetup(env, model, None, (), forms, OfferedTools(), AgentEpisodes, prompt_len=prompt_len)
        source = setup.open(tiny_engine)
        opened.append(source)
        out = source.play(batch, sampling)
        assert not tiny_engine.in_flight
        assert not tiny_engine._kept
        assert not source._server.store.sessions
        source.close()
        return out

    yield run
    for source in opened:
        source.close()


def tokens(out, name="responses"):
    return [row.tolist() for row in out[name].to_list()]


def test_a_rows_template_arguments_hold_in_its_agents_calls(play):
    template = AGENT.parent / "templates" / "thinking.jinja"
    model, batch = replace(MODEL, chat_template=str(template)), batch_of(2, 1)
    batch.non_tensor_batch["chat_template_kwargs"] = np.array([{"enable_thinking": False}, None], dtype=object)
    prompts = map(load_tokenizer(model).decode, tokens(play("once", batch, model=model), "prompts"))
    assert [each.rpartition("<|assistant|>")[2] for each in prompts] == ["<think></think>", "<think>\n"]


def test_an_agent_of_one_call_samples_what_generate_does(tiny_engine, play):
    batch = batch_of()
    want, got = tiny_engine.generate(batch, SAMPLING), play("once", batch)
    assert tokens(got) == tokens(want)
    assert tokens(got, "prompts") == tokens(batch, "prompts")
    assert got["response_text"].tolist() == want["response_text"].tolist()
    torch.testing.assert_close(got["rollout_log_probs"].values, want["rollout_log_probs"].values, atol=1e-5, rtol=0)
    assert got["episode_score"].tolist() == [float(len(text)) for text in want["response_text"]]
    assert got["episode_row"].tolist() == [0, 1, 2, 3]
    assert set(got["episode_error"]) == {None}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["turns", "several"])
def test_rows_are_the_same_whatever_the_concurrency(play, how):
    batch = batch_of()
    want = play(how, batch, concurrency=1)
    got = play(how, batch, concurrency=8)
    for name in ("prompts", "responses", "response_mask", "turn_ends"):
        assert tokens(got, name) == tokens(want, name)
    torch.testing.assert_close(got["rollout_log_probs"].values, want["rollout_log_probs"].values, atol=1e-5, rtol=0)
    assert want["turns"].tolist() == [2] * len(want)
    assert want["branch"].tolist() == ([0] * 4 if how == "turns" else [0, 1, 2] * 4)
    assert want["episode_row"].tolist() == (
        [0, 1, 2, 3] if how == "turns" else [row for row in range(4) for _ in "abc"]
    )


def test_a_failed_agent_is_played_again_with_the_same_seed(play):
    batch = batch_of(size=1)
    want = play("once", batch)
    got = play("flaky", batch, retries=1)
    assert tokens(got) == tokens(want)
    assert set(got["episode_error"]) == {None}


@pytest.mark.parametrize(
    ("how", "cause", "detail"),
    [
        ("broken", "the agent ended its process with status 1", "RuntimeError: this agent is broken"),
        ("silent", "the agent ended without an answered request", ""),
        ("quiet", "neither made a request nor ended within 3 s", ""),
    ],
)
def test_a_failure_is_a_row_with_its_cause_and_no_score(play, how, cause, detail):
    out = play(how, batch_of(groups=1, size=1), retries=0, timeout=3.0 if how == "quiet" else 60.0)
    (error,) = out["episode_error"]
    assert cause in error["cause"]
    assert detail in error["traceback"]
    assert error["attempts"] == 1
    assert out["episode_score"].tolist() == [None]
    assert out["stop_reason"].tolist() == ["failed"]
    assert tokens(out) == [[]]


def test_a_refused_prompt_is_named_in_the_failure(play):
    out = play("once", batch_of(groups=1, size=1), retries=0, prompt_len=3)
    assert "data.prompt_len=3" in out["episode_error"][0]["traceback"]


def test_limits_end_an_agent_with_an_error_that_it_can_read(play):
    turns = play("endless", batch_of(size=1), max_turns=3)
    assert turns["turns"].tolist() == [3, 3]
    assert set(turns["stop_reason"]) == {"turns"}
    assert turns["episode_score"].tolist() == [None, None]
    length = play("endless", batch_of(size=1), max_turns=100, sampling=Sampling(max_tokens=30, seed=3))
    assert set(length["stop_reason"]) == {"length"}
    assert max(length["response_length"].tolist()) <= 30


def test_nothing_that_an_agent_started_is_left(play, tmp_path):
    play("leaves", batch_of(groups=1, size=1))
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + 10
    while _runs(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _runs(child)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_agents_get_no_other_variables_than_those_that_are_kept(play, monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    script = tmp_path / "look.py"
    script.write_text(
        "import os, openai\n"
        "assert 'SECRET_TOKEN' not in os.environ\n"
        "with openai.OpenAI() as client:\n"
        "    client.completions.create(model='m', prompt='1+1=', max_tokens=2)\n"
    )
    out = play("", batch_of(groups=1, size=1), command=f"python {script}", retries=0)
    assert out["episode_error"][0] is None


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ([], "env.command"),
        (["env.command='no-such-program x'"], "no program"),
        (["env.command='python missing.py'"], "no file missing.py"),
        (['env.command="python \'x"'], "words"),
    ],
)
def test_a_command_that_cannot_run_is_refused_before_anything_starts(keys, part):
    from rlcore.episodes.from_config import check_environment

    plugins = PluginManager.load()
    config = compose(["algo=grpo", "model=tiny", "data=arithmetic", "env=agent", *keys], plugins)
    with pytest.raises(ConfigError, match=part):
        check_environment(config, plugins)


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_grpo_trains_on_an_agent(tmp_path):

    plugins = PluginManager.load()
    overrides = ["experiment=quickstart", "cluster=in_process", "tracker=none", "env=agent", "env.timeout=120"]
    overrides += [f"env.command='python {AGENT} turns'", "env.concurrency=4", "rollout.response_len=40"]
    overrides += [
        "trainer.total_steps=2",
        "trainer.eval_every=0",
        "data.batch_size=2",
        "data.max_rows=128",
        "data.eval_size=2",
    ]
    overrides += ["algo.group_size=2", "trainer.seed=1"]
    train(compose([*overrides, f"run.dir={tmp_path / 'run'}"], plugins), plugins)

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "episodes/played" in line]
    assert [line["episodes/played"] for line in steps] == [4, 4]
    assert [line["episodes/failed"] for line in steps] == [0, 0]
    assert not [name for name in os.listdir("/proc") if name.isdigit() and _is_agent(name)]


def _is_agent(pid):
    try:
        return str(AGENT) in Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_in_a_run_an_episode_counts_once_for_all_its_branches(tmp_path):
    """Each episode has three branches; the agent gives no reward, and a function scores the texts of a branch."""
    plugins = PluginManager.load()
    reward = tmp_path / "letters.py"
    reward.write_text(
        "def score(prompt, response, answer, episode_messages, **columns):\n"
        "    return float(sum(ord(c) for each in episode_messages for c in each['content']))\n"
    )
    overrides = ["experiment=quickstart", "cluster=in_process", "tracker=none", "env=agent", "env.timeout=120"]
    overrides += [f"env.command='python {AGENT} several'", f"reward.path={reward}:score", "rollout.response_len=60"]
    overrides += [
        "data.batch_size=2",
        "algo.group_size=2",
        "data.eval_size=2",
        "trainer.eval_samples=2",
    ]
    overrides += [
        "trainer.total_steps=1",
        "trainer.eval_every=1",
        "trainer.samples_per_step=12",
        f"run.dir={tmp_path / 'run'}",
    ]
    train(compose(overrides, plugins), plugins)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (files,) = (tmp_path / "run" / "samples").glob("*1.jsonl")
    rows = [json.loads(line) for line in files.read_text().splitlines()]
    scores = {}
    for row in rows:
        scores.setdefault(row["episode"], set()).add(row["scores"])
    assert len(rows) == 12
    assert [len(own) for own in scores.values()] == [1] * 4, "each branch has its episode's score"
    for episode, own in scores.items():
        said = [row["episode_messages"] for row in rows if row["episode"] == episode]
        assert list(own) == pytest.approx(
            [sum(ord(c) for messages in said for each in messages for c in each["content"]) / 3]
        )
    assert len({str(row["episode_messages"]) for row in rows[:3]}) > 1, "the branches say different things"
    means = [next(iter(own)) for own in scores.values()]
    step = next(row for row in metrics if "reward/mean" in row)
    assert step["reward/mean"] == pytest.approx(sum(means) / 4)
    assert [row["eval/samples"] for row in metrics if "eval/samples" in row] == [4.0] * 2
