"""The loss of distillation (train.loss="distillation"): a divergence from the teacher's distribution at each position,
and a share of the cross entropy of the labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.loss import first_id_of_rank, seen_labels, weighted_mean
from mt_core.parallel.collectives import reduce_from
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.first_rank import all_gather_objects
from mt_tune.distill.config import DistillationConfig
from mt_tune.distill.divergences import (
    Divergence,
    TopK,
    log_normalizer,
    logits_at,
    most_probable,
    top_k_of,
)
from mt_tune.distill.targets import LogitRows, LogitTarget, Target, logit_rows, target_in_batch

TargetOf = Callable[[Mapping[str, Tensor]], Target]
"""micro-batch -> the teacher's distributions of its positions"""
CompareHidden = Callable[[], Tensor]
"""[B, S] of the forward passes of student and teacher that were run last"""


class DistillationLoss:
    """(logits or their operands, batch) -> losses [B, S] in fp32.

    teach: gives the teacher's distributions of micro-batches that have none in their fields; the source of batches sets
    it. compare_hidden: the loss of hidden states, where there is one.
    """

    def __init__(self, keys: DistillationConfig, first_id: int, parallel: ParallelContext) -> None:
        self.keys, self.first_id, self.parallel = keys, first_id, parallel
        self.divergence = Divergence(keys.divergence, keys.beta, keys.temperature)
        self.scale = keys.temperature**2 if keys.temperature_squared else 1.0
        if keys.chunk_positions is not None:
            self.model_options = {"project": False}
        self.teach: TargetOf | None = None
        self.compare_hidden: CompareHidden | None = None
        self._recorded: list[tuple[str, Tensor]] = []
        self._evaluated: list[Tensor] = []

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        student, labels = logit_rows(output), seen_labels(batch)
        target = self._target(batch, student.width)
        parts = self._in_chunks(student, target, labels.flatten())
        divergences, cross_entropies, agreed = (part.view(labels.shape) for part in parts)
        losses = self.keys.alpha * self.scale * divergences
        if self.keys.alpha < 1.0:
            losses = losses + (1.0 - self.keys.alpha) * cross_entropies
        values = {"divergence": divergences, "cross_entropy": cross_entropies, "agreement": agreed}
        if self.compare_hidden is not None:
            hidden = self.compare_hidden()
            losses = losses + self.keys.hidden_weight * hidden
            values["hidden"] = hidden
        self._collect(values, batch)
        return losses

    def _target(self, batch: Mapping[str, Tensor], width: int) -> Target:
        columns = slice(self.first_id, self.first_id + width)
        target = target_in_batch(batch, columns, self.parallel.cp)
        if target is None:
            assert self.teach is not None, "the source of batches teacher was not built"
            target = self.teach(batch)
        return target

    # -- a part of the positions at a time ------------------------------------------------------------

    def _in_chunks(self, student: LogitRows, target: Target, labels: Tensor) -> tuple[Tensor, ...]:
        """Divergence, cross entropy and whether both name the same token: [positions] each."""
        size = self.keys.chunk_positions or len(student)
        chunks = [slice(start, start + size) for start in range(0, len(student), size)]
        if len(chunks) == 1:
            return self._of_rows(student, target, labels, chunks[0])
        # Logits of a chunk are computed again in the backward pass; nothing is drawn at random in between.
        of_chunks = [
            checkpoint(self._of_rows, student, target, labels, chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in chunks
        ]
        return tuple(torch.cat(parts) for parts in zip(*of_chunks, strict=True))

    def _of_rows(self, student: LogitRows, target: Target, labels: Tensor, rows: slice) -> tuple[Tensor, ...]:
        tp = self.parallel.tp
        logits = student.part(rows)
        taught = target.part(rows, student.width)
        divergences = self._divergence(logits, taught)
        # Without gradients where it is only reported.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.keys.alpha < 1.0):
            cross_entropies = self._cross_entropy(logits, labels[rows])
        agreed = torch.zeros_like(cross_entropies)
        if not torch.is_grad_enabled():
            by_teacher = taught.ids[..., 0] if isinstance(taught, TopK) else most_probable(taught, self.first_id, tp)
            agreed = (most_probable(logits, self.first_id, tp) == by_teacher).float()
        return divergences, cross_entropies, agreed

    def _divergence(self, logits: Tensor, taught: Tensor | TopK) -> Tensor:
        keys, tp = self.keys, self.parallel.tp
        if keys.top_k is None and isinstance(taught, Tensor):
            return self.divergence.of_logits(logits, taught, tp)
        if isinstance(taught, Tensor):
            assert keys.top_k is not None
            taught = top_k_of(taught, keys.top_k, keys.temperature, self.first_id, tp)
        return self.divergence.of_top_k(logits, taught, keys.tail, self.first_id, tp)

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits, tp = logits.float(), self.parallel.tp
        at_label = reduce_from(logits_at(logits, labels[:, None] - self.first_id)[:, 0], tp)
        return log_normalizer(logits, tp) - at_label

    # -- metrics --------------------------------------------------------------------------------------

    def _collect(self, values: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        weights = batch["loss_mask"].float()
        if torch.is_grad_enabled():
            # The divergence alone is the loss, then.
            shown = values if len(values) > 3 or self.keys.alpha < 1.0 else {}
            self._recorded += [
                (name, weighted_mean(value.detach(), weights)) for name, value in shown.items() if name != "agreement"
            ]
            return
        sums = [(value.masked_fill(weights == 0, 0.0) * weights).sum() for value in values.values()]
        self._evaluated.append(torch.stack([*sums, weights.sum()]).double())

    def take_recorded(self) -> list[tuple[str, float, Literal["mean", "sum", "max", "min"]]]:
        """Means of training over micro-batches, where the loss has several terms."""
        taken, self._recorded = self._recorded, []
        return [(name, float(value), "mean") for name, value in taken]

    def take_metrics(self) -> Mapping[str, float]:
        """Means of evaluation over the positions that count, of all ranks. Collective over the world."""
        taken, self._evaluated = self._evaluated, []
        local_sums = torch.stack(taken).sum(0).tolist() if taken else None
        # Ranks without the last pipeline stage have none; tensor-parallel ranks have the same sums, which cancel.
        of_ranks = [sums for sums in all_gather_objects(local_sums, self.parallel.world) if sums is not None]
        *sums, weight = (sum(column) for column in zip(*of_ranks, strict=True))
        names = ("divergence", "cross_entropy", "agreement", "hidden")
        return {name: value / max(weight, 1e-12) for name, value in zip(names, sums, strict=False)}


def target_of_output(output: Any) -> LogitTarget:
    return LogitTarget(logit_rows(output))


def build_distillation_loss(config: Config, parallel: ParallelContext) -> DistillationLoss:
    """Raises ConfigError for a top_k that the vocabulary has not."""
    keys: DistillationConfig = config.section(DistillationConfig)
    size = config.model.vocab_size
    if keys.top_k is not None and size is not None and keys.top_k > size:
        raise ConfigError(
            f"distillation.top_k={keys.top_k} is larger than the vocabulary of {size} ids; set it lower, or leave it "
            "out to use whole distributions"
        )
    return DistillationLoss(keys, first_id_of_rank(config, parallel), parallel)
