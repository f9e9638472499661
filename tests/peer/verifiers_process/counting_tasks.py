"""Tasks with an answer, and the same with a tool, as the users of verifiers write them."""

import verifiers.v1 as vf

__all__ = ["CountingTaskset"]


class CountingData(vf.TaskData):
    answer: str = ""


class CountingTask(vf.Task[CountingData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class CountingTaskset(vf.Taskset[CountingTask]):
    def load(self):
        for number in range(3):
            data = CountingData(prompt=f"2 + {number}?", system_prompt="Be short.", answer=str(2 + number))
            yield CountingTask(data, self.config.task)
