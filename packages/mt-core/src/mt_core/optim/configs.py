"""Options of the optimizers and schedules; apart from their code, so that reading a config needs no torch."""

from __future__ import annotations

from typing import Literal

from mt_core.config.schema import (
    LRScheduleConfig,
    NonNegativeFloat,
    OptimizerConfig,
    PositiveInt,
    Probability,
)

WSDTail = Literal["exponential", "linear", "cosine", "minus_sqrt"]


class AdamConfig(OptimizerConfig):
    """AdamW: decoupled weight decay (Loshchilov and Hutter, 2019)."""

    adam_beta1: Probability = 0.9
    """Decay of the first moment."""
    adam_beta2: Probability = 0.999
    """Decay of the second moment."""
    adam_eps: NonNegativeFloat = 1e-8
    """Added to the root of the second moment."""


class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum."""

    sgd_momentum: Probability = 0.9
    """Decay of the momentum."""


class WSDScheduleConfig(LRScheduleConfig):
    """Warm-up, stable, decay."""

    lr_wsd_decay_style: WSDTail = "exponential"
    """Shape of the tail."""
    lr_wsd_decay_iters: PositiveInt | None = None
    """Steps of the tail, which ends with the decay. Give this or lr_wsd_decay_samples."""
    lr_wsd_decay_samples: PositiveInt | None = None
    """The same in samples."""
