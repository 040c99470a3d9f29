"""The environment `verifiers`: one task of a taskset, with its tools, stops and rewards.

verifiers' trace of the episode is built turn by turn, and the task's own `score` judges it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rlcore import Config, ConfigError
from rlcore.episodes import EnvironmentFailure, ToolError
from rlcore_plugin_verifiers.config import TasksetConfig
from rlcore_plugin_verifiers.tasksets import open_taskset, task_of, toolsets_of


def load_environment(config: Config) -> type[VerifiersEpisode]:
    """Return the class of the episodes of `data.verifiers.taskset`, with the schemas of its tools.

    Raises ConfigError for another data set, and for a taskset that cannot be played.
    """
    if config.data.name != "verifiers":
        raise ConfigError(f"env=verifiers plays the tasks of data=verifiers, but data={config.data.name}; set both")
    import asyncio

    own = config.section(TasksetConfig)
    taskset = open_taskset(own)
    tools = asyncio.run(_Tools.open(toolsets_of(taskset), None))
    return type("VerifiersTask", (VerifiersEpisode,), {"settings": own, "tool_schemas": tools.schemas})


class VerifiersEpisode:
    """One task. `load_environment` makes subclasses; `settings` and `tool_schemas` are the taskset's."""

    settings: ClassVar[TasksetConfig]
    tool_schemas: ClassVar[list[dict[str, Any]]]
    _taskset: ClassVar[Any] = None

    def __init__(self) -> None:
        self.done = False

    async def reset(self, verifiers: str) -> None:
        """Begin the task whose data the row holds; its prompt is the row's."""
        if type(self)._taskset is None:
            type(self)._taskset = open_taskset(self.settings)
        self._task = task_of(self._taskset, json.loads(verifiers))
        self._trace = new_trace(self._task)
        await self._task.setup(self._trace, NoRuntime("setup"))
        self._tools = await _Tools.open(toolsets_of(self._taskset), self._task.data, self._trace)

    async def on_turn(self, message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> None:
        """Add the policy's turn to the trace; a @stop that holds before the next turn ends the episode."""
        from verifiers.v1.types import AssistantMessage, ToolCall

        read = [call for call in calls if "error" not in call]
        named = [
            ToolCall(id=call.get("id") or str(number), name=call["name"], arguments=json.dumps(call["arguments"]))
            for number, call in enumerate(read)
        ]
        self._pending = [call.id for call in named]
        turn = AssistantMessage(content=message["content"], tool_calls=named or None)
        add_message(self._trace, turn, sampled=True, finish_reason="tool_calls" if named else "stop")

    def step(self, messages: list[dict[str, Any]]) -> None:
        """End the episode: a turn without tool calls is the agent's last."""
        self._trace.stop("agent_completed")

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the tool's text, and add it to the trace."""
        from verifiers.v1.types import ToolMessage

        text, failed = await self._tools.call(name, arguments)
        add_message(self._trace, ToolMessage(tool_call_id=self._pending.pop(0), content=text, name=name))
        self.done = not self._pending and await self._stopped()
        if failed:
            raise ToolError(text)
        return text

    async def score(self) -> float:
        """Return the sum of the task's weighted rewards."""
        self._trace.stop("max_total_tokens")  # without effect if a turn or a @stop has ended the episode
        await self._task.finalize(self._trace, NoRuntime("finalize"))
        self._trace.is_completed = self._trace.ok = True
        await self._task.score(self._trace)
        if missing := [name for name, reward in self._trace.rewards.items() if reward is None]:
            raise EnvironmentFailure(
                f"the rewards {', '.join(missing)} of {type(self._task).__name__} were not computed"
            )
        if not self._trace.rewards:
            raise EnvironmentFailure(f"{type(self._task).__name__} has no rewards, so its episodes have no score")
        return float(self._trace.reward)

    async def _stopped(self) -> bool:
        """Whether a @stop of the task holds; its name then is the trace's stop condition."""
        from verifiers.v1.trace import Trace
        from verifiers.v1.utils.decorators import invoke

        for stop in self._task.hooks("stop"):
            held = invoke(stop, {"trace": self._trace, Trace: self._trace})
            if (await held) if hasattr(held, "__await__") else held:
                self._trace.stop(stop.__name__)
                return True
        return False


class NoRuntime:
    """Stands in for the runtime of a task's hook, which may take one and leave it alone."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        raise EnvironmentFailure(
            f"the task's {self._hook} uses {name!r} of its runtime, and rlcore's episodes have no runtime"
        )


class _Tools:
    """The tools of some tool servers, in this process."""

    def __init__(self) -> None:
        self.schemas: list[dict[str, Any]] = []
        self._servers: dict[str, tuple[Any, str]] = {}

    @staticmethod
    async def open(toolsets: Sequence[Any], data: Any, trace: Any = None) -> _Tools:
        """Set up the servers, for a task's data unless it is None; their state is the trace's."""
        from mcp.server.mcpserver import MCPServer

        tools = _Tools()
        for toolset in toolsets:
            if trace is not None:
                _share_state(toolset, trace)
                await toolset.setup()
                await toolset.setup_task(data)
            server = MCPServer(toolset.server_name or type(toolset).__name__)
            toolset.register(server)
            for tool in await server.list_tools():
                name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
                tools._servers[name] = server, tool.name
                function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
                tools.schemas.append({"type": "function", "function": function})
        return tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the text of a tool's result, and whether the call failed."""
        from mcp.server.mcpserver.exceptions import ToolError as Failed

        server, own_name = self._servers[name]
        try:
            result = await server.call_tool(own_name, dict(arguments))
        except Failed as error:
            return str(error), True
        return "\n".join(part.text for part in result.content if part.type == "text"), bool(result.is_error)


def _share_state(toolset: Any, trace: Any) -> None:
    """Let a tool server read and write the trace's state; verifiers itself sends it between processes."""

    async def pull() -> Any:
        return trace.state

    async def push(before: bytes) -> None:
        pass

    toolset._pull_state, toolset._push_state = pull, push


def new_trace(task: Any) -> Any:
    """Return the trace of a task that begins, with its prompt's messages."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import SystemMessage, UserMessage

    recorded = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    trace: Any = Trace(task=recorded, agent=AgentInfo(config=AgentConfig()))
    trace.state = state_cls(type(task))()
    data = task.data
    if data.system_prompt is not None:
        add_message(trace, SystemMessage(content=data.system_prompt))
    for message in [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt:
        add_message(trace, message)
    return trace


def add_message(trace: Any, message: Any, *, sampled: bool = False, finish_reason: str | None = None) -> None:
    """Append a message to the trace's only branch, and the model's call for one that it sampled."""
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import ModelCall

    parent = len(trace.nodes) - 1 if trace.nodes else None
    trace.nodes.append(MessageNode(parent=parent, message=message, sampled=sampled))
    if sampled:
        trace.calls.append(ModelCall(node=len(trace.nodes) - 1, finish_reason=finish_reason))
