"""The built-in environments, as a plugin."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore import Config, ConfigError, EnvironmentSpec, ToolFormatSpec, hookimpl
from rlcore.config.environment import EnvConfig
from rlcore.config.schema import option
from rlcore.episodes.environment import EnvironmentFailure, ToolError
from rlcore.errors import SandboxError
from rlcore.sandbox import Interpreter, Limits, isolation, log_isolation

if TYPE_CHECKING:
    from rlcore.engine.rollout import EpisodeSource, RolloutEngine
    from rlcore.episodes.setup import EpisodeSetup

RLCORE_API = 1


class SingleTurn:
    """One response to each prompt, as `generate` gives it, on the path of episodes."""


class Calculator:
    """A tool for arithmetic."""

    def calculate(self, expression: str) -> str:
        """Return the value of an arithmetic expression.

        Args:
            expression: numbers with + - * / // % ** and parentheses, such as (3 + 4) * 12
        """
        return _number(evaluate(expression))


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_LONGEST = 200
_MARGIN = 5.0  # seconds
_LARGEST_POWER = 1000


def evaluate(expression: str) -> int | float:
    """Return the value of an arithmetic expression of at most 200 characters.

    Raises ValueError for anything but numbers, the seven operators and parentheses, and for powers beyond 1000 digits;
    ArithmeticError for a division by zero.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_LONGEST} are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression: {error.msg}") from error
    return _value(tree.body, expression)


def _value(node: ast.expr, expression: str) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        result: int | float = _UNARY[type(node.op)](_value(node.operand, expression))
        return result
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left, expression), _value(node.right, expression)
        if isinstance(node.op, ast.Pow) and (abs(right) > _LARGEST_POWER or abs(left) > _LARGEST_POWER):
            raise ValueError(f"{left}**{right} is too large; base and exponent are at most {_LARGEST_POWER}")
        result = _BINARY[type(node.op)](left, right)
        if isinstance(result, complex):
            raise ValueError(f"{left}**{right} is not a real number")
        return result
    raise ValueError(f"{expression!r} holds {type(node).__name__}; only numbers, + - * / // % ** and parentheses count")


def _number(value: int | float) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


@dataclass(frozen=True)
class PythonConfig:
    """The limits of the code that the policy runs."""

    seconds: float = option(10.0, "seconds that one call may take; then the interpreter's state is lost", min=0.1)
    memory_mb: int = option(512, "address space of each process of the code, in MiB", min=64)
    processes: int = option(16, "most processes and threads of the code at a time", min=1)
    output_kb: int = option(64, "most output of one call, in KiB, of each of the two streams; the rest is cut", min=1)


class Python:
    """A Python interpreter for the policy, isolated from this machine (docs/sandbox.md). It keeps its variables."""

    def __init__(self, config: PythonConfig) -> None:
        limits = Limits(
            config.seconds, memory_mb=config.memory_mb, processes=config.processes, output_kb=config.output_kb
        )
        self._interpreter = Interpreter(limits)

    @staticmethod
    def prepare_process() -> None:
        """Try once what this machine can enforce, for all episodes' processes."""
        isolation()

    def python(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of its last expression.

        Args:
            code: the code; variables of earlier calls are kept
        """
        try:
            result = self._interpreter.execute(code)
        except SandboxError as error:
            raise EnvironmentFailure(str(error)) from error
        cut = "(the output was longer; the rest is left out)" if result.cut else ""
        lost = f"Error: {result.cause}" if result.status is None else ""
        text = "\n".join(part for part in (result.stdout.rstrip(), result.stderr.rstrip(), cut, lost) if part)
        if not result.ok:
            raise ToolError(text)
        return text or "(no output)"

    def close(self) -> None:
        """End the interpreter."""
        self._interpreter.close()


def _load_file(config: Config) -> Any:
    path = config.section(EnvConfig).path
    if path is None:
        raise ConfigError("env=file needs env.path=FILE.py:NAME, a class, a function or a list of functions")
    file = Path(path.rpartition(":")[0]).expanduser()
    return _loaded(path, file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(maxsize=8)
def _loaded(path: str, changed: int) -> Any:
    """Load the file once, however often a run's checks ask; `changed` is its time of change."""
    from rlcore.episodes.processes import load_from_file

    return load_from_file(path)[0]


def _check_python(config: Config) -> None:
    seconds, timeout = config.section(PythonConfig).seconds, config.section(EnvConfig).timeout
    if timeout < seconds + _MARGIN:
        raise ConfigError(
            f"env.timeout={timeout:g} is less than env.python.seconds={seconds:g} and {_MARGIN:g} s to start the "
            "interpreter: code that takes too long would fail its episode, and not be answered; raise env.timeout"
        )


def _load_mcp(config: Config) -> Any:
    from rlcore.episodes.mcp import load_tools

    return load_tools(config)


def _check_mcp(config: Config) -> None:
    from rlcore.episodes.mcp import check_command

    check_command(config)


def _play_agents(setup: EpisodeSetup, engine: RolloutEngine) -> EpisodeSource:
    from rlcore.episodes.agents import AgentEpisodes

    return AgentEpisodes(setup, engine)


def _check_agent(config: Config) -> None:
    from rlcore.episodes.serve_options import require_server

    require_server("env=agent")
    from rlcore.episodes.agents import check_command

    check_command(config.section(EnvConfig))


@hookimpl
def rlcore_environments() -> list[EnvironmentSpec]:
    """Return the built-in environments."""
    return [
        EnvironmentSpec("single_turn", SingleTurn),
        EnvironmentSpec("calculator", Calculator),
        EnvironmentSpec(
            "python", Python, config_class=PythonConfig, check=_check_python, on_start=log_isolation, scores=False
        ),
        EnvironmentSpec("file", load=_load_file),
        EnvironmentSpec("mcp", load=_load_mcp, scores=False, check=_check_mcp),
        EnvironmentSpec("agent", play=_play_agents, scores=True, check=_check_agent),
    ]


@hookimpl
def rlcore_tool_formats() -> list[ToolFormatSpec]:
    """Return the built-in forms of tool calls."""
    from rlcore.episodes.tool_calls import FORMATS

    return [ToolFormatSpec(name, form) for name, form in FORMATS.items()]
