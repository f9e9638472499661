"""The batches of reinforcement learning (train.batch_source="rollouts"): completions that the policy draws itself."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from torch import nn

from mt_core.checkpoint_lookup import open_start
from mt_core.data.loader import Arrays, RankBatch, cut_rank_batch
from mt_core.errors import CheckpointError, DataError
from mt_core.parallel.first_rank import all_gather_objects, on_first_rank, raise_on_all_ranks
from mt_core.train import build
from mt_core.train.batch_source import BatchSource, TrainingRun
from mt_core.train.checkpoint.partial_load import adapted
from mt_core.train.trained_model import load_model_weights
from mt_tune.rewards.build import build_rewards
from mt_tune.rewards.config import RewardsConfig
from mt_tune.rl.advantages import ADVANTAGE_FUNCTIONS, Scored, Values, has_equal_rewards
from mt_tune.rl.config import RLConfig, prompt_data
from mt_tune.rl.drawing import Drawer, DrawOptions
from mt_tune.rl.judging import Judge, reward_metrics, rewards_of
from mt_tune.rl.prompts import Key, Prompt, completion_ends, prompts_of
from mt_tune.rl.rollout import Group, Rollout
from mt_tune.rl.rollout_file import ROLLOUTS_FILE, write_rollouts
from mt_tune.rl.rows import Row, stacked
from mt_tune.rl.samples import ADVANTAGES, EVALUATED_REWARD, OLD_LOGPS, PROMPT, REFERENCE_LOGPS
from mt_tune.rl.stopping import DeadEnds
from mt_tune.rl.token_logps import Scorer

T = TypeVar("T")
WIDTH_UNIT = 8
"""Rows are filled up to a multiple of it, and of what the layout divides sequences by."""


class RolloutSource(BatchSource):
    """Draws completions with the weights of the moment, judges them, and gives the batches that they make.

    Process 0 asks for completions and rewards; all processes then have all groups, and compute advantages alike.
    """

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
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
        self.scorer = Scorer(run, run.model, self.keys.temperature)
        self.reference = Scorer(run, reference_model(run), self.keys.temperature) if self.keys.beta else None
        self.dead_ends = DeadEnds(self.keys)
        self.position = 0
        """Number of the next prompt in the order of the data set."""
        self.rows: list[Row] = []
        self.pending: list[list[int]] = []
        """For each optimizer step that is still to be taken on `rows` the numbers of its rows."""

    def batches(self) -> Generator[RankBatch, None, None]:
        for _ in self.run.engine.remaining_steps():
            if not self.pending:
                reason = self._generate()
                if reason is not None:
                    self.run.stop(reason)
            # Removed before the step, so that a checkpoint behind it has what remains.
            numbers = self.pending.pop(0)
            yield self._rank_batch([self.rows[number] for number in numbers])

    # -- one generation -------------------------------------------------------------------------------

    def _generate(self) -> str | None:
        """Fills `rows` and `pending`. Returns a reason to end the run after the step."""
        self.drawer.use_new_weights()
        sizes = self._sizes_of_steps()
        groups, drawn = self._groups(sum(sizes[: self.keys.steps_per_generation]) // self.keys.group_size)
        reason = self.dead_ends.check(drawn)
        self.rows = [self._row(group.prompt, rollout) for group in groups for rollout in group.rollouts]
        if self.keys.updates > 1:
            self._add_logps(OLD_LOGPS, self.scorer)
        if self.reference is not None:
            self._add_logps(REFERENCE_LOGPS, self.reference)
        self._add_advantages(groups)
        self._write(groups)
        self.pending = planned_steps(sizes, len(self.rows))
        return reason

    def _sizes_of_steps(self) -> list[int]:
        """Completions of each step on one generation, which train.rampup_batch_size changes. Steps behind the end of
        the run have the size of the last one."""
        sizes = [size for _, size in islice(self.run.engine.remaining_steps(), self.keys.updates)]
        return sizes + [sizes[-1]] * (self.keys.updates - len(sizes))

    def _groups(self, needed: int) -> tuple[list[Group], list[Group]]:
        """The groups to train on, and all that were drawn for them."""
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

    def _next_group(self) -> Group:
        data: Any = self.run.train_data
        file, line = data[self.position % len(data)][PROMPT].tolist()
        group = Group(self.prompts[file, line], self.position, [Rollout() for _ in range(self.keys.group_size)])
        self.position += 1
        return group

    def _drawn(self, groups: list[Group]) -> list[Group]:
        self.drawer.draw(groups, self.options)
        return on_first_rank(lambda: self._judged(groups), self.run.ctx.world)

    def _judged(self, groups: list[Group]) -> list[Group]:
        table = self._judge.judge(groups, self.run.state.iteration, self.run.last_iteration)
        for name, value in reward_metrics(groups, table).items():
            self.run.record(name, value)
        return groups

    @property
    def _judge(self) -> Judge:
        assert self.judge is not None
        return self.judge

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

    def _row(self, prompt: Prompt, rollout: Rollout) -> Row:
        counts = not (self.keys.mask_truncated and rollout.finish == "length")
        return Row(prompt.tokens, rollout.tokens, rollout.drawn, rollout.logps, counts)

    def _add_logps(self, name: str, scorer: Scorer) -> None:
        """The field `name` of all rows: each data-parallel rank computes its own."""
        ctx = self.run.ctx
        own = of_rank(self.rows, ctx.dp.rank, ctx.dp.size)
        found = np.concatenate(scorer.logps_of(self._rank_batch(self.rows))) if own else np.zeros((0, 0))
        values = [logps[row.predicted] * np.array(row.drawn) for row, logps in zip(own, found, strict=True)]
        gathered = [part for parts in all_gather_objects(values, ctx.dp) for part in parts]
        for row, part in zip(self.rows, gathered, strict=True):
            row.values[name] = part.astype(np.float32)

    def _add_advantages(self, groups: Sequence[Group]) -> None:
        rewards = rewards_of(groups)
        lengths = np.array([sum(row.drawn) for row in self.rows], np.float64).reshape(rewards.shape)
        scored = Scored(rewards, lengths, [self._penalties(row) for row in self.rows])
        for row, advantages in zip(self.rows, ADVANTAGE_FUNCTIONS[self.keys.advantage](scored), strict=True):
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

    def _write(self, groups: Sequence[Group]) -> None:
        directory = self.run.directory
        if not self.keys.write_rollouts or directory is None or self.run.ctx.world.rank:
            return
        means = [float(row.values[ADVANTAGES].sum() / max(sum(row.drawn), 1)) for row in self.rows]
        write_rollouts(directory.path / ROLLOUTS_FILE, self.run.state.iteration + 1, groups, means)

    # -- batches --------------------------------------------------------------------------------------

    def _rank_batch(self, rows: Sequence[Row]) -> RankBatch:
        """This rank's part of a step on these rows, which are those of all data-parallel ranks."""
        dp, config = self.run.ctx.dp, self.run.config
        arrays = stacked(of_rank(rows, dp.rank, dp.size), self._width(rows))
        first = self.run.state.consumed_samples
        return cut_rank_batch(arrays, first, config.train.micro_batch_size, dp.rank, dp.size)

    def _width(self, rows: Iterable[Row]) -> int:
        ctx, config = self.run.ctx, self.run.config
        if config.train.cuda_graphs != "none":
            return config.data.seq_length
        unit = int(np.lcm.reduce([WIDTH_UNIT, 2 * ctx.cp.size * ctx.tp.size]))
        return -(-max(row.positions for row in rows) // unit) * unit

    # -- validation -----------------------------------------------------------------------------------

    def complete(self, batch: RankBatch) -> RankBatch:
        """Completions of held-out prompts, one of each, with their rewards."""
        self.drawer.use_new_weights()
        keys = [tuple(key) for arrays in batch.micro_batches for key in arrays[PROMPT].tolist()]
        of_ranks = all_gather_objects(keys, self.run.ctx.dp)
        groups = [
            Group(self.prompts[key], number, [Rollout()])
            for number, key in enumerate(key for keys in of_ranks for key in keys)
        ]
        self.drawer.draw(groups, replace(self.options, temperature=self.keys.eval_temperature))
        groups = on_first_rank(lambda: self._judged_quietly(groups), self.run.ctx.world)
        start = sum(map(len, of_ranks[: self.run.ctx.dp.rank]))
        own = iter(groups[start : start + len(keys)])
        width = self._width([self._row(group.prompt, group.rollouts[0]) for group in groups])
        parts = [self._evaluated(arrays, [next(own) for _ in arrays[PROMPT]], width) for arrays in batch.micro_batches]
        return replace(batch, micro_batches=parts)

    def _judged_quietly(self, groups: list[Group]) -> list[Group]:
        """Without metrics, which are those of training."""
        self._judge.judge(groups, self.run.state.iteration, self.run.last_iteration)
        return groups

    def _evaluated(self, given: Arrays, groups: Sequence[Group], width: int) -> Arrays:
        rows = [self._row(group.prompt, group.rollouts[0]) for group in groups]
        arrays = stacked(rows, width)
        mask, rewards = np.zeros_like(arrays["loss_mask"]), np.zeros_like(arrays["loss_mask"])
        for number, (row, group) in enumerate(zip(rows, groups, strict=True)):
            # A micro-batch that does not count stays without weight.
            mask[number, row.predicted.start] = float(given["loss_mask"][number].any())
            rewards[number, row.predicted.start] = group.rollouts[0].reward or 0.0
        return {**arrays, "loss_mask": mask, EVALUATED_REWARD: rewards}

    # -- state ----------------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, Any]:
        rows = [row.to_json() for row in self.rows] if self.pending else []
        return {
            "position": self.position,
            "rows": rows,
            "pending": self.pending,
            "dead_ends": self.dead_ends.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self.position, self.pending = int(state["position"]), [list(step) for step in state["pending"]]
            self.rows = [Row.from_json(row) for row in state["rows"]]
            self.dead_ends.load_state_dict(state["dead_ends"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's state of rollouts cannot be read: {error}") from error

    def close(self) -> None:
        if self.judge is not None:
            self.judge.functions.close()


def of_rank(rows: Sequence[T], rank: int, ranks: int) -> Sequence[T]:
    """An equal part for each data-parallel rank, in order, so that whole groups stay together where they fit."""
    size = len(rows) // ranks
    return rows[rank * size : (rank + 1) * size]


def planned_steps(sizes: Sequence[int], rows: int) -> list[list[int]]:
    """Numbers of the rows of each step: in order, and from the first one again behind the last."""
    ends = np.cumsum(sizes).tolist()
    return [[number % rows for number in range(end - size, end)] for end, size in zip(ends, sizes, strict=True)]


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


def reference_model(run: TrainingRun) -> nn.Module:
    """A second model with the weights of checkpoint.load."""
    config, stages = run.config, run.engine.stages
    start = config.checkpoint.start
    assert start is not None  # checked with the configuration
    model = build.build_model(config, run.ctx, run.host, None if stages is None else stages.own)
    load_model_weights(model, adapted(open_start(start, run.host), config, run.host), run.ctx)
    return model.requires_grad_(False)
