"""Which rank of the pipeline holds which stages."""

from __future__ import annotations

from typing import Literal

Placement = Literal["loop", "v"]
"""loop: stage s on rank s mod ranks. v: ranks ascending, then descending: rank 0 holds the first and last stage."""


def ranks_of_stages(num_stages: int, num_ranks: int, placement: Placement) -> tuple[int, ...]:
    """The rank of each stage, in order."""
    if placement == "loop":
        return tuple(stage % num_ranks for stage in range(num_stages))
    # 3 ranks: stages 0 1 2 in round 0 are on ranks 0 1 2, stages 3 4 5 in round 1 on ranks 2 1 0. Stages 2 and 3 share
    # a rank, so nothing is sent at the turn; embedding and loss share rank 0.
    rounds = [divmod(stage, num_ranks) for stage in range(num_stages)]
    return tuple(place if number % 2 == 0 else num_ranks - 1 - place for number, place in rounds)


def stages_of_rank(rank: int, num_stages: int, num_ranks: int, placement: Placement) -> tuple[int, ...]:
    """Indices of the stages that `rank` holds, ascending."""
    ranks = ranks_of_stages(num_stages, num_ranks, placement)
    return tuple(stage for stage, owner in enumerate(ranks) if owner == rank)
