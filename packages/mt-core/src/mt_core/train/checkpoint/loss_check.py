"""Checks that a resumed run continues the stopped one, by the loss of its first step.

That loss is computed with the weights of the checkpoint, on samples that the stopped run had not seen. It is compared
with the losses of the last steps before the checkpoint, which the checkpoint stores. The tolerance around their mean
is six standard deviations plus a tenth of the mean, and at least LEAST. Missing or permuted weights, another tokenizer
and other data exceed it. The optimizer state is first used after this loss and is not checked.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

WINDOW = 32
"""Number of losses that a checkpoint stores, of the last steps."""
# A standard deviation of fewer values says little.
ENOUGH = 8
"""With fewer losses than this no check is made."""
# LEAST: for losses near 0, whose deviations are near 0 too.
DEVIATIONS, SHARE, LEAST = 6.0, 0.1, 0.05

SAME_LOSS_SECTIONS = frozenset({"parallel", "kernels", "recompute", "precision", "optimizer", "lr_schedule"})
"""Keys whose change leaves the loss of the first step equal up to rounding."""


class RecentLosses:
    """The losses of the last steps that updated the weights, oldest first."""

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self._losses = deque(losses, maxlen=WINDOW)

    def add(self, loss: float) -> None:
        self._losses.append(loss)

    def replace(self, losses: Iterable[float]) -> None:
        """Set the losses from the checkpoint that is resumed."""
        self._losses.clear()
        self._losses.extend(losses)

    def to_list(self) -> list[float]:
        return list(self._losses)


@dataclass(frozen=True)
class ExpectedLoss:
    """The expected range of the first resumed step's loss. num: number of losses it was computed from."""

    mean: float
    margin: float
    num: int

    def problem(self, loss: float) -> str | None:
        """The message if `loss` is outside the expected range, else None."""
        if abs(loss - self.mean) <= self.margin:
            return None
        return (
            f"the loss of the first resumed step is {loss:.4f}; that of the {self.num} steps before the checkpoint was "
            f"{self.mean:.4f} on average, and {self.mean - self.margin:.4f} to {self.mean + self.margin:.4f} would be "
            "expected. Usual causes: the checkpoint was changed or converted and lacks weights, the tokenizer's files "
            "or the data are not those of the run, the code of the model has changed"
        )


def expected_loss(losses: list[float]) -> ExpectedLoss | None:
    """The expected loss from the losses in a checkpoint; None if there are too few."""
    if len(losses) < ENOUGH:
        return None
    mean = statistics.fmean(losses)
    return ExpectedLoss(mean, max(DEVIATIONS * statistics.stdev(losses) + SHARE * abs(mean), LEAST), len(losses))


def is_comparable(changed_keys: Iterable[str]) -> bool:
    """Whether the first loss is comparable with those of the stopped run although these settings have changed."""
    return all(key.partition(".")[0] in SAME_LOSS_SECTIONS for key in changed_keys)
