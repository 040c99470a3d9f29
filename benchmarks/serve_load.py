"""`rlcore serve` under load: 200 sessions at a time for ten minutes, with no error and no growth of memory.

`python -m benchmarks.serve_load [SECONDS]`: a number of seconds other than 600 writes no results.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.report import Benchmark, Figure, at_most
from benchmarks.start import environment

SESSIONS = 200
SECONDS = 600
TURNS = 3
EVERY = 5.0
"""Seconds between two looks at the server's memory."""
ERRORS = at_most("errors", 0.0)
GROWTH = at_most("growth of the resident set (MiB)", 32.0)
BENCHMARK = Benchmark(
    "serve",
    measures=(
        *("rlcore/episodes", "rlcore/commands/serve.py", "rlcore/engine", "rlcore/engines/hf"),
        "benchmarks/serve_load.py",
    ),
    bars=(ERRORS, GROWTH),
    command="python -m benchmarks.serve_load",
)
NOTES = f"""\
`rlcore serve tiny` in a process of its own; {SESSIONS} clients over loopback, each opening one session after another:
{TURNS} turns of a conversation, a fork, a stream, a reward, and the end, which returns the captured rows. Each answer
and each captured row is checked. Memory: the server's resident set, looked at every {EVERY:g} s; its growth is the
median of the last quarter of the time less that of the second. Clients and server share the machine's cores, here with
other work on them."""


@dataclass
class Seen:
    """What the clients have counted."""

    requests: int = 0
    sessions: int = 0
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


async def client(number: int, http: httpx.AsyncClient, until: float, seen: Seen) -> None:
    """Open session after session until the time is over."""
    while time.monotonic() < until:
        try:
            await one_session(number + seen.sessions, http, seen)
        except Exception as error:
            seen.errors[f"{type(error).__name__}: {error}"[:200]] += 1


async def one_session(number: int, http: httpx.AsyncClient, seen: Seen) -> None:
    """Play one session, and check its rows."""

    async def call(path: str, body: dict) -> httpx.Response:
        start = time.perf_counter()
        response = await http.post(path, json=body)
        seen.seconds.append(time.perf_counter() - start)
        seen.requests += 1
        assert response.is_success, response.text
        return response

    session = (await call("/sessions", {})).json()["session_id"]
    path = f"/sessions/{session}/v1/chat/completions"
    messages = [{"role": "user", "content": f"{number % 97}+{number % 89}="}]
    for turn in range(TURNS):
        answer = (await call(path, {"messages": messages, "max_tokens": 12})).json()
        seen.tokens += answer["usage"]["completion_tokens"]
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"and {turn}+1="}]
    fork = [*messages[:2], {"role": "user", "content": "another way"}]
    stream = await call(path, {"messages": fork, "max_tokens": 12, "stream": True})
    assert stream.text.endswith("data: [DONE]\n\n"), stream.text
    await call(f"/sessions/{session}/reward", {"reward": 1.0})
    ended = (await call(f"/sessions/{session}/end", {})).json()
    assert ended["reward"] == 1.0, ended
    assert len(ended["rows"]) == 2, ended
    assert max(sum(each["role"] == "assistant" for each in row["messages"]) for row in ended["rows"]) == TURNS, ended
    seen.sessions += 1


def resident(pid: int) -> float:
    """Return a process's resident set, in MiB (Linux)."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", text)[0]) / 1024


async def watch(pid: int, until: float, megabytes: list[float]) -> None:
    """Look at the server's memory again and again."""
    while time.monotonic() < until:
        megabytes.append(resident(pid))
        await asyncio.sleep(EVERY)


async def load(url: str, pid: int, seconds: float) -> tuple[Seen, list[float]]:
    """Return what the clients and the watch have seen."""
    seen, megabytes, until = Seen(), [], time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        clients = [client(number, http, until, seen) for number in range(SESSIONS)]
        await asyncio.gather(watch(pid, until, megabytes), *clients)
        health = (await http.get("/health")).json()
    if health["sessions"]:
        seen.errors[f"{health['sessions']} sessions are left"] += 1
    return seen, megabytes


def run(seconds: float) -> tuple[Seen, list[float]]:
    """Serve the tiny model in a process of its own, under load."""
    command = [sys.executable, "-m", "rlcore.cli", "serve", "tiny", "--port", "0", "rollout.hf.batch_size=256"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as server:
        assert server.stdout is not None
        try:
            found = re.search(r"at (http://\S+)/v1;", line := server.stdout.readline())
            assert found, line
            return asyncio.run(load(found[1], server.pid, seconds))
        finally:
            server.terminate()
            assert server.wait(60) == 0


def main(seconds: float = SECONDS) -> bool:
    """Measure and write the results."""
    seen, megabytes = run(seconds)
    quarter = len(megabytes) // 4
    growth = statistics.median(megabytes[-quarter:]) - statistics.median(megabytes[quarter : 2 * quarter])
    ranked = sorted(seen.seconds)
    for error, count in seen.errors.most_common(5):
        print(f"{count} times: {error}")
    figures = [
        Figure("rlcore serve", "sessions", "1/s", [seen.sessions / seconds]),
        Figure("rlcore serve", "requests", "1/s", [seen.requests / seconds]),
        Figure("rlcore serve", "sampled tokens", "1/s", [seen.tokens / seconds]),
        Figure("rlcore serve", "time of a request, median", "s", [statistics.median(ranked)]),
        Figure("rlcore serve", "time of a request, 99th of a hundred", "s", [ranked[int(0.99 * len(ranked))]]),
        Figure("rlcore serve", "resident set", "MiB", megabytes[:: max(1, len(megabytes) // 12)]),
    ]
    bars = [ERRORS.at(float(sum(seen.errors.values()))), GROWTH.at(growth)]
    if seconds != SECONDS:
        print(*(f"{each.name}: {each.summary['median']:.4g} {each.unit}" for each in figures), sep="\n")
        print(*(f"{each.name}: {each.value:.4g}" for each in bars), sep="\n")
        return all(bar.holds for bar in bars)
    return BENCHMARK.write(figures, bars, NOTES)


if __name__ == "__main__":
    sys.exit(0 if main(*map(float, sys.argv[1:2])) else 1)
