"""Sums, answered in one turn: two weighted rewards and a metric."""

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= 2 and not trace.is_truncated)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    count: int = 20


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for number in range(self.config.count):
            yield SumTask(
                SumData(prompt=f"{number}+1=", answer=str(number + 1), system_prompt="Add."), self.config.task
            )
