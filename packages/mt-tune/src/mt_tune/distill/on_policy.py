"""Batches of what the student writes itself (distillation.on_policy): GKD (Agarwal et al., 2024) with lambda 1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mt_core.data.loader import Arrays, RankBatch
from mt_core.data.training_length import global_batch_size
from mt_core.errors import CheckpointError
from mt_core.parallel.first_rank import all_gather_objects, on_first_rank
from mt_core.train.batch_source import TrainingRun
from mt_tune.distill.config import DistillationConfig
from mt_tune.rl.batching import rank_batch, width_of
from mt_tune.rl.collecting import require_room
from mt_tune.rl.config import RLConfig, prompt_data
from mt_tune.rl.drawer_choice import generation_layout
from mt_tune.rl.drawing import DrawOptions
from mt_tune.rl.prompts import Key, Prompt, completion_ends, prompts_of
from mt_tune.rl.rollout import Group, Rollout
from mt_tune.rl.rows import Row, stacked
from mt_tune.rl.samples import PROMPT
from mt_tune.rl.trained_drawer import TrainedDrawer


class StudentBatches:
    """Completions that the student draws with the weights of the moment, one of each prompt, as rows that the teacher
    scores: the tokens of completions count, those of prompts do not."""

    def __init__(self, run: TrainingRun, keys: DistillationConfig) -> None:
        self.run = run
        self.prompts: dict[Key, Prompt] = {}
        for dataset in (run.train_data, *run.valid_data.values()):
            self.prompts.update((prompt.key, prompt) for prompt in prompts_of(dataset))
        drawing = RLConfig(
            max_completion_length=keys.max_completion_length, generation_parallel=keys.generation_parallel
        )
        require_room(self.prompts.values(), drawing, run.config.data.seq_length)
        ends = completion_ends(prompt_data(run.config), run.engine.tokenizer)
        self.options = DrawOptions(keys.sampling_temperature, keys.max_completion_length, ends, run.config.train.seed)
        layout, most = generation_layout(run, drawing), global_batch_size(run.config)
        self.drawer = TrainedDrawer(run.engine, layout, most)
        self.position = 0
        """Number of the next prompt in the order of the data set."""

    def batches(self) -> Iterator[RankBatch]:
        """One batch for each remaining step, drawn when it is asked for."""
        for _, size in self.run.engine.remaining_steps():
            groups = self.drawn([self._next_group() for _ in range(size)], self.options)
            self._record(groups)
            yield rank_batch(self.run, [row_of(group) for group in groups])

    def completed(self, batch: RankBatch) -> RankBatch:
        """A batch of held-out prompts with the likeliest completions. Collective."""
        keys = [tuple(key) for arrays in batch.micro_batches for key in arrays[PROMPT].tolist()]
        of_ranks = all_gather_objects(keys, self.run.ctx.dp)
        named = [key for keys_of_rank in of_ranks for key in keys_of_rank]
        groups = [Group(self.prompts[key], number, [Rollout()]) for number, key in enumerate(named)]
        groups = self.drawn(groups, replace(self.options, temperature=0.0))
        start = sum(map(len, of_ranks[: self.run.ctx.dp.rank]))
        local_groups, width = iter(groups[start : start + len(keys)]), width_of(self.run, map(row_of, groups))
        parts = [
            evaluated(arrays, [next(local_groups) for _ in arrays[PROMPT]], width) for arrays in batch.micro_batches
        ]
        return replace(batch, micro_batches=parts)

    def drawn(self, groups: list[Group], options: DrawOptions) -> list[Group]:
        """The groups with completions, on all processes. Collective over the world."""
        self.drawer.use_new_weights()
        self.drawer.draw(groups, options)
        return on_first_rank(lambda: groups, self.run.ctx.world)

    def _next_group(self) -> Group:
        data: Any = self.run.train_data
        file, line = data[self.position % len(data)][PROMPT].tolist()
        # The number seeds the random stream of the completion.
        group = Group(self.prompts[file, line], self.position, [Rollout()])
        self.position += 1
        return group

    def _record(self, groups: Sequence[Group]) -> None:
        rollouts = [group.rollouts[0] for group in groups]
        self.run.record("completions/length", float(np.mean([rollout.length for rollout in rollouts])))
        self.run.record("completions/cut", float(np.mean([rollout.finish == "length" for rollout in rollouts])))

    def state_dict(self) -> Mapping[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self.position = int(state["position"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's state of prompts cannot be read: {error}") from error


def row_of(group: Group) -> Row:
    (rollout,) = group.rollouts
    return Row(group.prompt.tokens, rollout.tokens, rollout.drawn, rollout.logps)


def evaluated(prompts: Arrays, groups: Sequence[Group], width: int) -> Arrays:
    """A micro-batch of completions. prompts: of it; those that do not count stay without weight."""
    arrays = stacked([row_of(group) for group in groups], width)
    counts = prompts["loss_mask"].any(-1, keepdims=True)
    return {**arrays, "loss_mask": arrays["loss_mask"] * counts}
