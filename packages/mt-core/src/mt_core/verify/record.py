"""What a few steps of training computed, in canonical tensors, so that layouts can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mt_core.config.loading import LoadedConfig
from mt_core.nn.layout import parameter_layouts
from mt_core.plugins import PluginHost
from mt_core.specs import Fragment
from mt_core.train.callbacks import Callback
from mt_core.train.checkpointing import MODEL
from mt_core.train.fragments import Held
from mt_core.train.trainer import Trainer
from mt_core.train.write_plan import collect


@dataclass
class RunRecord:
    """losses, norms: of each step. gradients: of the first step, before clipping. weights: after the last.

    evaluation: loss on the validation set after the last step. Tensors are canonical, on CPU.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float | None = None


class _Recorder(Callback):
    def __init__(self, record: RunRecord, steps: int) -> None:
        self.record, self.steps = record, steps

    def on_train_start(self, run: Trainer) -> None:
        def keep() -> None:
            if not self.record.gradients:
                self.record.gradients = dict(collect(list(gradients(run)), run.ctx))

        run.step.on_gradients = keep

    def on_step_end(self, run: Trainer, metrics: Mapping[str, float | int | str]) -> None:
        self.record.losses.append(float(metrics["loss"]))
        self.record.norms.append(float(metrics["grad_norm"]))
        if run.state.iteration == self.steps:
            run.stop("recorded")


def record_run(
    config: LoadedConfig, steps: int = 3, *, host: PluginHost | None = None, run_dir: Path | None = None
) -> RunRecord:
    """Train `steps` steps and tell what they computed; tensors are complete on the first rank. Collective."""
    record = RunRecord()
    # A step is looked at when it is over, and before the next one.
    train = config.config.train.model_copy(update={"late_metrics": "never"})
    at_once = replace(config, config=config.config.model_copy(update={"train": train}))
    trainer = Trainer(at_once, host=host, run_dir=run_dir, callbacks=[_Recorder(record, steps)])
    trainer.train()
    held = [fragment for fragment in trainer.checkpointed().fragments() if fragment.name.startswith(MODEL)]
    record.weights = {name.removeprefix(MODEL): tensor for name, tensor in collect(held, trainer.ctx)}
    record.evaluation = next(iter(trainer.evaluate().values()), None)
    return record


def gradients(run: Trainer) -> Iterator[Fragment]:
    """Each parameter's gradient, as the optimizer would see it before clipping, as far as this rank has it."""
    layouts = parameter_layouts(run.model)
    for name, piece in run.weights.named_parameters():
        part = partial(_gradient, piece, run.scaler.scale)
        yield from Held(name, layouts[name], piece.dtype, run.weights.held(name), part).fragments(run.ctx)


def _gradient(piece: Tensor, scale: float) -> Tensor:
    return torch.zeros_like(piece) if piece.grad is None else piece.grad / scale
