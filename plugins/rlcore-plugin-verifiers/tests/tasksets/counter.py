"""A counter that the tools move; its state is the trace's, and a @stop ends the episode at 3."""

import verifiers.v1 as vf

__all__ = ["CounterTaskset"]


class CounterState(vf.State):
    count: int = 0


class CounterToolset(vf.Toolset[vf.ToolsetConfig, CounterState]):
    TOOL_PREFIX = "counter"

    async def setup_task(self, task):
        self.step = task.step

    @vf.tool
    def add(self, times: int) -> str:
        """Add the task's step some times."""
        self.state.count += times * self.step
        return f"count {self.state.count}"

    @vf.tool
    async def fail(self) -> str:
        """Fail."""
        raise ValueError("it broke")


class CounterData(vf.TaskData):
    step: int


class CounterConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class CounterTask(vf.Task[CounterData, CounterState, CounterConfig]):
    @classmethod
    def toolsets(cls, config):
        return [CounterToolset(config.tools)]

    async def setup(self, trace, runtime):
        trace.state.count = 10

    @vf.stop
    async def reached(self, trace: vf.Trace) -> bool:
        return trace.state.count >= 13

    @vf.reward
    async def final(self, trace: vf.Trace) -> float:
        return trace.state.count + 100.0 * (trace.stop_condition == "reached")

    @vf.reward
    async def seen(self, trace: vf.Trace) -> dict[str, float]:
        return {"turns": 1000.0 * trace.num_turns, "results": 10000.0 * len(trace.tool_messages)}


class CounterTasksetConfig(vf.TasksetConfig):
    task: CounterConfig = CounterConfig()


class CounterTaskset(vf.Taskset[CounterTask, CounterTasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield CounterTask(
                CounterData(prompt=[vf.UserMessage(content=f"Count {number}.")], step=1), self.config.task
            )
            number += 1
