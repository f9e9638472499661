"""A taskset whose environment answers the model once, as a user."""

import verifiers.v1 as vf

__all__ = ["AskingEnv", "AskingTaskset"]


class AskingTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=0.5)
    async def polite(self, trace: vf.Trace) -> float:
        return float("please" in (trace.last_reply or ""))


class AskingTaskset(vf.Taskset[AskingTask]):
    def load(self):
        yield AskingTask(vf.TaskData(prompt="Ask."), self.config.task)


class AskingEnv(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            assert segment is not None
            await interaction.turn("More politely.")
