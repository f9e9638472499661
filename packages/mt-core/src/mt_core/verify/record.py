"""What a few steps of training computed, in canonical tensors, so that layouts can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mt_core.config.loading import LoadedConfig
from mt_core.nn.layout import parameter_layouts
from mt_core.plugins import PluginHost
from mt_core.train.callbacks import Callback
from mt_core.train.checkpointing import MODEL, Part, over_stages
from mt_core.train.trainer import Trainer


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
        def gradients() -> None:
            if not self.record.gradients:
                self.record.gradients = collected(gradient_parts(run), run)

        run.step.on_gradients = gradients

    def on_step_end(self, run: Trainer, metrics: Mapping[str, float | int | str]) -> None:
        self.record.losses.append(float(metrics["loss"]))
        self.record.norms.append(float(metrics["grad_norm"]))
        if run.state.iteration == self.steps:
            run.stop("recorded")


def record_run(
    config: LoadedConfig, steps: int = 3, *, host: PluginHost | None = None, run_dir: Path | None = None
) -> RunRecord:
    """Train `steps` steps and tell what they computed; complete on the first pipeline stage's ranks. Collective."""
    record = RunRecord()
    trainer = Trainer(config, host=host, run_dir=run_dir, callbacks=[_Recorder(record, steps)])
    trainer.train()
    weights = (
        (name.removeprefix(MODEL), tensor)
        for name, tensor in trainer.checkpointed().tensors()
        if name.startswith(MODEL)
    )
    record.weights = {name: tensor.detach().cpu().clone() for name, tensor in weights}
    record.evaluation = next(iter(trainer.evaluate().values()), None)
    return record


def gradient_parts(run: Trainer) -> Iterator[Part]:
    """Each parameter's gradient, as the optimizer would see it before clipping."""
    layouts = parameter_layouts(run.model)
    scale = run.scaler.scale
    for name, piece in run.weights.named_parameters():
        gradient = torch.zeros_like(piece) if piece.grad is None else piece.grad
        whole = partial(run.weights.whole, name, gradient / scale)
        yield Part(name, layouts[name], gradient.dtype, run.ctx, whole)


def collected(parts: Iterator[Part], run: Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in over_stages(list(parts), run.ctx)}
