"""`counted`: alltoall, with a line of JSON for the rows that go to each rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mt_core.parallel import Axis
from mt_dispatcher_example.config import CountedConfig
from mt_moe import AllToAllDispatcher, Dispatched, ExpertPlacement, Routing


class CountedDispatcher:
    """A dispatcher around another one; what it returns is the other one's."""

    def __init__(self, config: CountedConfig, placement: ExpertPlacement) -> None:
        self.inner = AllToAllDispatcher(placement)
        self.placement, self.every = placement, config.every
        self.path = Path(f"{config.path}.{placement.ep.rank}")
        self.dispatches = 0

    def dispatch(self, tokens: Tensor, routing: Routing) -> Dispatched:
        if self.dispatches % self.every == 0:
            self._write(rows_to_ranks(routing, self.placement.num_local, self.placement.ep))
        self.dispatches += 1
        return self.inner.dispatch(tokens, routing)

    def combine(self, expert_output: Tensor, state: Any) -> Tensor:
        return self.inner.combine(expert_output, state)

    def _write(self, rows: Sequence[int]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"dispatch": self.dispatches, "rows_to_rank": list(rows)}) + "\n")


def rows_to_ranks(routing: Routing, experts_of_a_rank: int, ep: Axis) -> list[int]:
    """How many of this rank's choices go to each rank."""
    chosen = routing.experts if routing.kept is None else routing.experts[routing.kept]
    return (chosen.flatten() // experts_of_a_rank).bincount(minlength=ep.size).tolist()


def build_counted(config: CountedConfig, placement: ExpertPlacement) -> CountedDispatcher:
    return CountedDispatcher(config, placement)
