"""`rlcore serve` as a process: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

from rlcore.cli import main

pytestmark = pytest.mark.timeout(200)  # whole commands
QUESTION = [{"role": "user", "content": "12+34="}]


@pytest.fixture
def start():
    """Start `rlcore serve` with these words, and return the process and its address."""
    started = []

    def run(*words, **variables):
        process = subprocess.Popen(
            [sys.executable, "-m", "rlcore.cli", "serve", *words, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        )
        started.append(process)
        line = process.stdout.readline()
        found = re.match(r"serving (\S+) at (http://\S+)/v1;", line)
        assert found, line + process.stderr.read()
        return process, found[2]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_model_folder_is_served_until_a_signal(start, number):
    process, url = start("tiny", "rollout.response_len=8", "data.prompt_len=16", RLCORE_SERVE_KEY="k")
    headers = {"Authorization": "Bearer k"}
    assert httpx.get(f"{url}/v1/models").status_code == 401
    answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION}, headers=headers, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] <= 8
    long = httpx.post(
        f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "1" * 30}]}, headers=headers
    )
    assert long.json()["error"]["code"] == "context_length_exceeded"
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


@pytest.mark.e2e
def test_a_run_is_served_with_the_weights_of_its_newest_checkpoint(start, tmp_path):
    run = tmp_path / "run"
    words = [
        "experiment=quickstart",
        "cluster=in_process",
        "tracker=none",
        "trainer.total_steps=1",
        "data.max_rows=128",
        "data.eval_size=2",
    ]
    words += ["data.batch_size=2", "rollout.response_len=4", "trainer.eval_every=0", f"run.dir={run}"]
    assert main(["train", *words]) == 0
    _, url = start(str(run))
    answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 50}, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] <= 4  # the run's rollout.response_len
    assert answer.json()["model"] == "run"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "the first word"),
        (["missing"], "does not exist"),
        (["tiny", "--host", "0.0.0.0"], "RLCORE_SERVE_KEY"),
        (["tiny", "--host", "::"], "RLCORE_SERVE_KEY"),
        (["tiny", "--max-sessions", "0"], "--max-sessions"),
        (["tiny", "cluster=local"], "cluster"),
        (["tiny", "rollout.temprature=1"], "temperature"),
    ],
)
def test_wrong_words_are_refused(words, part, capsys, monkeypatch):
    monkeypatch.delenv("RLCORE_SERVE_KEY", raising=False)
    assert main(["serve", *words]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.e2e
def test_a_port_in_use_is_named(start):
    _, url = start("tiny")
    port = url.rpartition(":")[2]
    again = subprocess.run(
        [sys.executable, "-m", "rlcore.cli", "serve", "tiny", "--port", port], capture_output=True, text=True
    )
    assert again.returncode == 2
    assert f"port {port}" in again.stderr
