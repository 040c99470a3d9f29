"""The tools of an MCP server as an environment, env=mcp."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rlcore.config import Config
from rlcore.config.environment import EnvConfig
from rlcore.episodes.environment import EnvironmentFailure, ToolError
from rlcore.episodes.mcp_client import McpClient, ServerRefusal
from rlcore.episodes.tool_schema import given_schemas
from rlcore.errors import ConfigError
from rlcore.sandbox.variables import basic_variables


class McpTools:
    """The tools of an MCP server; each episode has a server of its own.

    `load_tools` makes subclasses. `command`, `folder`: what is started, and in which directory. `python_path`: of the
    server, as the user has set it; this process's own would lead another Python to wrong packages.
    """

    command: ClassVar[tuple[str, ...]]
    folder: ClassVar[str]
    python_path: ClassVar[str | None]
    tool_schemas: ClassVar[list[dict[str, Any]]]

    def __init__(self) -> None:
        variables = _variables(os.environ, self.python_path)
        self._client = McpClient(self.command, variables=variables, folder=self.folder)
        try:
            if (found := _listed(self._client)) != self.tool_schemas:
                names = [schema["function"]["name"] for schema in found]
                raise EnvironmentFailure(f"the MCP server's tools have changed since the run's start; now: {names}")
        except BaseException:
            self._client.close()
            raise

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of the tool's result."""
        text, failed = self._client.call(name, arguments)
        if failed:
            raise ToolError(text)
        return text

    def close(self) -> None:
        """End the server."""
        self._client.close()


def load_tools(config: Config) -> type[McpTools]:
    """Start the server of `env.mcp` once, and return the class with the tools that it lists.

    It runs as an episode's server does: the same variables, directory and limit of memory. Raises ConfigError, with the
    tail of its standard error, for a server that cannot be started, dies, answers nothing within `env.timeout`, breaks
    the protocol, or has no tools.
    """
    env = config.section(EnvConfig)
    command, folder = command_words(env), os.getcwd()
    kept = basic_variables(env.keep_env)
    python_path = os.environ.get("PYTHONPATH")
    try:
        client = McpClient(
            command,
            variables=_variables(kept, python_path),
            folder=folder,
            memory_mb=env.memory_mb,
            seconds=env.timeout,
        )
        try:
            tools = _listed(client)
        finally:
            client.close()
    except EnvironmentFailure as failure:
        cause = f"env.mcp={env.mcp!r}: {failure.cause}"
        if env.memory_mb and "ended" in failure.cause:
            cause += f". It may map env.memory_mb={env.memory_mb} MiB; servers on Node.js may need more (0: no limit)"
        if failure.traceback.strip():
            cause += f". Its standard error ends with:\n{failure.traceback}"
        raise ConfigError(cause) from failure
    if not tools:
        raise ConfigError(f"env.mcp={env.mcp!r}: the server has no tools")
    schemas = given_schemas(tools, f"env.mcp={env.mcp!r}")
    members = {"command": command, "folder": folder, "python_path": python_path, "tool_schemas": schemas}
    return type("McpServerTools", (McpTools,), members)


def check_command(config: Config) -> None:
    """Raise ConfigError for a missing command, and for one whose program is not there."""
    env = config.section(EnvConfig)
    words = command_words(env)
    if shutil.which(words[0], path=_path(os.environ)) is None:
        raise ConfigError(f"env.mcp={env.mcp!r}: there is no program {words[0]!r}")


def command_words(env: EnvConfig) -> tuple[str, ...]:
    """Return the words of `env.mcp`. Raises ConfigError without one, and for one that cannot be divided."""
    try:
        words = tuple(shlex.split(env.mcp or ""))
    except ValueError as error:
        raise ConfigError(f"env.mcp={env.mcp!r} cannot be divided into words: {error}") from error
    if not words:
        raise ConfigError('env=mcp needs env.mcp, the command of a server, such as env.mcp="python server.py"')
    return words


def _listed(client: McpClient) -> list[dict[str, Any]]:
    """Begin the session and return the server's tools."""
    try:
        client.initialize()
        return client.tools()
    except ServerRefusal as refusal:
        raise EnvironmentFailure(f"the MCP server refused the session: {refusal}") from refusal


def _path(variables: Mapping[str, str]) -> str:
    """Return the search path for programs: first the folder of this Python, as in its activated environment."""
    return os.pathsep.join([str(Path(sys.executable).parent), variables.get("PATH") or os.defpath])


def _variables(given: Mapping[str, str], python_path: str | None) -> dict[str, str]:
    """Return a server's environment variables."""
    variables = {**given, "PATH": _path(given)}
    variables.pop("PYTHONPATH", None)
    return variables if python_path is None else {**variables, "PYTHONPATH": python_path}
