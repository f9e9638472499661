"""Partitioning of layers into pipeline stages, balanced by cost or by Megatron's rules."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mt_core.config.checks import SPLIT_KEYS
from mt_core.errors import ConfigError
from mt_core.parallel.pipeline.stage import Stage

if TYPE_CHECKING:
    from mt_core.config.schema import ParallelConfig


def balanced_stages(
    num_layers: int, num_stages: int, *, embedding_cost: float = 0.0, output_cost: float = 0.0
) -> list[Stage]:
    """Stages that minimize the cost of the most expensive one, with the others as even as possible.

    Any number of layers over any number of stages; a stage may have none. Costs are in units of a layer: of the work
    before the layers in the first stage (embedding) and after them in the last (norm, LM head, loss).
    """
    loads = [0.0] * num_stages
    loads[0] += embedding_cost
    loads[-1] += output_cost
    # All layers cost the same, so assigning each to the cheapest stage so far is optimal.
    # Equal loads compare by stage, so that all ranks compute the same stages and earlier ones take what does not
    # divide.
    heap = [(load, stage) for stage, load in enumerate(loads)]
    heapq.heapify(heap)
    counts = [0] * num_stages
    for _ in range(num_layers):
        load, stage = heap[0]
        counts[stage] += 1
        heapq.heapreplace(heap, (load + 1.0, stage))
    return consecutive_stages(counts)


def consecutive_stages(counts: Sequence[int]) -> list[Stage]:
    """Consecutive stages with the given numbers of layers."""
    # counts 3, 2 -> layers 0 1 2 in the first stage, 3 4 in the second.
    stages, start = [], 0
    for number, count in enumerate(counts):
        stages.append(Stage(range(start, start + count), first=number == 0, last=number == len(counts) - 1))
        start += count
    return stages


def stages_by_keys(
    parallel: ParallelConfig, num_layers: int, stages_per_rank: int, placement: str
) -> list[Stage] | None:
    """The stages that SPLIT_KEYS define; None when none of them is set.

    Raises ConfigError when the keys cannot be satisfied, or conflict with another definition of the stages.
    """
    # None, False and 0 are the unset values of these keys.
    given = {key: value for key in SPLIT_KEYS if (value := getattr(parallel, key))}
    if not given:
        return None
    named = " and ".join(f"parallel.{key}" for key in given)
    if parallel.pipeline_model_parallel_layout is not None:
        raise ConfigError(
            f"parallel.pipeline_model_parallel_layout={parallel.pipeline_model_parallel_layout} says what each stage "
            f"holds; remove it or {named}"
        )
    if placement != "loop":
        raise ConfigError(
            f"parallel.pipeline_schedule={parallel.pipeline_schedule} puts the first and the last stage on one rank, "
            f"and {named} divides layers over ranks in order; use 1f1b, gpipe or interleaved_1f1b, or "
            "parallel.pipeline_model_parallel_layout"
        )
    return even_stages(num_layers, parallel.pipeline_model_parallel_size, stages_per_rank, **given)


def even_stages(
    num_layers: int,
    num_ranks: int,
    stages_per_rank: int = 1,
    *,
    num_layers_in_first_pipeline_stage: int | None = None,
    num_layers_in_last_pipeline_stage: int | None = None,
    account_for_embedding_in_pipeline_split: bool = False,
    account_for_loss_in_pipeline_split: bool = False,
) -> list[Stage]:
    """Megatron's rule: the same number of layers on each rank, with the exceptions that the keys define.

    The first and last "pipeline stage" of the keys are ranks; their layers are split over their virtual stages like
    those of the others (placed in a loop). With account_for_..., embedding or loss count as one layer of their stage.
    Raises ConfigError, with the nearest valid numbers, when something is not divisible.
    """
    first, last = num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage
    counted = account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split
    if first is None and last is None:
        return _even(num_layers, num_ranks, stages_per_rank, *counted)
    if any(counted):
        raise ConfigError(
            "account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split cannot go with "
            "num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage: give the numbers of layers, or "
            "let embedding and loss count as layers"
        )
    return _uneven(num_layers, num_ranks, stages_per_rank, first, last)


def _even(num_layers: int, num_ranks: int, stages_per_rank: int, embedding: bool, loss: bool) -> list[Stage]:
    extra, num_stages = embedding + loss, num_ranks * stages_per_rank
    each, rest = divmod(num_layers + extra, num_stages)
    # A stage without layers cannot give one up for the embedding or the loss.
    if rest or each < max(embedding, loss):
        # The next smaller and the next larger number of layers that divide.
        near = [number for number in (each * num_stages - extra, (each + 1) * num_stages - extra) if number > 0]
        counted = f" with {extra} for embedding or loss" if extra else ""
        raise ConfigError(
            f"model.num_layers={num_layers}{counted} does not divide evenly over {num_stages} pipeline stages "
            f"({num_ranks} ranks x {stages_per_rank}); it can be {' or '.join(map(str, near))}, or let the layers be "
            "balanced by cost, or give parallel.pipeline_model_parallel_layout"
        )
    counts = [each] * num_stages
    counts[0] -= embedding
    counts[-1] -= loss
    return consecutive_stages(counts)


def _uneven(num_layers: int, num_ranks: int, stages_per_rank: int, first: int | None, last: int | None) -> list[Stage]:
    # Ranks that have no number of their own share the remaining layers evenly.
    middle_ranks = num_ranks - (first is not None) - (last is not None)
    middle = num_layers - (first or 0) - (last or 0)
    if middle_ranks < 0:
        raise ConfigError(
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage need "
            f"parallel.pipeline_model_parallel_size to be 2 or more, not {num_ranks}"
        )
    if middle < 0 or (middle and not middle_ranks) or (middle_ranks and middle % middle_ranks):
        raise ConfigError(
            f"model.num_layers={num_layers} without num_layers_in_first_pipeline_stage={first} and "
            f"num_layers_in_last_pipeline_stage={last} leaves {middle} layers, which do not divide over the other "
            f"{middle_ranks} ranks; what is left can be {_multiples(middle_ranks)}"
        )
    of_rank = [middle // middle_ranks if middle_ranks else 0] * middle_ranks
    of_rank = ([] if first is None else [first]) + of_rank + ([] if last is None else [last])
    for rank, count in enumerate(of_rank):
        if count % stages_per_rank:
            raise ConfigError(
                f"{count} layers of pipeline rank {rank} do not divide over its "
                f"parallel.virtual_pipeline_model_parallel_size={stages_per_rank} stages; they can be "
                f"{_multiples(stages_per_rank)}"
            )
    # Stages are numbered round by round over the ranks (loop placement). 2 ranks with 4 and 2 layers, 2 stages each:
    # counts 2, 1, 2, 1 for stages 0 to 3, of which rank 0 holds 0 and 2.
    return consecutive_stages([count // stages_per_rank for count in of_rank] * stages_per_rank)


def _multiples(number: int) -> str:
    return f"{number}, {2 * number}, {3 * number}, ..." if number else "0"
