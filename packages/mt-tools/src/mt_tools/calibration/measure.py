"""Cross-entropy, and the Kullback-Leibler divergence from the unquantized model, over samples of any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.first_rank import all_gather_objects
from mt_core.parallel.reductions import all_reduce_, sum_over
from mt_core.train.step.forward_backward import Batch
from mt_tools.calibration.passes import Passes
from mt_tools.calibration.store import CalibrationStore

NEVER = -1e30
"""A logit; finite, so that differences are."""


@dataclass(frozen=True)
class Measured:
    """Means over predicted tokens, in nats. divergence: KL(original || this model), 0 for the original itself."""

    cross_entropy: float
    divergence: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.cross_entropy)


class Comparison:
    """Measures a model before and after it was changed. Log-probabilities of the first measurement are in `store`."""

    def __init__(self, passes: Passes, batches: Sequence[Batch], store: CalibrationStore) -> None:
        self.passes, self.batches, self.store = passes, batches, store
        self.has_original = False

    @torch.no_grad()
    def measure(self) -> Measured:
        """Collective over the world. Raises ConfigError for a model without logits over a vocabulary."""
        loss, divergence, count = 0.0, 0.0, 0.0
        for number, (batch, logits) in enumerate(self.passes.outputs(self.batches)):
            if not self.passes.has_output:
                continue
            ctx = self.passes.ctx
            logs, offset = _log_probabilities(_required(logits, batch), ctx)
            mask = batch["loss_mask"].float()
            loss -= (_of_labels(logs, batch["labels"], offset, ctx) * mask).sum().item()
            count += mask.sum().item()
            divergence += self._divergence(number, logs, mask)
        self.has_original = True
        return _summed(loss, divergence, count, self.passes.ctx)

    def _divergence(self, number: int, logs: Tensor, mask: Tensor) -> float:
        ctx = self.passes.ctx
        file = f"original.{ctx.world.rank}.{number}"
        if not self.has_original:
            self.store.put_tensors(file, {"logs": logs})
            return 0.0
        original = self.store.tensors(file)["logs"].to(logs.device)
        each = (original.exp() * (original - logs)).sum(-1)
        all_reduce_(each, ctx.tp)
        return float((each * mask).sum())


def _required(logits: Any, batch: Batch) -> Tensor:
    if not isinstance(logits, Tensor) or "labels" not in batch or logits.shape[:2] != batch["labels"].shape:
        raise ConfigError("mt calibrate measures models that predict tokens; this one has another output")
    return logits


def _log_probabilities(logits: Tensor, ctx: ParallelContext) -> tuple[Tensor, int]:
    """[B, S, ids of this rank] in fp32, and the first of these ids."""
    logits, sizes = logits.float(), all_gather_objects(logits.shape[-1], ctx.tp)
    if not logits.shape[-1]:
        # A rank whose rows of the LM head are all padding: one id that is never drawn.
        logits = torch.nn.functional.pad(logits, (0, 1), value=NEVER)
    most = logits.amax(-1, keepdim=True)
    all_reduce_(most, ctx.tp, "max")
    total = (logits - most).exp().sum(-1, keepdim=True)
    all_reduce_(total, ctx.tp)
    return logits - most - total.log(), sum(sizes[: ctx.tp.rank])


def _of_labels(logs: Tensor, labels: Tensor, offset: int, ctx: ParallelContext) -> Tensor:
    """[B, S]"""
    places = labels - offset
    here = (places >= 0) & (places < logs.shape[-1])
    chosen = logs.gather(-1, places.clamp(0, logs.shape[-1] - 1)[..., None])[..., 0] * here
    all_reduce_(chosen, ctx.tp)
    return chosen


def _summed(loss: float, divergence: float, count: float, ctx: ParallelContext) -> Measured:
    values = [loss, divergence, count]
    # Ranks without the last stage have zeros.
    for axis in (ctx.dp_cp, ctx.pp):
        values = sum_over(values, axis, ctx.device)
    loss, divergence, count = values
    return Measured(loss / count, divergence / count, int(count))
