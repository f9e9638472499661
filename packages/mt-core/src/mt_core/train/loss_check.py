"""Whether a resumed run goes on where it stopped, by the loss of its first step.

That loss is computed with the weights of the checkpoint, on samples that the stopped run had not seen. It is compared
with the losses of the steps before the checkpoint, which the checkpoint holds: it may be away from their mean by six
standard deviations and a tenth of the mean together, and by LEAST in any case. Weights that were lost, misplaced or
mixed up, another tokenizer and other data lie outside; the optimizer's state is used after this loss only, so that
this says nothing about it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

WINDOW = 32
"""Losses that a checkpoint holds, of the last steps."""
ENOUGH = 8
"""With fewer losses than this nothing is known."""
DEVIATIONS, SHARE, LEAST = 6.0, 0.1, 0.05

SAME_LOSS_SECTIONS = frozenset({"parallel", "kernels", "recompute", "precision", "optimizer", "lr_schedule"})
"""A change in these leaves the loss of the first step as it was, but for rounding."""


class RecentLosses:
    """The losses of the last steps that updated the weights, oldest first."""

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self._losses = deque(losses, maxlen=WINDOW)

    def add(self, loss: float) -> None:
        self._losses.append(loss)

    def to_list(self) -> list[float]:
        return list(self._losses)


@dataclass(frozen=True)
class ExpectedLoss:
    """What the first resumed step is compared with. num: of losses."""

    mean: float
    margin: float
    num: int

    def problem(self, loss: float) -> str | None:
        """A sentence if `loss` is not what it should be."""
        if abs(loss - self.mean) <= self.margin:
            return None
        return (
            f"the loss of the first resumed step is {loss:.4f}; that of the {self.num} steps before the checkpoint was "
            f"{self.mean:.4f} on average, and {self.mean - self.margin:.4f} to {self.mean + self.margin:.4f} would be "
            "expected. Usual causes: the checkpoint was changed or converted and lacks weights, the tokenizer's files "
            "or the data are not those of the run, the code of the model has changed"
        )


def expected_loss(losses: list[float]) -> ExpectedLoss | None:
    """From the losses that a checkpoint holds; None if they are too few."""
    if len(losses) < ENOUGH:
        return None
    mean = statistics.fmean(losses)
    return ExpectedLoss(mean, max(DEVIATIONS * statistics.stdev(losses) + SHARE * abs(mean), LEAST), len(losses))


def is_comparable(changed_keys: Iterable[str]) -> bool:
    """Whether the first loss has to be the one of the stopped run although these settings have changed."""
    return all(key.partition(".")[0] in SAME_LOSS_SECTIONS for key in changed_keys)
