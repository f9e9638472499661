"""The tasks of counting_tasks with a server of tools."""

import verifiers.v1 as vf
from adder import Adder
from counting_tasks import CountingData, CountingTask

__all__ = ["AddingTaskset"]


class AddingTask(CountingTask):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]


class AddingTaskset(vf.Taskset[AddingTask]):
    def load(self):
        data = CountingData(prompt="2 + 2?", answer="4")
        yield AddingTask(data, self.config.task)
