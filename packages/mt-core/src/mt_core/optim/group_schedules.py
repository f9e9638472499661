"""Schedules of single parameter groups: decoupled learning rate and weight decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mt_core.config.schema import OptimizerConfig, WeightDecayStyle
from mt_core.optim.param_groups import ParamGroup

BySamples = Callable[[int], float]
"""consumed samples -> the value for the step that starts after them"""

# Fraction of the training -> fraction of the increase: 0 at 0, 1 at 1.
_RISES: dict[WeightDecayStyle, Callable[[float], float]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * (1.0 - progress)) + 1.0),
}


@dataclass(frozen=True)
class GroupSchedules:
    """decoupled_lr: of the embedding and the output layer; None: as the others. weight_decay: None: constant."""

    decoupled_lr: BySamples | None = None
    weight_decay: BySamples | None = None

    def prepare(self, groups: Iterable[ParamGroup], consumed_samples: int) -> None:
        """Set the values of each group for the next step."""
        for group in groups:
            if self.decoupled_lr is not None and group.get("is_decoupled_lr"):
                group["decoupled_lr"] = self.decoupled_lr(consumed_samples)
            if self.weight_decay is not None:
                group["weight_decay"] = self.weight_decay(consumed_samples) * group["wd_mult"]


def weight_decay_schedule(config: OptimizerConfig, total_samples: int) -> BySamples | None:
    """From start_weight_decay to end_weight_decay over the whole training, as Megatron's; None: it is constant."""
    if config.weight_decay_incr_style == "constant":
        return None
    start, end = config.start_weight_decay, config.end_weight_decay
    # Ensured by check_optimizer.
    assert start is not None
    assert end is not None
    rise = _RISES[config.weight_decay_incr_style]

    def weight_decay(consumed_samples: int) -> float:
        return start + (end - start) * rise(min(consumed_samples / total_samples, 1.0))

    return weight_decay
