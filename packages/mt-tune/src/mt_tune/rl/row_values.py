"""What the loss needs of each token: log-probabilities by the old policy and the reference, and advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn

from mt_core.checkpoint_lookup import open_start
from mt_core.data.loader import RankBatch
from mt_core.parallel.first_rank import all_gather_objects
from mt_core.train import build
from mt_core.train.batch_source import TrainingRun
from mt_core.train.checkpoint.partial_load import adapted
from mt_core.train.trained_model import load_model_weights
from mt_tune.rl.advantages import ADVANTAGE_FUNCTIONS, Scored, Values
from mt_tune.rl.batching import of_rank, rank_batch
from mt_tune.rl.config import GAE, RLConfig
from mt_tune.rl.gae import Discounts, estimated
from mt_tune.rl.judging import rewards_of
from mt_tune.rl.rollout import Group, Rollout
from mt_tune.rl.routing_replay import ReplayingModel
from mt_tune.rl.rows import Row
from mt_tune.rl.samples import ADVANTAGES, OLD_LOGPS, OLD_VALUES, REFERENCE_LOGPS, RETURNS
from mt_tune.rl.token_numbers import policy_scorer
from mt_tune.rl.value_model import ValueModel

NumbersOfBatch = Callable[[RankBatch], list[NDArray[np.float32]]]
"""[rows, width] of each micro-batch."""


class RowBuilder:
    """Makes rows of judged groups, on all ranks alike. values: with rl.advantage="gae"."""

    def __init__(self, run: TrainingRun, keys: RLConfig, values: ValueModel | None) -> None:
        self.run, self.keys, self.values = run, keys, values
        self.scorer = policy_scorer(run.engine, run.model, keys.temperature)
        self.reference = policy_scorer(run.engine, reference_model(run), keys.temperature) if keys.beta else None

    def rows_of(self, groups: Sequence[Group]) -> list[Row]:
        """A row of each completion with all its fields. Collective."""
        rows = [plain_row(group, rollout, self.keys) for group in groups for rollout in group.rollouts]
        if self.keys.updates > 1:
            self._add(rows, OLD_LOGPS, self.scorer.of_tokens)
        if self.reference is not None:
            self._add(rows, REFERENCE_LOGPS, self.reference.of_tokens)
        if self.values is not None:
            self._add(rows, OLD_VALUES, self.values.values_of)
            self._add_estimates(rows, groups)
        else:
            self._add_advantages(rows, groups)
        return rows

    def _add(self, rows: Sequence[Row], name: str, numbers_of: NumbersOfBatch) -> None:
        """The field `name` of all rows: each data-parallel rank computes its own."""
        ctx = self.run.ctx
        local_rows = of_rank(rows, ctx.dp.rank, ctx.dp.size)
        row_numbers = np.concatenate(numbers_of(rank_batch(self.run, rows))) if local_rows else np.zeros((0, 0))
        values = [
            numbers[row.predicted] * np.array(row.drawn) for row, numbers in zip(local_rows, row_numbers, strict=True)
        ]
        gathered = [part for parts in all_gather_objects(values, ctx.dp) for part in parts]
        for row, part in zip(rows, gathered, strict=True):
            row.values[name] = part.astype(np.float32)

    def _add_advantages(self, rows: Sequence[Row], groups: Sequence[Group]) -> None:
        rewards = rewards_of(groups)
        lengths = np.array([sum(row.drawn) for row in rows], np.float64).reshape(rewards.shape)
        scored = Scored(rewards, lengths, [self._penalties(row) for row in rows])
        for row, advantages in zip(rows, ADVANTAGE_FUNCTIONS[self.keys.advantage](scored), strict=True):
            row.set_drawn(ADVANTAGES, advantages)

    def _add_estimates(self, rows: Sequence[Row], groups: Sequence[Group]) -> None:
        rewards, penalties = rewards_of(groups).ravel(), [self._penalties(row) for row in rows]
        values = [row.of_drawn(OLD_VALUES) for row in rows]
        estimates = estimated(rewards.tolist(), penalties, values, Discounts(self.keys.gamma, self.keys.lam))
        for row, advantages, returns in zip(rows, estimates.advantages, estimates.returns, strict=True):
            row.set_drawn(ADVANTAGES, advantages)
            row.set_drawn(RETURNS, returns)
        for name, value in ppo_metrics(rewards, penalties, self.keys.beta, values, estimates.returns).items():
            self.run.record(name, value)

    def _penalties(self, row: Row) -> Values:
        """[drawn tokens] beta times the log-ratio to the reference, where it counts in rewards."""
        if REFERENCE_LOGPS not in row.values or self.keys.kl_in != "reward":
            return np.zeros(sum(row.drawn))
        policy = row.of_drawn(OLD_LOGPS) if OLD_LOGPS in row.values else np.array(row.logps, np.float64)[row.is_drawn]
        return self.keys.beta * (policy - row.of_drawn(REFERENCE_LOGPS))


def ppo_metrics(
    rewards: Values, penalties: Sequence[Values], beta: float, values: Sequence[Values], returns: Sequence[Values]
) -> dict[str, float]:
    """Under the names of TRL's PPO, and the share of the variance of returns that the values explain."""
    score, subtracted = float(np.nanmean(rewards)), float(np.mean([part.sum() for part in penalties]))
    all_returns, errors = np.concatenate(returns), np.concatenate(returns) - np.concatenate(values)
    metrics = {
        "objective/scores": score,
        "objective/non_score_reward": -subtracted,
        "objective/rlhf_reward": score - subtracted,
        "values/explained_variance": 1.0 - float(errors.var() / max(all_returns.var(), 1e-12)),
    }
    return {**metrics, "objective/kl": subtracted / beta} if beta else metrics


def plain_row(group: Group, rollout: Rollout, keys: RLConfig) -> Row:
    """The row of a completion without further fields."""
    counts = not (keys.mask_truncated and rollout.finish == "length")
    # A completion without a reward teaches a value model nothing.
    counts &= not (keys.advantage == GAE and rollout.reward is None)
    return Row(
        group.tokens_before(rollout), rollout.tokens, rollout.drawn, rollout.logps, counts, experts=rollout.experts
    )


def reference_model(run: TrainingRun) -> nn.Module:
    """A second model with the weights of checkpoint.load."""
    config, stages = run.config, run.engine.stages
    start = config.checkpoint.start
    assert start is not None  # checked with the configuration
    model = build.build_model(config, run.ctx, run.host, None if stages is None else stages.own)
    load_model_weights(model, adapted(open_start(start, run.host), config, run.host), run.ctx)
    if isinstance(model, ReplayingModel):
        model.replays = False
    return model.requires_grad_(False)
