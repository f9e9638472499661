"""The batches of reinforcement learning (train.batch_source="rollouts"): completions that the policy draws itself."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from mt_core.data.loader import RankBatch
from mt_core.errors import CheckpointError
from mt_core.train.batch_source import BatchSource, TrainingRun
from mt_tune.rl.batching import planned_steps, rank_batch
from mt_tune.rl.collecting import GroupCollector
from mt_tune.rl.config import GAE, RLConfig
from mt_tune.rl.drawn_logps import project_drawn_alone
from mt_tune.rl.held_out import completed_batch, evaluate_on_start
from mt_tune.rl.objective import PolicyLoss
from mt_tune.rl.rollout import Group
from mt_tune.rl.rollout_file import ROLLOUTS_FILE, write_rollouts
from mt_tune.rl.routing_replay import changed_shares
from mt_tune.rl.row_values import RowBuilder
from mt_tune.rl.rows import Row
from mt_tune.rl.samples import ADVANTAGES
from mt_tune.rl.stopping import DeadEnds
from mt_tune.rl.value_model import ValueModel


class RolloutSource(BatchSource):
    """Draws completions with the weights of the moment, judges them, and gives the batches that they make."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        self.keys = run.config.section(RLConfig)
        self.collector = GroupCollector(run)
        self.values = ValueModel(run) if self.keys.advantage == GAE else None
        self.builder = RowBuilder(run, self.keys, self.values)
        loss = run.engine.loss
        if isinstance(loss, PolicyLoss):
            # Not known where the loss is built. Pipeline stages hand over logits all the same.
            project_drawn_alone(loss.logps, run.model, run.config)
            if self.keys.routing_replay:
                loss.recorded_beside = partial(changed_shares, run.model)
        self.dead_ends = DeadEnds(self.keys)
        self.rows: list[Row] = []
        self.pending: list[list[int]] = []
        """For each optimizer step that is still to be taken on `rows` the numbers of its rows."""

    def batches(self) -> Generator[RankBatch, None, None]:
        evaluate_on_start(self.run)
        for _ in self.run.engine.remaining_steps():
            if not self.pending:
                reason = self._generate()
                if reason is not None:
                    self.run.stop(reason)
            # Removed before the step, so that a checkpoint behind it has what remains.
            numbers = self.pending.pop(0)
            batch = rank_batch(self.run, [self.rows[number] for number in numbers])
            if self.values is not None:
                self.values.step(batch)
            yield batch

    def _generate(self) -> str | None:
        """Fills `rows` and `pending`. Returns a reason to end the run after the step."""
        sizes, following = self._sizes_of_steps()
        groups, drawn = self.collector.collect(self._groups_of(sizes))
        self.rows = self.builder.rows_of(groups)
        self._record_staleness(groups)
        # Before the check, which may end the run with the advice to look at them.
        self._write(groups)
        reason = self.dead_ends.check(drawn)
        self.pending = planned_steps(sizes, len(self.rows))
        if following and self.keys.draws_ahead and reason is None:
            self.collector.start_round(self._groups_of(following), ahead=self.keys.updates)
        return reason

    def _sizes_of_steps(self) -> tuple[list[int], list[int]]:
        """Completions of each step on this generation and on the next one, which train.rampup_batch_size changes. Steps
        behind the end of the run have the size of the last one; empty for a generation that begins there."""
        each = self.keys.updates
        sizes = [size for _, size in islice(self.run.engine.remaining_steps(), 2 * each)]
        return filled(sizes[:each], each), filled(sizes[each:], each)

    def _groups_of(self, sizes: Sequence[int]) -> int:
        return sum(sizes[: self.keys.steps_per_generation]) // self.keys.group_size

    def _record_staleness(self, groups: Sequence[Group]) -> None:
        if not self.keys.max_staleness:
            return
        versions = [version for group in groups for rollout in group.rollouts for version in rollout.versions]
        staleness = self.run.state.iteration - np.array(versions)
        self.run.record("sampling/staleness/mean", float(staleness.mean()))
        self.run.record("sampling/staleness/max", float(staleness.max()), "max")

    def _write(self, groups: Sequence[Group]) -> None:
        directory = self.run.directory
        if not self.keys.write_rollouts or directory is None or self.run.ctx.world.rank:
            return
        means = [float(row.values[ADVANTAGES].sum() / max(sum(row.drawn), 1)) for row in self.rows]
        path = directory.path / ROLLOUTS_FILE
        write_rollouts(path, self.run.state.iteration + 1, groups, means, self.collector.digests)

    def complete(self, batch: RankBatch) -> RankBatch:
        return completed_batch(self.run, self.collector, batch)

    def state_dict(self) -> Mapping[str, Any]:
        """Also writes the checkpoint of the value model, before that of the policy is written."""
        if self.values is not None:
            self.values.save()
        rows = [row.to_json() for row in self.rows] if self.pending else []
        return {
            **self.collector.state_dict(),
            "rows": rows,
            "pending": self.pending,
            "dead_ends": self.dead_ends.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self.collector.load_state_dict(state)
            self.pending = [list(step) for step in state["pending"]]
            self.rows = [Row.from_json(row) for row in state["rows"]]
            self.dead_ends.load_state_dict(state["dead_ends"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's state of rollouts cannot be read: {error}") from error
        if self.values is not None:
            self.values.load()

    def close(self) -> None:
        self.collector.close()


def filled(sizes: list[int], count: int) -> list[int]:
    """With the last one repeated; no sizes stay none."""
    return sizes + sizes[-1:] * (count - len(sizes))
