"""Pipeline schedules by name.

| name | stages a rank | where they are | paper |
| --- | --- | --- | --- |
| gpipe | 1 | loop | Huang et al., 2018 |
| 1f1b | 1 | loop | Narayanan et al., 2020 |
| interleaved_1f1b | 2 or more | loop | Narayanan et al., 2021 |
| interleaved_zero_bubble | 1 or more | loop | ZB1P of Qi et al., 2023 |
| zbv_zero_bubble | 2 | V | ZB-V of Qi et al., 2023 |
| dualpipe_v | 2 | V | DeepSeek's DualPipe, halved (2025) |

The orders of the last four are those of `torch.distributed.pipelining`, imported when one of them is used. Those
define some numbers of micro-batches only; for any other the next larger order is taken and cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from types import MappingProxyType

from mt_core._torch_compat import torch_pipeline_order
from mt_core.config.schema import ParallelConfig
from mt_core.errors import ConfigError, did_you_mean
from mt_core.parallel.pipeline.communication_plan import with_communication
from mt_core.parallel.pipeline.garbage import without_garbage_collection
from mt_core.parallel.pipeline.orders import (
    Action,
    Kind,
    Order,
    forward_only,
    gpipe,
    of_micro_batches,
    one_forward_one_backward,
)
from mt_core.parallel.pipeline.placement import Placement, ranks_of_stages


@dataclass(frozen=True)
class Schedule:
    """A schedule's demands on the stages, and its order for any number of micro-batches."""

    name: str
    placement: Placement
    build: Callable[[int, int, int], Order]
    """(ranks, stages a rank, micro-batches) -> order"""
    min_stages_per_rank: int = 1
    max_stages_per_rank: int | None = 1
    """None: any number."""
    splits_backward: bool = False
    """Whether gradients of weights are computed apart from those of inputs."""

    def order(self, num_ranks: int, num_stages: int, num_micro_batches: int) -> Order:
        """Raises ConfigError when the stages cannot be divided over the ranks as the schedule needs."""
        stages_per_rank = self.stages_per_rank(num_ranks, num_stages)
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
        legal = ", ".join(str(num_ranks * each) for each in range(first, first + 3))
        return f"{first} or more on each rank, the same number on all ({legal}, ... stages)"


KINDS = {kind.value: kind for kind in Kind}


def get_schedule(name: str) -> Schedule:
    """Raises ConfigError that lists the names."""
    if name not in SCHEDULES:
        names = ", ".join(SCHEDULES)
        raise ConfigError(f'there is no pipeline schedule "{name}"{did_you_mean(name, SCHEDULES)}; it can be {names}')
    return SCHEDULES[name]


def splits_backward(parallel: ParallelConfig) -> bool:
    """Whether a run computes the gradients of weights apart from those of inputs."""
    return parallel.pipeline_model_parallel_size > 1 and get_schedule(parallel.pipeline_schedule).splits_backward


@lru_cache(maxsize=16)
def rank_actions(
    name: str, num_ranks: int, num_stages: int, num_micro_batches: int, rank: int, *, training: bool
) -> tuple[Action, ...]:
    """What `rank` does, communication included; without training, its forward passes alone."""
    schedule = get_schedule(name)
    order = schedule.order(num_ranks, num_stages, num_micro_batches)
    order = order if training else forward_only(order)
    places = ranks_of_stages(num_stages, num_ranks, schedule.placement)
    return tuple(with_communication(order, places)[rank])


def _single(order: Callable[[int, int], Order]) -> Callable[[int, int, int], Order]:
    return lambda num_ranks, stages_per_rank, num_micro_batches: order(num_ranks, num_micro_batches)


def _from_torch(
    class_name: str,
    defined_for: Callable[[int, int], int],
    num_ranks: int,
    stages_per_rank: int,
    num_micro_batches: int,
) -> Order:
    whole = defined_for(num_ranks, num_micro_batches)
    order = torch_pipeline_order(class_name, num_ranks, stages_per_rank, whole)
    actions = [[Action(KINDS[kind], stage, number) for kind, stage, number in rank] for rank in order]
    return of_micro_batches(actions, num_micro_batches)


def _whole_rounds(num_ranks: int, num_micro_batches: int) -> int:
    """The next number that divides evenly into rounds of `num_ranks` micro-batches or a few more."""
    return next(number for number in count(num_micro_batches) if number % max(1, number // num_ranks) == 0)


def _at_least_twice_the_ranks(num_ranks: int, num_micro_batches: int) -> int:
    return max(2 * num_ranks, num_micro_batches)


def _any_number(num_ranks: int, num_micro_batches: int) -> int:
    return num_micro_batches


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        schedule.name: schedule
        for schedule in (
            Schedule("gpipe", "loop", _single(gpipe)),
            Schedule("1f1b", "loop", _single(one_forward_one_backward)),
            Schedule(
                "interleaved_1f1b",
                "loop",
                partial(_from_torch, "ScheduleInterleaved1F1B", _whole_rounds),
                min_stages_per_rank=2,
                max_stages_per_rank=None,
            ),
            Schedule(
                "interleaved_zero_bubble",
                "loop",
                partial(_from_torch, "ScheduleInterleavedZeroBubble", _whole_rounds),
                max_stages_per_rank=None,
                splits_backward=True,
            ),
            Schedule(
                "zbv_zero_bubble",
                "v",
                partial(_from_torch, "ScheduleZBVZeroBubble", _any_number),
                min_stages_per_rank=2,
                max_stages_per_rank=2,
                splits_backward=True,
            ),
            Schedule(
                "dualpipe_v",
                "v",
                partial(_from_torch, "ScheduleDualPipeV", _at_least_twice_the_ranks),
                min_stages_per_rank=2,
                max_stages_per_rank=2,
                splits_backward=True,
            ),
        )
    }
)
