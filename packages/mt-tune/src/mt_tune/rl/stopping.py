"""When a run ends because nothing can be learned from what it draws, and the reason that it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mt_core.errors import TrainingError
from mt_tune.rl.advantages import has_equal_rewards
from mt_tune.rl.config import RLConfig
from mt_tune.rl.judging import rewards_of
from mt_tune.rl.rollout import Group


class DeadEnds:
    """Counts generations in a row from which nothing is learned. The same on all ranks."""

    def __init__(self, keys: RLConfig) -> None:
        self.keys = keys
        self.equal = self.truncated = 0
        self.has_learned = False
        """Whether some group had different rewards."""

    def state_dict(self) -> dict[str, Any]:
        return {"equal": self.equal, "truncated": self.truncated, "has_learned": self.has_learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.equal, self.truncated, self.has_learned = state["equal"], state["truncated"], state["has_learned"]

    def check(self, groups: Sequence[Group]) -> str | None:
        """The reason to end a run that has learned what it can. Raises TrainingError where it never learned."""
        rewards = rewards_of(groups)
        dead = bool(has_equal_rewards(rewards).all())
        self.has_learned |= not dead
        self.equal = self.equal + 1 if dead else 0
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self.truncated = self.truncated + 1 if all(rollout.finish == "length" for rollout in rollouts) else 0
        if not self.keys.patience:
            return None
        if self.equal >= self.keys.patience:
            return self._equal_reason(groups, rewards)
        if self.truncated >= self.keys.patience:
            raise TrainingError(self._truncated_reason())
        return None

    def _truncated_reason(self) -> str:
        return (
            f"all completions of {_generations(self.truncated)} reached rl.max_completion_length="
            f"{self.keys.max_completion_length}, and none ended. Raise that key; or the policy never ends an answer: "
            "train it on answers with an end first (mt tune sft), and look at the chat template (data.chat_template). "
            "rl.patience=0 goes on all the same"
        )

    def _equal_reason(self, groups: Sequence[Group], rewards: np.ndarray) -> str:
        seen = np.unique(rewards[~np.isnan(rewards)])
        what = "no completion had a reward" if not len(seen) else f"rewards were {_listed(seen)}"
        reason = (
            f"the completions of every prompt had equal rewards in {_generations(self.equal)} ({what}), so that "
            "nothing is learned from them"
        )
        if self.has_learned:
            return reason
        example = groups[0].rollouts[0]
        raise TrainingError(
            f"{reason}. Look at the completions (mt rollouts RUN; the first was {example.text[:80]!r}) and at the "
            "reward functions: an answer in another form than they expect, a chat template that is missing, or a task "
            "that is too hard (train on some answers first, mt tune sft) or too easy. rl.patience=0 goes on"
        )


def _generations(count: int) -> str:
    return "one generation" if count == 1 else f"{count} generations in a row"


def _listed(values: np.ndarray) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:4])
    return f"{shown}, ..." if len(values) > 4 else shown
