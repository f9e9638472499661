"""Steps of several batches, each of which is one call of the model.

Under `accumulate` the Accelerator says which batch ends a step. A program that accumulates itself (`no_sync`, or
`num_items_in_batch`) ends it with `optimizer.step()`, and may scale its losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mt_core.data.loader import RankBatch
from mt_core.data.loss_weights import WEIGHTS
from mt_core.errors import ConfigError, TrainingError
from mt_core.nn.loss import weighted_sum
from mt_core.train import Engine
from mt_core.train.host_transfer import sum_on_device
from mt_core.train.step.forward_backward import Batch
from mt_core.train.step.optimizer_step import StepOutcome, divided
from mt_core.train.step.split_step import finish_step

UNKNOWN_PASSES = 1 << 31
"""Passes that are announced where the program says at the end how many there were: no reduction starts before it."""


class _StepOfCalls:
    """One update from several calls. what: how the program accumulates, for messages."""

    def __init__(self, engine: Engine, what: str) -> None:
        parallel = engine.config.parallel
        if parallel.use_torch_fsdp2 or engine.config.train.cuda_graphs != "none":
            raise ConfigError(
                f"{what} with use_custom_fsdp or CUDA graphs: gradients are accumulated over the micro-batches of a "
                "batch; set MegatronLMPlugin(num_micro_batches=...) in its place"
            )
        self.engine = engine
        self.calls = self._samples = 0
        self._tokens = 0.0
        self._contribution = torch.zeros((), dtype=torch.float64, device=engine.device)

    def _run(self, batch: RankBatch, divisor: float | Tensor | None, factor: float) -> tuple[Tensor, float]:
        """Forward and backward passes -> (this rank's part of the scaled loss, its scale). divisor: of the sum of the
        losses; None: the counted tokens of all ranks. factor: of the loss and its gradients."""
        engine = self.engine
        counts = engine.normalization.counts(batch.micro_batches)
        if divisor is None:
            divisor, _ = engine.step.global_counts(counts)
        scale = engine.scaler.scale * factor

        def share(losses: Tensor, micro_batch: Batch) -> Tensor:
            return divided(weighted_sum(losses, micro_batch[WEIGHTS]) * scale, divisor)

        if engine.kept_logits is not None:
            engine.kept_logits.begin()
        part = engine.forward_backward.forward_backward(engine.device_batches.take(batch), share)
        part = part.double().to(engine.device)
        self._contribution += part
        self.calls, self._tokens = self.calls + 1, self._tokens + counts.tokens
        self._samples += sum(len(samples) for samples in batch.samples)
        return part, scale

    def _over_ranks(self, part: Tensor) -> float:
        ctx = self.engine.ctx
        return float(sum_on_device(sum_on_device(part, ctx.dp_cp), ctx.pp).item())


class AccumulatedStep(_StepOfCalls):
    """A step under `accumulate`. divisor: of each batch's loss, the number of batches that the program accumulates.
    batches: that will come, fewer than those at the end of a loader."""

    def __init__(self, engine: Engine, divisor: int, batches: int) -> None:
        super().__init__(engine, f"gradient_accumulation_steps={divisor}")
        self.divisor, self.batches = divisor, batches
        self._passes: int | None = None

    def add(self, batch: RankBatch) -> float:
        """Backward passes of one batch; its mean loss over the counted tokens of all ranks."""
        if self._passes is None:
            self._passes = len(batch.micro_batches) * self.batches
            self.engine.step.begin(self._passes)
        part, scale = self._run(batch, None, 1.0 / self.divisor)
        return self._over_ranks(part) / scale

    def finish(self, learning_rate: float | None) -> StepOutcome:
        """Updates the weights. learning_rate: in place of the schedule's. Raises TrainingError after another number of
        batches than was announced."""
        if self.calls != self.batches:
            raise TrainingError(f"a step of {self.batches} batches ends after {self.calls}")
        return finish_step(self.engine, self._contribution, self._samples, self._tokens, learning_rate)


class ProgramStep(_StepOfCalls):
    """A step whose batches the program sums itself, until its `optimizer.step()`.

    Gradients are computed in the call, with the factor 1 on the loss; the factor that `backward` finds is applied to
    their sum. steps: gradient_accumulation_steps, by which Accelerate's `backward` divides.
    """

    def __init__(self, engine: Engine, steps: int) -> None:
        super().__init__(engine, "no_sync and num_items_in_batch")
        if engine.step.auxiliary.names:
            raise ConfigError(
                f"no_sync and num_items_in_batch with {', '.join(engine.step.auxiliary.names)}: auxiliary losses are "
                "means over the micro-batches of a step, whose number a program that accumulates itself does not say; "
                "use Accelerator(gradient_accumulation_steps=...) and `with accelerator.accumulate(model)`"
            )
        self.steps = steps
        self._factors: list[float] = []
        engine.step.begin(UNKNOWN_PASSES)

    def add(self, batch: RankBatch, num_items: float | None) -> float:
        """Backward passes of one batch. Returns its mean loss over the counted tokens of all ranks; with num_items, the
        sum over those of this data-parallel rank divided by it, as transformers has it."""
        if num_items is None:
            part, scale = self._run(batch, None, 1.0)
            return self._over_ranks(part) / scale
        # Programs multiply by the number of processes, for the mean that DistributedDataParallel takes.
        part, scale = self._run(batch, num_items * self.engine.ctx.dp.size, 1.0)
        loss_sum = sum_on_device(sum_on_device(part, self.engine.ctx.cp), self.engine.ctx.pp)
        return float(loss_sum.item()) / scale * self.engine.ctx.dp.size

    def scaled_by(self, factor: float) -> None:
        """factor: of a loss, as `backward` found it."""
        self._factors.append(factor / self.steps)

    def finish(self, learning_rate: float | None) -> StepOutcome:
        """Updates the weights. Raises ConfigError for losses that `backward` was not given, or with several factors."""
        factor = self._factor()
        self.engine.step.on_gradients = lambda: self._scale_gradients(factor)
        try:
            return finish_step(self.engine, self._contribution * factor, self._samples, self._tokens, learning_rate)
        finally:
            self.engine.step.on_gradients = None

    def _factor(self) -> float:
        if len(self._factors) != self.calls:
            raise ConfigError(
                f"optimizer.step() after {self.calls} calls of the model and {len(self._factors)} of backward(); with "
                "Megatron-LM a call has run the backward passes: give the loss of each to accelerator.backward"
            )
        first = self._factors[0]
        if not all(math.isclose(factor, first, rel_tol=1e-6) for factor in self._factors):
            raise ConfigError(
                f"the program scales the losses of one step by {_listed(self._factors)}: their gradients were summed "
                "when the model was called, so that they have one factor"
            )
        return first

    def _scale_gradients(self, factor: float) -> None:
        if math.isclose(factor, 1.0, rel_tol=1e-6):
            return
        for _, parameter in self.engine.weights.named_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _listed(factors: Sequence[float]) -> str:
    return ", ".join(f"{factor:g}" for factor in sorted(set(factors)))
