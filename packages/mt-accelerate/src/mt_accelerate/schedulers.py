"""The learning-rate schedule of a program: a description that becomes keys of [lr_schedule]."""

from __future__ import annotations

from typing import Any

from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin, Sections
from mt_core.errors import ConfigError
from mt_core.train import Engine


class MegatronLMDummyScheduler:
    """total_num_steps, warmup_num_steps: counted in batches of the loaders before they are split over data-parallel
    ranks, as Accelerate counts them."""

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **options: Any
    ) -> None:
        if options:
            raise ConfigError(
                f"MegatronLMDummyScheduler takes total_num_steps and warmup_num_steps, and no {', '.join(options)}; "
                "the style is MegatronLMPlugin(lr_decay_style=...)"
            )
        self.optimizer, self.total_num_steps, self.warmup_num_steps = optimizer, total_num_steps, warmup_num_steps


def schedule_sections(plugin: MegatronLMPlugin, scheduler: Any, dp_size: int, steps: int | None) -> Sections:
    """[lr_schedule] and the length of training. steps: of an epoch of the training data, None if not known.

    Without a scheduler the rate is constant. Raises ConfigError for a scheduler of another kind.
    """
    if scheduler is None:
        _require_no_schedule(plugin)
        # A constant rate depends on no length; the engine requires one.
        length = _length(plugin, None) or {"train_iters": steps or 1}
        return {"lr_schedule": {"lr_decay_style": "constant"}, "train": length}
    if not isinstance(scheduler, MegatronLMDummyScheduler):
        raise ConfigError(
            f"{type(scheduler).__name__} cannot be used: the step sets the learning rate itself; give "
            "MegatronLMDummyScheduler(optimizer, total_num_steps=..., warmup_num_steps=...), and the style as "
            "MegatronLMPlugin(lr_decay_style=...)"
        )
    # Programs count batches of one process's loader before it is divided; steps are that over the data-parallel ranks.
    total = None if scheduler.total_num_steps is None else scheduler.total_num_steps // dp_size
    length = _length(plugin, total)
    if not length:
        raise ConfigError("give MegatronLMDummyScheduler(total_num_steps=...) or MegatronLMPlugin(train_iters=...)")
    style = {"lr_decay_style": plugin.lr_decay_style}
    return {
        "lr_schedule": {**style, **_warmup(plugin, scheduler.warmup_num_steps // dp_size), **_decay(plugin)},
        "train": length,
    }


def _require_no_schedule(plugin: MegatronLMPlugin) -> None:
    given = [name for name in plugin.changed() if name.startswith("lr_") or name == "min_lr"]
    if given:
        raise ConfigError(
            f"MegatronLMPlugin has {', '.join(given)}, and prepare was given no scheduler, so that the rate is "
            "constant; give MegatronLMDummyScheduler(optimizer, total_num_steps=...)"
        )


def _length(plugin: MegatronLMPlugin, total: int | None) -> dict[str, int]:
    if plugin.train_samples is not None:
        return {"train_samples": plugin.train_samples}
    iterations = plugin.train_iters or total
    return {"train_iters": iterations} if iterations else {}


def _warmup(plugin: MegatronLMPlugin, steps: int) -> dict[str, Any]:
    names = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
    given = {name: getattr(plugin, name) for name in names if getattr(plugin, name) is not None}
    return given or ({"lr_warmup_iters": steps} if steps else {})


def _decay(plugin: MegatronLMPlugin) -> dict[str, Any]:
    names = ("lr_decay_iters", "lr_decay_samples")
    return {name: getattr(plugin, name) for name in names if getattr(plugin, name) is not None}


class MegatronLMSchedulerWrapper:
    """Stands for the scheduler in the program's loop: the model's call has set the rate already."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def step(self, *arguments: Any) -> None:
        """Does nothing."""

    def get_last_lr(self) -> list[float]:
        """The rate of the next step."""
        return [self._engine.next_learning_rate()]
