"""Learning-rate schedules with Megatron's formulas. Time is counted in samples.

Each schedule is warm-up followed by a decay; the `decay` of a style maps progress to a learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mt_core.config.schema import LRScheduleConfig
from mt_core.optim.configs import WSDScheduleConfig, WSDTail


@dataclass(frozen=True)
class Span:
    """The phases of a schedule, in consumed samples."""

    warmup: int
    decay: int
    """Samples from the start of training to the end of the decay."""
    tail: int = 0
    """Samples of the WSD tail."""


Decay = Callable[[int, Span, float, float], float]
"""(consumed samples, span, max_lr, min_lr) -> learning rate, after warm-up and before the end of decay"""


@dataclass(frozen=True)
class LRSchedule:
    """Learning rate as a function of consumed samples alone, so that resuming needs no state."""

    span: Span
    max_lr: float
    min_lr: float
    init_lr: float
    decay: Decay
    ends: bool = True
    """Whether the learning rate is min_lr after the decay; False for a constant one."""

    def __call__(self, samples: int) -> float:
        """The learning rate of the step that starts after so many samples of steps that changed the weights."""
        # At exactly `warmup` samples the decays give max_lr too.
        if self.span.warmup and samples <= self.span.warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * samples / self.span.warmup
        if self.ends and samples > self.span.decay:
            return self.min_lr
        return self.decay(samples, self.span, self.max_lr, self.min_lr)


def constant(consumed: int, span: Span, max_lr: float, min_lr: float) -> float:
    return max_lr


def linear(consumed: int, span: Span, max_lr: float, min_lr: float) -> float:
    return min_lr + (max_lr - min_lr) * (1.0 - _progress(consumed, span))


def cosine(consumed: int, span: Span, max_lr: float, min_lr: float) -> float:
    return min_lr + (max_lr - min_lr) * 0.5 * (math.cos(math.pi * _progress(consumed, span)) + 1.0)


def inverse_square_root(consumed: int, span: Span, max_lr: float, min_lr: float) -> float:
    # max_lr at the end of the warm-up; without one, after the first sample.
    return max(min_lr, max_lr * math.sqrt(max(span.warmup, 1)) / math.sqrt(max(consumed, 1)))


# Fraction r of the tail -> fraction of max_lr - min_lr that is left: 1 at r = 0, 0 at r = 1.
_TAILS: dict[str, Callable[[float], float]] = {
    "linear": lambda r: 1.0 - r,
    "cosine": lambda r: 0.5 * (math.cos(math.pi * r) + 1.0),
    "exponential": lambda r: 2.0 * 0.5**r - 1.0,
    "minus_sqrt": lambda r: 1.0 - math.sqrt(r),
}


def wsd(tail_style: WSDTail) -> Decay:
    """Stable at max_lr, then the named tail down to min_lr."""

    def decay(consumed: int, span: Span, max_lr: float, min_lr: float) -> float:
        start = span.decay - span.tail
        if consumed <= start:
            return max_lr
        return min_lr + (max_lr - min_lr) * _TAILS[tail_style]((consumed - start) / span.tail)

    return decay


def _progress(consumed: int, span: Span) -> float:
    # From 0 at the end of the warm-up to 1. max: a decay may be no longer than the warm-up.
    return (consumed - span.warmup) / max(span.decay - span.warmup, 1)


# -- registration ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Horizon:
    """The length of the run, and the samples of a step at full batch size."""

    total_samples: int
    global_batch_size: int
    max_lr: float
    min_lr: float


def span_of(config: LRScheduleConfig, horizon: Horizon) -> Span:
    """Warm-up and decay in samples. An unset decay ends with training."""
    batch = horizon.global_batch_size
    decay = config.lr_decay_samples or (
        config.lr_decay_iters * batch if config.lr_decay_iters else horizon.total_samples
    )
    # A fraction of the decay and not of the whole training, as in Megatron.
    if config.lr_warmup_fraction is not None:
        warmup = int(config.lr_warmup_fraction * decay)
    else:
        warmup = config.lr_warmup_samples or (config.lr_warmup_iters or 0) * batch
    tail = 0
    if isinstance(config, WSDScheduleConfig):
        tail = config.lr_wsd_decay_samples or (config.lr_wsd_decay_iters or 0) * batch
    return Span(warmup, decay, tail)


def _schedule(config: LRScheduleConfig, horizon: Horizon, decay: Decay, *, ends: bool = True) -> LRSchedule:
    return LRSchedule(span_of(config, horizon), horizon.max_lr, horizon.min_lr, config.lr_warmup_init, decay, ends)


def build_constant(config: LRScheduleConfig, horizon: Horizon) -> LRSchedule:
    return _schedule(config, horizon, constant, ends=False)


def build_linear(config: LRScheduleConfig, horizon: Horizon) -> LRSchedule:
    return _schedule(config, horizon, linear)


def build_cosine(config: LRScheduleConfig, horizon: Horizon) -> LRSchedule:
    return _schedule(config, horizon, cosine)


def build_inverse_square_root(config: LRScheduleConfig, horizon: Horizon) -> LRSchedule:
    return _schedule(config, horizon, inverse_square_root)


def build_wsd(config: WSDScheduleConfig, horizon: Horizon) -> LRSchedule:
    return _schedule(config, horizon, wsd(config.lr_wsd_decay_style))
