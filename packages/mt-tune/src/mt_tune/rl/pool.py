"""Groups of completions that are not trained on yet: in progress, also over changes of the weights, or complete.

A group is due where waiting for the next generation would let its oldest token be staler than rl.max_staleness: a
round of drawing goes on until all that are due, and as many as are needed, are complete. Nothing is dropped for its
length or its age, so that long completions are trained on as often as short ones. What a round gives follows from the
weights and the order of prompts alone, never from the clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mt_tune.rl.prompts import Key, Prompt
from mt_tune.rl.rollout import Group


@dataclass(frozen=True)
class RoundEnd:
    """Whether enough groups are complete to end a round of drawing: `needed` of them, and all that are due.

    step: optimizer steps before the generation that is trained on them. updates: steps from one generation to the next.
    most: staleness, in steps.
    """

    needed: int
    step: int
    updates: int
    most: int

    def __call__(self, groups: Sequence[Group]) -> bool:
        complete = [group.is_finished for group in groups]
        due = (is_complete for group, is_complete in zip(groups, complete, strict=True) if self.is_due(group))
        return sum(complete) >= self.needed and all(due)

    def is_due(self, group: Group) -> bool:
        """Whether the group has to be trained on by this generation."""
        oldest = group.oldest_version
        return oldest is not None and self.step + self.updates - oldest > self.most


class GroupPool:
    """groups: in the order of prompts. Process 0 has their completions, the others have the same prompts.

    most: staleness, in optimizer steps. updates: steps from one generation to the next.
    """

    def __init__(self, most: int, updates: int) -> None:
        self.most, self.updates = most, updates
        self.groups: list[Group] = []

    def enough(self, needed: int, step: int) -> RoundEnd:
        """When a round for the generation whose first step begins after `step` steps ends."""
        return RoundEnd(needed, step, self.updates, self.most)

    def chosen(self, needed: int, step: int) -> list[Group]:
        """Complete groups to train on, on process 0: those that are due, then by prompts; in the order of prompts."""
        complete, end = [group for group in self.groups if group.is_finished], self.enough(needed, step)
        by_need = sorted(complete, key=lambda group: (not end.is_due(group), group.position))
        return sorted(by_need[:needed], key=lambda group: group.position)

    def remove(self, groups: Sequence[Group]) -> None:
        taken = {group.position for group in groups}
        self.groups = [group for group in self.groups if group.position not in taken]

    def state_dict(self) -> list[dict[str, Any]]:
        return [group.to_json() for group in self.groups]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]], prompts: Mapping[Key, Prompt]) -> None:
        """Raises KeyError for a prompt that the data no longer have."""
        self.groups = [Group.from_json(group, prompts) for group in state]
