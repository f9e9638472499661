"""The learning-rate schedule of a program: a description that becomes keys of [lr_schedule]."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mt_accelerate.checkpointing import read
from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin, Sections
from mt_accelerate.operations import on_first_rank
from mt_accelerate.state import GradientState
from mt_core.errors import ConfigError
from mt_core.train import Engine

FILE, RATES = "program_scheduler.pt", "program_rates.json"
Groups = Sequence[MutableMapping[str, Any]]


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

    Without a scheduler the rate is constant; with one of torch it is the program's.
    """
    if scheduler is None or is_ordinary(scheduler):
        # The rate is constant, or the one that the program's scheduler has set; the engine requires a length.
        _require_no_schedule(plugin)
        length = _length(plugin, None) or {"train_iters": steps or 1}
        return {"lr_schedule": {"lr_decay_style": "constant"}, "train": length}
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
    schedule_options = [name for name in plugin.changed() if name.startswith("lr_") or name == "min_lr"]
    if schedule_options:
        raise ConfigError(
            f"MegatronLMPlugin has {', '.join(schedule_options)}, and prepare was given no MegatronLMDummyScheduler, "
            "which they belong to; give MegatronLMDummyScheduler(optimizer, total_num_steps=...)"
        )


def _length(plugin: MegatronLMPlugin, total: int | None) -> dict[str, int]:
    if plugin.train_samples is not None:
        return {"train_samples": plugin.train_samples}
    iterations = plugin.train_iters or total
    return {"train_iters": iterations} if iterations else {}


def _warmup(plugin: MegatronLMPlugin, steps: int) -> dict[str, Any]:
    names = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
    options = {name: getattr(plugin, name) for name in names if getattr(plugin, name) is not None}
    return options or ({"lr_warmup_iters": steps} if steps else {})


def _decay(plugin: MegatronLMPlugin) -> dict[str, Any]:
    names = ("lr_decay_iters", "lr_decay_samples")
    return {name: getattr(plugin, name) for name in names if getattr(plugin, name) is not None}


def is_ordinary(scheduler: Any) -> bool:
    """Whether it is a scheduler of torch, which sets the rates of the program's optimizer."""
    return scheduler is not None and not isinstance(scheduler, MegatronLMDummyScheduler)


class OrdinaryScheduler:
    """Stands for a scheduler of torch, whose attributes it has. The engine takes the rate that it has set for the
    program's optimizer. moves: of the scheduler for a step, the number of data-parallel ranks: programs count batches
    before these are divided. was_skipped: whether the last step changed nothing, after which it does not move."""

    def __init__(
        self, scheduler: Any, gradients: GradientState, moves: int, was_skipped: Callable[[], bool] = lambda: False
    ) -> None:
        self.scheduler, self.gradients, self.moves, self._was_skipped = scheduler, gradients, moves, was_skipped
        # torch warns about a scheduler that moves before its optimizer has; the engine's has.
        scheduler.optimizer._opt_called = True

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *arguments: Any, **options: Any) -> None:
        if not self.gradients.sync_gradients or self._was_skipped():
            return
        for _ in range(self.moves):
            # Past the end some schedulers of torch raise an error.
            if getattr(self.scheduler, "_step_count", 0) <= getattr(self.scheduler, "total_steps", math.inf):
                self.scheduler.step(*arguments, **options)

    def save(self, folder: str) -> None:
        """The first rank's state. Collective."""
        state = {"scheduler": self.scheduler.state_dict()}
        on_first_rank(lambda: torch.save(state, Path(folder) / FILE))

    def load(self, folder: str) -> None:
        """Raises CheckpointError for a state without the scheduler's, whose rates would begin again."""
        self.scheduler.load_state_dict(read(Path(folder) / FILE)["scheduler"])


def save_rates(folder: str, groups: Groups) -> None:
    """Write the rates of the groups of the program's optimizer, which are a part of its state in torch. Collective."""
    rates = [float(group["lr"]) for group in groups]
    on_first_rank(lambda: (Path(folder) / RATES).write_text(json.dumps(rates), encoding="utf-8"))


def load_rates(folder: str, groups: Groups) -> None:
    """Give the groups their rates in a state; one that was written without leaves them."""
    file = Path(folder) / RATES
    rates = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    for group, rate in zip(groups, rates, strict=False):
        group["lr"] = rate


class MegatronLMSchedulerWrapper:
    """Stands for the scheduler in the program's loop: the model's call has set the rate already."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def step(self, *arguments: Any) -> None:
        """Does nothing."""

    def get_last_lr(self) -> list[float]:
        """The rate of the next step."""
        return [self._engine.next_learning_rate()]
