"""Plays a batch of rows with a user's agent: one process for each episode, which asks this run's server for answers."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rlcore.config.environment import EnvConfig
from rlcore.engine.rollout import RolloutEngine, Sampling
from rlcore.episodes.call_queue import CallQueue
from rlcore.episodes.environment import EnvironmentFailure
from rlcore.episodes.failures import failed_row, plays_again
from rlcore.episodes.openai_format import RequestError
from rlcore.episodes.prompts import Prompts
from rlcore.episodes.rows import EpisodeRow, episode_columns
from rlcore.episodes.server import Server, ServerOptions
from rlcore.episodes.sessions import Limits, Renderers, Session
from rlcore.episodes.setup import EpisodeSetup
from rlcore.episodes.source import answer_requests
from rlcore.errors import ConfigError
from rlcore.processes import BECOME
from rlcore.processes.ends import how_it_ended, kill_group
from rlcore.protocol import DataProto
from rlcore.sandbox.variables import basic_variables

MODEL = "policy"
"""The model's name in the server's answers; agents may ask for any."""
_LONGEST_VARIABLE = 100_000  # bytes; Linux refuses variables of 128 KiB
_SHOWN = 2000  # characters of an agent's output in the cause of its failure
_POLL = 0.05  # seconds between looks at a process where the system cannot tell of its end


class AgentEpisodes:
    """See EpisodeSource. The server starts with the first batch, and serves all of them."""

    def __init__(self, setup: EpisodeSetup, engine: RolloutEngine) -> None:
        self.is_exact = False
        self.setup, self.engine = setup, engine
        self._renderers = Renderers(setup)
        self._calls = CallQueue(engine)
        self._server: Server | None = None
        self._key = secrets.token_hex(16)
        self._waited = 0.0

    def play(self, batch: DataProto, sampling: Sampling) -> DataProto:
        """See EpisodeSource."""
        env = self.setup.env
        limits = Limits(sampling, self.setup.prompt_len, max_turns=env.max_turns, turn_len=env.turn_len)
        if self._server is None:
            options = ServerOptions(MODEL, key=self._key, opens_sessions=False, most_sessions=env.concurrency)
            self._server = Server(options, self._calls, self._renderers, limits, seed=0)
            self._server.start()
        played = _Batch(self.setup, self._server, Prompts(batch, self._renderers.plain, self.setup), limits)
        self._calls.begin()
        work = self._server.run(played.play())
        work.add_done_callback(lambda _: self._calls.end())
        try:
            self._waited += answer_requests(self.engine, self._calls)
        except BaseException:
            self._calls.fail(RequestError(503, "the run ends", code="server_ending"))
            raise
        finally:
            self._server.run(played.stop()).result()
            self._calls.poll(0.0)  # what the last sessions had kept is forgotten
        rows = work.result()
        out = episode_columns(rows, self.engine.tokenizer)
        out["episode_row"] = batch.view("episode_row")[[each.row for each in rows]]
        return out

    def waited(self) -> float:
        """See EpisodeSource."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        """See EpisodeSource."""
        if self._server is not None:
            self._server.close()
            self._server = None


class _Batch:
    """The episodes of one batch, in the server's event loop."""

    def __init__(self, setup: EpisodeSetup, server: Server, prompts: Prompts, limits: Limits) -> None:
        self._setup, self._env, self._server = setup, setup.env, server
        self._prompts, self._limits = prompts, limits
        self._command = command_words(setup.env)
        # Episodes with the same prompt start together, so that it is prefilled once.
        self._waiting = deque(sorted(range(len(prompts)), key=prompts.order))
        self._rows: dict[int, list[EpisodeRow]] = {}
        self._task: asyncio.Task[Any] | None = None

    async def play(self) -> list[EpisodeRow]:
        """Play all episodes, and return their rows in the order of the batch."""
        self._task = asyncio.current_task()
        players = [asyncio.create_task(self._player()) for _ in range(min(self._env.concurrency, len(self._prompts)))]
        try:
            await asyncio.gather(*players)
        finally:
            for each in players:
                each.cancel()
            await asyncio.gather(*players, return_exceptions=True)
        return [row for _, own in sorted(self._rows.items()) for row in own]

    async def stop(self) -> None:
        """End the agents that still run."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _player(self) -> None:
        while self._waiting:
            row = self._waiting.popleft()
            self._rows[row] = await self._episode(row)

    async def _episode(self, row: int) -> list[EpisodeRow]:
        """Play an episode, again if it fails, and return its rows."""
        own, key = self._prompts.conversation(row, None), self._prompts.key(row, self._limits.sampling)
        for attempt in range(1, self._env.retries + 2):
            session = Session(
                secrets.token_hex(16),
                key,
                self._limits,
                self._server.renderers,
                own.prompt,
                self._prompts.template_kwargs(row),
            )
            self._server.store.add(session)
            try:
                await self._run_agent(session, self._task_of(row, own.messages))
                rows = session.rows(row)
                if not rows:
                    refused = f"; the last one was refused: {session.refused}" if session.refused else ""
                    raise EnvironmentFailure(f"the agent ended without an answered request{refused}")
                if session.reward is None and self._setup.needs_score:
                    raise EnvironmentFailure("the agent ended without posting a reward, which is the episode's")
                return rows
            except EnvironmentFailure as failure:
                if not plays_again(self._prompts.name(row), failure, attempt, self._env):
                    return [failed_row(row, own, failure, attempt)]
            finally:
                self._server.store.end(session.id)
                self._server.calls.forget(session.kept)
        raise AssertionError("unreachable")

    def _task_of(self, row: int, messages: list[dict[str, Any]]) -> str:
        """Return the JSON that the agent gets: the row's columns, `messages` and `seed`."""
        seed = self._prompts.seed(row, self._limits.sampling)
        task = {**self._prompts.columns(row), "messages": messages, "seed": seed}
        return json.dumps(task, default=_plain)

    async def _run_agent(self, session: Session, task: str) -> None:
        """Run the agent's process to its end. Raises EnvironmentFailure unless it ends by itself with status 0."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output:
            given.write(task.encode())
            given.seek(0)
            start = [sys.executable, "-I", "-S", str(BECOME), str(os.getpid())]
            try:
                process = subprocess.Popen(
                    [*start, *self._command],
                    stdin=given,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._variables(session, task),
                    cwd=self._setup.folder or None,
                    start_new_session=True,
                )
            except OSError as error:
                raise EnvironmentFailure(f"the agent cannot be started: {error}") from error
            session.active = time.monotonic()
            try:
                await self._wait(process, session, output)
            finally:
                kill_group(process.pid)
                code = process.wait()
            if code:
                raise EnvironmentFailure(f"the agent {how_it_ended(code)}", _tail(output))

    async def _wait(self, process: subprocess.Popen[bytes], session: Session, output: IO[bytes]) -> None:
        """Wait for the end of the process; EnvironmentFailure once it is quiet for `env.timeout` seconds."""
        ended = asyncio.create_task(_end_of(process))
        try:
            while not ended.done():
                left = self._env.timeout - session.quiet_seconds
                if left <= 0:
                    raise EnvironmentFailure(
                        f"the agent neither made a request nor ended within {self._env.timeout:g} s (env.timeout)",
                        _tail(output),
                    )
                await asyncio.wait({ended}, timeout=left)
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    def _variables(self, session: Session, task: str) -> dict[str, str]:
        url = f"{self._server.url}/sessions/{session.id}"
        variables = basic_variables([*self._env.keep_env, "PYTHONPATH"])
        # `python` is the one that runs this, as in its activated environment.
        variables["PATH"] = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), variables.get("PATH")]))
        variables |= {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": self._server.options.key,
            "RLCORE_REWARD_URL": f"{url}/reward",
        }
        return variables if len(task.encode()) > _LONGEST_VARIABLE else {**variables, "RLCORE_TASK": task}


def command_words(env: EnvConfig) -> list[str]:
    """Return the agent's command as words. Raises ConfigError without one, and for one that cannot be read."""
    try:
        words = shlex.split(env.command or "")
    except ValueError as error:
        raise ConfigError(f"env.command={env.command!r} cannot be divided into words: {error}") from error
    if not words:
        raise ConfigError('env=agent needs env.command, such as env.command="python my_agent.py"')
    return words


def check_command(env: EnvConfig) -> None:
    """Raise ConfigError for a command whose program, or whose first argument of the form FILE.py, is not there."""
    words = command_words(env)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if shutil.which(words[0], path=path) is None:
        raise ConfigError(f"env.command={env.command!r}: there is no program {words[0]!r}")
    if len(words) > 1 and words[1].endswith(".py") and not Path(words[1]).is_file():
        raise ConfigError(f"env.command={env.command!r}: there is no file {words[1]} in {Path.cwd()}")


async def _end_of(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process has ended; it is not reaped, so that its number stays its own."""
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not Linux, or an old one
        while process.poll() is None:
            await asyncio.sleep(_POLL)
        return
    ended = loop.create_future()
    loop.add_reader(descriptor, ended.cancel)
    try:
        await asyncio.wait({ended})
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _tail(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - 4 * _SHOWN))
    return output.read().decode(errors="replace")[-_SHOWN:]


def _plain(value: Any) -> Any:
    """Return numpy's and torch's values as Python's, and others as text, for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)
