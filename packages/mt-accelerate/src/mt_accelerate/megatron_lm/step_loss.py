"""The loss with which the engine trains under a program's own train step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mt_accelerate.megatron_lm.train_steps import ForwardStep
from mt_core.config.schema import Config
from mt_core.data.loader import RankBatch
from mt_core.errors import ConfigError
from mt_core.nn.loss import build_cross_entropy
from mt_core.nn.model import contract
from mt_core.parallel.context import ParallelContext
from mt_core.train.losses import logits_of, whole_vocabulary

RAW = "raw."
"""Prefix of a program's own names among the fields of a micro-batch."""


class StepLoss:
    """The scalar that a train step computes of each micro-batch, as a loss of one position. model: gives the engine's,
    which is whole after its loss."""

    def __init__(
        self, forward_step: ForwardStep, config: Config, ctx: ParallelContext, model: Callable[[], nn.Module]
    ) -> None:
        self.forward_step, self.config, self.ctx, self.model = forward_step, config, ctx, model
        self.token_loss = build_cross_entropy(config, ctx)
        self.reports: list[Mapping[str, Any]] = []

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        raw = {name.removeprefix(RAW): value for name, value in batch.items() if name.startswith(RAW)}
        # Megatron's contract: (output, function of the output), of which the second gives
        # (loss, report) or, with a number of tokens, (loss, tokens, report).
        tensor, loss_func = self.forward_step(iter([raw]), ComputedOutput(self, output, batch))
        loss, *_, report = loss_func(tensor)
        self.reports.append(report)
        # [1], beside the loss_mask [1] of step_batch: the sum over the global
        # count is then the mean over micro-batches.
        return loss.reshape(1)

    def take_reports(self) -> dict[str, Tensor]:
        """The mean over micro-batches of what the loss function reported."""
        reports, self.reports = self.reports, []
        names = reports[0] if reports else ()
        # Empty on stages without the loss.
        return {
            name: torch.stack([torch.as_tensor(report[name]).float() for report in reports]).mean() for name in names
        }


class ComputedOutput:
    """What a forward step is given as the model: the engine has run it, through all pipeline stages."""

    def __init__(self, step: StepLoss, output: Any, batch: Mapping[str, Tensor]) -> None:
        self.step, self.output, self.batch = step, output, batch

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Losses [rows, S] if `labels` (or `lm_labels`) are given, else logits [rows, S, vocabulary]. For BERT a pair
        with the logits of the sentence order. Of a classifier logits [rows, classes]."""
        self._require_same(inputs)
        logits = logits_of(self.output)
        if not contract(self.step.model()).predicts_tokens:
            return logits
        labels = options.get("labels", options.get("lm_labels"))
        if labels is None:
            # Collective over tensor-parallel ranks: a custom loss sees all ids, not this rank's shard.
            result = whole_vocabulary(logits, self.step.config, self.step.ctx)
        else:
            result = self.step.token_loss(logits, {"labels": labels})
        return (result, self.output.binary_logits) if hasattr(self.output, "binary_logits") else result

    def _require_same(self, inputs: tuple[Any, ...]) -> None:
        tokens = self.batch.get("tokens", self.batch.get("encoder_tokens"))
        # Waits for the device, in custom steps only. Without it a step that
        # changes the tokens would silently have no effect.
        if inputs and tokens is not None and not torch.equal(inputs[0], tokens):
            raise ConfigError(
                "a custom forward step calls the model with other tokens than its get_batch returns; the model has run "
                "on those of get_batch when the step is called"
            )


def step_batch(batch: RankBatch, raw: Callable[[int, int], Mapping[str, np.ndarray]]) -> RankBatch:
    """The micro-batches with the program's own rows beside them, each counted once in the loss."""
    micro_batches, start = [], 0
    for arrays, samples in zip(batch.micro_batches, batch.samples, strict=True):
        rows = raw(start, start + len(samples))
        # One position for the whole micro-batch, in place of the tokens' mask,
        # which the program's loss function applies.
        once = {"loss_mask": np.ones(1, dtype=np.float32)}
        micro_batches.append({**arrays, **{RAW + name: value for name, value in rows.items()}, **once})
        start += len(samples)
    return RankBatch(micro_batches, batch.samples)
