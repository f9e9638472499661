"""A step of several batches of a program's loader, each of which is one call of the model."""

from __future__ import annotations

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


class AccumulatedStep:
    """One update from several batches. divisor: of each batch's loss, the number of batches that the program
    accumulates. batches: that will come, fewer than those at the end of a loader."""

    def __init__(self, engine: Engine, divisor: int, batches: int) -> None:
        parallel = engine.config.parallel
        if parallel.use_torch_fsdp2 or engine.config.train.cuda_graphs != "none":
            raise ConfigError(
                f"gradient_accumulation_steps={divisor} with use_custom_fsdp or CUDA graphs: gradients are accumulated "
                "over the micro-batches of a batch; set MegatronLMPlugin(num_micro_batches=...) in its place"
            )
        self.engine, self.divisor, self.batches = engine, divisor, batches
        self._added = self._samples = 0
        self._passes: int | None = None
        self._tokens = 0.0
        self._contribution = torch.zeros((), dtype=torch.float64, device=engine.device)

    def add(self, batch: RankBatch) -> float:
        """Backward passes of one batch; its mean loss over the counted tokens of all ranks."""
        engine = self.engine
        if self._passes is None:
            self._passes = len(batch.micro_batches) * self.batches
            engine.step.begin(self._passes)
        counts = engine.normalization.counts(batch.micro_batches)
        divisor, _ = engine.step.global_counts(counts)
        scale = engine.scaler.scale / self.divisor

        def share(losses: Tensor, micro_batch: Batch) -> Tensor:
            return divided(weighted_sum(losses, micro_batch[WEIGHTS]) * scale, divisor)

        part = self._run(engine.device_batches.take(batch), share).double().to(engine.device)
        self._contribution += part
        self._added, self._tokens = self._added + 1, self._tokens + counts.tokens
        self._samples += sum(len(samples) for samples in batch.samples)
        return self._over_ranks(part) / scale

    def _run(self, batches: Sequence[Batch], share: object) -> Tensor:
        if self.engine.kept_logits is not None:
            self.engine.kept_logits.begin()
        return self.engine.forward_backward.forward_backward(batches, share)  # type: ignore[arg-type]

    def _over_ranks(self, part: Tensor) -> float:
        ctx = self.engine.ctx
        return float(sum_on_device(sum_on_device(part, ctx.dp_cp), ctx.pp).item())

    def finish(self, learning_rate: float | None) -> StepOutcome:
        """Updates the weights. learning_rate: in place of the schedule's. Raises TrainingError after another number of
        batches than was announced."""
        if self._added != self.batches:
            raise TrainingError(f"a step of {self.batches} batches ends after {self._added}")
        return finish_step(self.engine, self._contribution, self._samples, self._tokens, learning_rate)
