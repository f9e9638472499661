"""What a few steps of training computed, as unsharded tensors with canonical names, to compare layouts."""

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
from mt_core.train.callbacks import Callback, Run
from mt_core.train.checkpoint.local_shards import LocalShard
from mt_core.train.checkpoint.state import MODEL
from mt_core.train.checkpoint.write_plan import collect
from mt_core.train.trainer import Trainer
from mt_tools.verify.adverse import make_adverse
from mt_tools.verify.small_training import EVALUATE_EVERY


@dataclass
class RunRecord:
    """losses, norms, rates, samples: of each step: its loss, gradient norm and learning rate, and the samples consumed
    after it. gradients: of the first step, before clipping. weights: after the last.

    evaluations: losses on the validation sets, those after the last step at the end. auxiliary: of each step, the
    losses that layers added, by name. Tensors are canonical, on CPU.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    auxiliary: list[dict[str, float]] = field(default_factory=list)

    @property
    def evaluation(self) -> float | None:
        """The loss of the last evaluation."""
        return self.evaluations[-1] if self.evaluations else None

    def after(self, step: int, gradients: dict[str, Tensor]) -> RunRecord:
        """The record without its first steps, comparable to a resumed run. gradients: of its first remaining step,
        which this record does not have."""
        # Evaluations take place every EVALUATE_EVERY steps and once after the last; each may have several validation
        # sets.
        skipped = step // EVALUATE_EVERY * (len(self.evaluations) // (len(self.losses) // EVALUATE_EVERY + 1))
        return RunRecord(
            self.losses[step:],
            self.norms[step:],
            gradients,
            self.weights,
            self.rates[step:],
            self.samples[step:],
            self.evaluations[skipped:],
            self.auxiliary[step:],
        )


class _Recorder(Callback):
    def __init__(self, record: RunRecord, steps: int) -> None:
        self.record, self.steps = record, steps

    def on_train_start(self, run: Run) -> None:
        def keep() -> None:
            # Of the first step alone: later ones start from weights that differ by rounding.
            if not self.record.gradients:
                self.record.gradients = dict(collect(list(gradients(run)), run.ctx))

        run.engine.step.on_gradients = keep

    def on_step_end(self, run: Run, metrics: Mapping[str, float | int | str]) -> None:
        self.record.losses.append(float(metrics["loss"]))
        self.record.norms.append(float(metrics["grad_norm"]))
        self.record.rates.append(float(metrics["learning_rate"]))
        self.record.samples.append(float(metrics["consumed_samples"]))
        self.record.auxiliary.append({name: float(metrics[name]) for name in sorted(run.engine.step.auxiliary.names)})
        # Stopped, not configured shorter: the learning rate schedule keeps its length.
        if run.state.iteration == self.steps:
            run.stop("recorded")

    def on_evaluation(self, run: Run, metrics: Mapping[str, float | int | str]) -> None:
        self.record.evaluations += [float(value) for name, value in metrics.items() if name.endswith("_loss")]


def record_run(
    config: LoadedConfig,
    steps: int = 3,
    *,
    host: PluginHost | None = None,
    run_dir: Path | None = None,
    adverse: bool = False,
) -> RunRecord:
    """Train `steps` steps and record what they computed; tensors are complete on the first rank. Collective.

    adverse: under conditions that expose mistakes (see `adverse`).
    """
    record = RunRecord()
    # A step is recorded after it is done, and before the next one starts.
    train = config.config.train.model_copy(update={"deferred_metrics": "never"})
    at_once = replace(config, config=config.config.model_copy(update={"train": train}))
    trainer = Trainer(at_once, host=host, run_dir=run_dir, callbacks=[_Recorder(record, steps)])
    if adverse:
        make_adverse(trainer)
    trainer.train()
    fragments = [fragment for fragment in trainer.checkpointed().fragments() if fragment.name.startswith(MODEL)]
    record.weights = {name.removeprefix(MODEL): tensor for name, tensor in collect(fragments, trainer.ctx)}
    trainer.evaluate()
    return record


def gradients(run: Run) -> Iterator[Fragment]:
    """Each parameter's gradient before clipping, as the optimizer sees it, this rank's part."""
    layouts = parameter_layouts(run.model)
    for name, shard in run.engine.weights.named_parameters():
        part = partial(_gradient, shard, run.engine.scaler.scale)
        yield from LocalShard(name, layouts[name], shard.dtype, run.engine.weights.owned_slices(name), part).fragments(
            run.ctx
        )


def _gradient(shard: Tensor, scale: float) -> Tensor:
    return torch.zeros_like(shard) if shard.grad is None else shard.grad / scale  # the loss scale is taken out
