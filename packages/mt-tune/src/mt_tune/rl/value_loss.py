"""The loss of a value model (train.loss="value"): squared distance to returns, with TRL's metrics."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.parallel.context import ParallelContext
from mt_tune.rl.config import RLConfig
from mt_tune.rl.recorded import Recorded, Reduction, reduced
from mt_tune.rl.samples import OLD_VALUES, RETURNS


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, bound: float | None) -> Tensor:
    """max((V - R)^2, (V' - R)^2) / 2 with V' = V within `bound` of the old value, elementwise; (V - R)^2 / 2 without a
    bound."""
    squares = (values - returns) ** 2
    if bound is None:
        return squares / 2
    near = torch.minimum(torch.maximum(values, old_values - bound), old_values + bound)
    return torch.maximum(squares, (near - returns) ** 2) / 2


class ValueLoss:
    """(scores [B, S, 1], batch) -> losses [B, S]; `loss_mask` has 1 at predicted positions of drawn tokens."""

    def __init__(self, bound: float | None) -> None:
        self.bound = bound
        self._recorded: list[Recorded] = []

    def __call__(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        values = output[..., 0].float()
        losses = clipped_value_loss(values, batch[OLD_VALUES], batch[RETURNS], self.bound)
        if torch.is_grad_enabled():
            self._collect(values.detach(), batch)
        return losses

    def _collect(self, values: Tensor, batch: Mapping[str, Tensor]) -> None:
        here = batch["loss_mask"] > 0
        recorded: Recorded = [("values/mean", values[here], "mean")]
        if self.bound is not None:
            far = (clipped_value_loss(values, batch[OLD_VALUES], batch[RETURNS], None)) < clipped_value_loss(
                values, batch[OLD_VALUES], batch[RETURNS], self.bound
            )
            recorded.append(("val/clipfrac_avg", far.float()[here], "mean"))
        self._recorded.append(recorded)

    def take_recorded(self) -> list[tuple[str, float, Reduction]]:
        """A value of each micro-batch, over its tokens."""
        taken, self._recorded = self._recorded, []
        return reduced(taken)


def build_value_loss(config: Config, parallel: ParallelContext) -> ValueLoss:
    return ValueLoss(config.section(RLConfig).value_clip)
