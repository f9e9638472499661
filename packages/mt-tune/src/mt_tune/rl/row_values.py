"""What the loss needs of each token: log-probabilities by the old policy and the reference, and advantages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from mt_core.checkpoint_lookup import open_start
from mt_core.parallel.first_rank import all_gather_objects
from mt_core.train import build
from mt_core.train.batch_source import TrainingRun
from mt_core.train.checkpoint.partial_load import adapted
from mt_core.train.trained_model import load_model_weights
from mt_tune.rl.advantages import ADVANTAGE_FUNCTIONS, Scored, Values
from mt_tune.rl.batching import of_rank, rank_batch
from mt_tune.rl.config import RLConfig
from mt_tune.rl.judging import rewards_of
from mt_tune.rl.rollout import Group, Rollout
from mt_tune.rl.rows import Row
from mt_tune.rl.samples import ADVANTAGES, OLD_LOGPS, REFERENCE_LOGPS
from mt_tune.rl.token_logps import Scorer


class RowBuilder:
    """Makes rows of judged groups, on all ranks alike."""

    def __init__(self, run: TrainingRun, keys: RLConfig) -> None:
        self.run, self.keys = run, keys
        self.scorer = Scorer(run, run.model, keys.temperature)
        self.reference = Scorer(run, reference_model(run), keys.temperature) if keys.beta else None

    def rows_of(self, groups: Sequence[Group]) -> list[Row]:
        """A row of each completion with all its fields. Collective."""
        rows = [plain_row(group, rollout, self.keys) for group in groups for rollout in group.rollouts]
        if self.keys.updates > 1:
            self._add_logps(rows, OLD_LOGPS, self.scorer)
        if self.reference is not None:
            self._add_logps(rows, REFERENCE_LOGPS, self.reference)
        self._add_advantages(rows, groups)
        return rows

    def _add_logps(self, rows: Sequence[Row], name: str, scorer: Scorer) -> None:
        """The field `name` of all rows: each data-parallel rank computes its own."""
        ctx = self.run.ctx
        own = of_rank(rows, ctx.dp.rank, ctx.dp.size)
        found = np.concatenate(scorer.logps_of(rank_batch(self.run, rows))) if own else np.zeros((0, 0))
        values = [logps[row.predicted] * np.array(row.drawn) for row, logps in zip(own, found, strict=True)]
        gathered = [part for parts in all_gather_objects(values, ctx.dp) for part in parts]
        for row, part in zip(rows, gathered, strict=True):
            row.values[name] = part.astype(np.float32)

    def _add_advantages(self, rows: Sequence[Row], groups: Sequence[Group]) -> None:
        rewards = rewards_of(groups)
        lengths = np.array([sum(row.drawn) for row in rows], np.float64).reshape(rewards.shape)
        scored = Scored(rewards, lengths, [self._penalties(row) for row in rows])
        for row, advantages in zip(rows, ADVANTAGE_FUNCTIONS[self.keys.advantage](scored), strict=True):
            values = np.zeros(len(row.completion), np.float32)
            values[np.array(row.drawn) > 0] = advantages
            row.values[ADVANTAGES] = values

    def _penalties(self, row: Row) -> Values:
        """[drawn tokens] beta times the log-ratio to the reference, where it counts in rewards."""
        drawn = np.array(row.drawn) > 0
        if REFERENCE_LOGPS not in row.values or self.keys.kl_in != "reward":
            return np.zeros(int(drawn.sum()))
        policy = np.asarray(row.values.get(OLD_LOGPS, row.logps), np.float64)
        return (self.keys.beta * (policy - row.values[REFERENCE_LOGPS]))[drawn]


def plain_row(group: Group, rollout: Rollout, keys: RLConfig) -> Row:
    """The row of a completion without further fields."""
    counts = not (keys.mask_truncated and rollout.finish == "length")
    return Row(group.prompt.tokens, rollout.tokens, rollout.drawn, rollout.logps, counts)


def reference_model(run: TrainingRun) -> nn.Module:
    """A second model with the weights of checkpoint.load."""
    config, stages = run.config, run.engine.stages
    start = config.checkpoint.start
    assert start is not None  # checked with the configuration
    model = build.build_model(config, run.ctx, run.host, None if stages is None else stages.own)
    load_model_weights(model, adapted(open_start(start, run.host), config, run.host), run.ctx)
    return model.requires_grad_(False)
