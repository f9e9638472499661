"""Batches of validation: completions of held-out prompts, one of each, with their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, cast

import numpy as np

from mt_core.data.loader import Arrays, RankBatch
from mt_core.parallel.first_rank import all_gather_objects
from mt_core.train.batch_source import TrainingRun
from mt_tune.rl.batching import width_of
from mt_tune.rl.collecting import GroupCollector
from mt_tune.rl.config import RLConfig
from mt_tune.rl.rollout import Group, Rollout
from mt_tune.rl.row_values import plain_row
from mt_tune.rl.rows import stacked
from mt_tune.rl.samples import EVALUATED_REWARD, PROMPT


class EvaluatedRun(TrainingRun, Protocol):
    """The part of the running `Trainer` that evaluates before the first step."""

    def evaluate(self) -> dict[str, float]: ...


def evaluate_on_start(run: TrainingRun) -> None:
    """An evaluation of the weights that the run starts from; none for a run that was resumed. Collective."""
    if run.valid_data and not run.state.iteration and run.config.section(RLConfig).eval_on_start:
        cast(EvaluatedRun, run).evaluate()


def completed_batch(run: TrainingRun, collector: GroupCollector, batch: RankBatch) -> RankBatch:
    """This rank's batch of prompts with completions drawn at rl.eval_temperature. Collective."""
    keys = [tuple(key) for arrays in batch.micro_batches for key in arrays[PROMPT].tolist()]
    of_ranks = all_gather_objects(keys, run.ctx.dp)
    groups = [
        Group(collector.prompts[key], number, [Rollout()])
        for number, key in enumerate(key for keys in of_ranks for key in keys)
    ]
    options = replace(collector.options, temperature=collector.keys.eval_temperature)
    groups = collector.evaluate(groups, options)
    start = sum(map(len, of_ranks[: run.ctx.dp.rank]))
    local_groups = iter(groups[start : start + len(keys)])
    width = width_of(run, [plain_row(group, group.rollouts[0], collector.keys) for group in groups])
    parts = [
        evaluated(arrays, [next(local_groups) for _ in arrays[PROMPT]], width, collector)
        for arrays in batch.micro_batches
    ]
    return replace(batch, micro_batches=parts)


def evaluated(prompts: Arrays, groups: Sequence[Group], width: int, collector: GroupCollector) -> Arrays:
    """A micro-batch of completions with the field EVALUATED_REWARD. prompts: of it."""
    rows = [plain_row(group, group.rollouts[0], collector.keys) for group in groups]
    arrays = stacked(rows, width)
    mask, rewards = np.zeros_like(arrays["loss_mask"]), np.zeros_like(arrays["loss_mask"])
    for number, (row, group) in enumerate(zip(rows, groups, strict=True)):
        # A micro-batch that does not count stays without weight, and so does a completion that nothing judged.
        reward = group.rollouts[0].reward
        mask[number, row.predicted.start] = float(prompts["loss_mask"][number].any() and reward is not None)
        rewards[number, row.predicted.start] = reward or 0.0
    return {**arrays, "loss_mask": mask, EVALUATED_REWARD: rewards}
