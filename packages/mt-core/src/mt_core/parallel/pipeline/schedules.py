"""The pipeline schedules of mt-core. Plugins register schedules with mt_register_pipeline_schedules.

| name | stages a rank | where they are | paper |
| --- | --- | --- | --- |
| gpipe | 1 | loop | Huang et al., 2018 |
| 1f1b | 1 | loop | Narayanan et al., 2020 |
| interleaved_1f1b | 2 or more | loop | Narayanan et al., 2021 |
| interleaved_zero_bubble | 1 or more | loop | ZB1P of Qi et al., 2024 |
| zbv_zero_bubble | 2 | V | ZB-V of Qi et al., 2024 |
| dualpipe_v | 2 | V | DualPipe of DeepSeek-AI, 2024, halved |

The tables of the last four are those of `torch.distributed.pipelining`, imported when one of them is used. torch
supports certain numbers of micro-batches only; for any other the next larger table is truncated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count

from mt_core._torch_compat import torch_pipeline_order
from mt_core.config.parallel import ParallelConfig
from mt_core.errors import ConfigError
from mt_core.parallel.pipeline.gc_control import without_garbage_collection
from mt_core.parallel.pipeline.schedule_tables import (
    Action,
    Kind,
    Placement,
    ScheduleTable,
    forward_only,
    gpipe,
    of_micro_batches,
    one_forward_one_backward,
    ranks_of_stages,
    with_communication,
)
from mt_core.plugins import PluginHost
from mt_core.specs import PIPELINE_SCHEDULES


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule's requirements on the stages, and its table for any number of micro-batches."""

    name: str
    placement: Placement
    build: Callable[[int, int, int], ScheduleTable]
    """(ranks, stages a rank, micro-batches) -> order"""
    min_stages_per_rank: int = 1
    max_stages_per_rank: int | None = 1
    """None: any number."""
    splits_backward: bool = False
    """Whether weight gradients are computed separately from input gradients."""

    def order(self, num_ranks: int, num_stages: int, num_micro_batches: int) -> ScheduleTable:
        """Raises ConfigError when the stages cannot be placed on the ranks as the schedule requires."""
        stages_per_rank = self.stages_per_rank(num_ranks, num_stages)
        # A table has ranks x stages x micro-batches x 2 or 3 actions: a million tuples for large runs.
        with without_garbage_collection():
            return self.build(num_ranks, stages_per_rank, num_micro_batches)

    def stages_per_rank(self, num_ranks: int, num_stages: int) -> int:
        """Raises ConfigError when there are too few or too many for the schedule."""
        each, rest = divmod(num_stages, num_ranks)
        too_many = self.max_stages_per_rank is not None and each > self.max_stages_per_rank
        if rest or each < self.min_stages_per_rank or too_many:
            raise ConfigError(
                f"pipeline schedule {self.name} cannot divide {num_stages} stages over "
                f"pipeline_model_parallel_size={num_ranks}: it needs {self._allowed(num_ranks)}"
            )
        return each

    def _allowed(self, num_ranks: int) -> str:
        if self.max_stages_per_rank == self.min_stages_per_rank:
            return f"{self.min_stages_per_rank * num_ranks} stages ({self.min_stages_per_rank} a rank)"
        first = self.min_stages_per_rank
        # The first three numbers of stages that the schedule accepts; there is no last one.
        legal = ", ".join(str(num_ranks * each) for each in range(first, first + 3))
        return f"{first} or more on each rank, the same number on all ({legal}, ... stages)"


# torch names the actions by the same letters of the zero-bubble paper.
KINDS = {kind.value: kind for kind in Kind}


def configured_schedule(parallel: ParallelConfig, host: PluginHost) -> PipelineSchedule:
    """Raises PluginError, which lists the registered names, for an unknown one."""
    spec = host[PIPELINE_SCHEDULES].get(parallel.pipeline_schedule, key="parallel.pipeline_schedule")
    schedule: PipelineSchedule = spec.schedule.load()
    return schedule


def splits_backward(parallel: ParallelConfig, host: PluginHost) -> bool:
    """Whether a run computes weight gradients separately from input gradients."""
    return parallel.pipeline_model_parallel_size > 1 and configured_schedule(parallel, host).splits_backward


# Every step runs the same table. Several are kept since training and evaluation alternate, with different numbers of
# micro-batches, and since a batch-size ramp-up changes the number.
@lru_cache(maxsize=16)
def rank_actions(
    schedule: PipelineSchedule, num_ranks: int, num_stages: int, num_micro_batches: int, rank: int, *, training: bool
) -> tuple[Action, ...]:
    """The actions of `rank`, including communication; without training, its forward passes only."""
    order = schedule.order(num_ranks, num_stages, num_micro_batches)
    # Filtered before communication is inserted: sends and receives are then planned for the forward passes alone.
    order = order if training else forward_only(order)
    # The whole table is computed on every rank: the moments of this rank's transfers depend on all others.
    places = ranks_of_stages(num_stages, num_ranks, schedule.placement)
    return tuple(with_communication(order, places)[rank])


def _single(order: Callable[[int, int], ScheduleTable]) -> Callable[[int, int, int], ScheduleTable]:
    # These schedules have one stage per rank, which stages_per_rank() has checked.
    return lambda num_ranks, stages_per_rank, num_micro_batches: order(num_ranks, num_micro_batches)


def _from_torch(
    class_name: str,
    defined_for: Callable[[int, int], int],
    num_ranks: int,
    stages_per_rank: int,
    num_micro_batches: int,
) -> ScheduleTable:
    # A table of torch's for at least as many micro-batches as requested. The actions of the surplus ones are removed,
    # which leaves a valid table, if not always the shortest one.
    whole = defined_for(num_ranks, num_micro_batches)
    order = torch_pipeline_order(class_name, num_ranks, stages_per_rank, whole)
    actions = [[Action(KINDS[kind], stage, number) for kind, stage, number in rank] for rank in order]
    return of_micro_batches(actions, num_micro_batches)


def _whole_rounds(num_ranks: int, num_micro_batches: int) -> int:
    """The next number that divides evenly into rounds of `num_ranks` micro-batches or a few more."""
    # torch interleaves in max(1, m // ranks) rounds and requires that they divide the m micro-batches.
    # Example with 4 ranks: m = 7 is one round of 7; m = 9 is 2 rounds and not divisible, so 10 is used.
    return next(number for number in count(num_micro_batches) if number % max(1, number // num_ranks) == 0)


def _at_least_twice_the_ranks(num_ranks: int, num_micro_batches: int) -> int:
    # DualPipeV needs a micro-batch for each of the 2 * num_ranks stages.
    return max(2 * num_ranks, num_micro_batches)


def _any_number(num_ranks: int, num_micro_batches: int) -> int:
    return num_micro_batches


GPIPE = PipelineSchedule("gpipe", "loop", _single(gpipe))
"""All forward passes, then all backward passes (Huang et al., 2018)."""
ONE_F_ONE_B = PipelineSchedule("1f1b", "loop", _single(one_forward_one_backward))
"""1F1B: after a warm-up forward and backward passes alternate (PipeDream-flush; Narayanan et al., 2020)."""
INTERLEAVED_1F1B = PipelineSchedule(
    "interleaved_1f1b",
    "loop",
    partial(_from_torch, "ScheduleInterleaved1F1B", _whole_rounds),
    min_stages_per_rank=2,
    max_stages_per_rank=None,
)
"""1F1B with several stages on each rank (Narayanan et al., 2021)."""
INTERLEAVED_ZERO_BUBBLE = PipelineSchedule(
    "interleaved_zero_bubble",
    "loop",
    partial(_from_torch, "ScheduleInterleavedZeroBubble", _whole_rounds),
    max_stages_per_rank=None,
    splits_backward=True,
)
"""Interleaved 1F1B whose gradients of weights fill bubbles (Qi et al., 2024)."""
ZBV_ZERO_BUBBLE = PipelineSchedule(
    "zbv_zero_bubble",
    "v",
    partial(_from_torch, "ScheduleZBVZeroBubble", _any_number),
    min_stages_per_rank=2,
    max_stages_per_rank=2,
    splits_backward=True,
)
"""ZB-V: two stages on each rank in V order, gradients of weights separate (Qi et al., 2024)."""
DUALPIPE_V = PipelineSchedule(
    "dualpipe_v",
    "v",
    partial(_from_torch, "ScheduleDualPipeV", _at_least_twice_the_ranks),
    min_stages_per_rank=2,
    max_stages_per_rank=2,
    splits_backward=True,
)
"""DualPipe cut in half: two stages on each rank in V order (DeepSeek-AI, 2024)."""
