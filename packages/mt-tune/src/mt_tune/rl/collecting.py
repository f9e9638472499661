"""Groups of completions to train on: of the next prompts, drawn by the policy and judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mt_core.errors import DataError
from mt_core.parallel.first_rank import on_first_rank, raise_on_all_ranks
from mt_core.train.batch_source import TrainingRun
from mt_tune.rewards.build import build_rewards
from mt_tune.rewards.config import RewardsConfig
from mt_tune.rl.advantages import has_equal_rewards
from mt_tune.rl.config import RLConfig, prompt_data
from mt_tune.rl.drawing import Drawer, DrawOptions
from mt_tune.rl.judging import Judge, reward_metrics, rewards_of
from mt_tune.rl.prompts import Key, Prompt, completion_ends, prompts_of
from mt_tune.rl.rollout import Group, Rollout
from mt_tune.rl.samples import PROMPT


class GroupCollector:
    """Draws and judges completions; process 0 asks for both, and all processes have the groups then."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        config = run.config
        self.keys = config.section(RLConfig)
        self.prompts: dict[Key, Prompt] = {}
        for dataset in (run.train_data, *run.valid_data.values()):
            self.prompts.update((prompt.key, prompt) for prompt in prompts_of(dataset))
        require_room(self.prompts.values(), self.keys, config.data.seq_length)
        ends = completion_ends(prompt_data(config), run.engine.tokenizer)
        self.options = DrawOptions(self.keys.temperature, self.keys.max_completion_length, ends, config.train.seed)
        self.judge = self._build_judge(ends)
        self.drawer = Drawer(run.engine, generation_layout(run, self.keys))
        self.position = 0
        """Number of the next prompt in the order of the data set."""

    def collect(self, needed: int) -> tuple[list[Group], list[Group]]:
        """The groups to train on, and all that were drawn for them, with the weights of the moment."""
        self.drawer.use_new_weights()
        kept: list[Group] = []
        drawn: list[Group] = []
        for _ in range(self.keys.max_generations if self.keys.dynamic_sampling else 1):
            new = self._drawn([self._next_group() for _ in range(needed - len(kept))])
            drawn += new
            equal = has_equal_rewards(rewards_of(new))
            kept += [group for group, dead in zip(new, equal, strict=True) if not (self.keys.dynamic_sampling and dead)]
            if len(kept) == needed:
                break
        # Groups with equal rewards fill the batch up: their advantages are 0.
        kept += [group for group in drawn if not any(group is one for one in kept)][: needed - len(kept)]
        return kept, drawn

    def evaluate(self, groups: list[Group], options: DrawOptions) -> list[Group]:
        """The groups of held-out prompts, completed and judged, without metrics, which are those of training."""
        self.drawer.use_new_weights()
        self.drawer.draw(groups, options)
        return on_first_rank(lambda: self._judged(groups, record=False), self.run.ctx.world)

    def close(self) -> None:
        if self.judge is not None:
            self.judge.functions.close()

    def _next_group(self) -> Group:
        data: Any = self.run.train_data
        file, line = data[self.position % len(data)][PROMPT].tolist()
        group = Group(self.prompts[file, line], self.position, [Rollout() for _ in range(self.keys.group_size)])
        self.position += 1
        return group

    def _drawn(self, groups: list[Group]) -> list[Group]:
        self.drawer.draw(groups, self.options)
        return on_first_rank(lambda: self._judged(groups, record=True), self.run.ctx.world)

    def _judged(self, groups: list[Group], *, record: bool) -> list[Group]:
        assert self.judge is not None
        table = self.judge.judge(groups, self.run.state.iteration, self.run.last_iteration)
        metrics: Mapping[str, float] = reward_metrics(groups, table) if record else {}
        for name, value in metrics.items():
            self.run.record(name, value)
        return groups

    def _build_judge(self, ends: frozenset[int]) -> Judge | None:
        """On the first process alone, which calls the functions."""
        judge, error = None, None
        if self.run.ctx.world.rank == 0:
            try:
                functions = build_rewards(self.run.config.section(RewardsConfig), self.run.host)
                judge = Judge(functions, self.keys, self.run.engine.tokenizer, ends)
            except Exception as raised:
                error = raised
        raise_on_all_ranks(error, self.run.ctx.world)
        return judge


def generation_layout(run: TrainingRun, keys: RLConfig) -> dict[str, Any] | None:
    """None for the run's own layout and memory."""
    if keys.generation_parallel is not None:
        return keys.generation_parallel
    parallel = run.config.parallel
    alone = parallel.use_torch_fsdp2 or parallel.context_parallel_size > 1
    return {} if alone else None


def require_room(prompts: Iterable[Prompt], keys: RLConfig, length: int) -> None:
    """Raises DataError for a prompt that does not fit with its completion into data.seq_length."""
    for prompt in prompts:
        if len(prompt.tokens) + keys.max_completion_length > length + 1:
            raise DataError(
                f"{prompt.where}: the prompt has {len(prompt.tokens)} tokens, with rl.max_completion_length="
                f"{keys.max_completion_length} more than data.seq_length={length} positions hold; raise the latter, or "
                "lower rl.max_completion_length"
            )
