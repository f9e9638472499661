"""Sums of log-probabilities of answers by a model, outside of its training pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from mt_core.data.loader import Arrays, RankBatch
from mt_core.nn.loss import build_cross_entropy
from mt_core.parallel.reductions import all_reduce_
from mt_core.train.batch_source import TrainingRun
from mt_core.train.pipelining import build_forward_backward
from mt_core.train.step.forward_backward import Batch, ForwardBackward
from mt_tune.adapters.base import without_adapters
from mt_tune.preferences.samples import ANSWER
from mt_tune.preferences.segments import segment_sums

RowSums = list[list[float]]
"""For each row of a micro-batch the sum of each answer in it."""


class Scorer:
    """Sums of log-probabilities of answers by a model, in the layout of the run. Collective.

    without_adapter: the model computes what its base does.
    """

    def __init__(self, run: TrainingRun, model: nn.Module, *, without_adapter: bool = False) -> None:
        self.run, self.model, self.without_adapter = run, model, without_adapter
        engine, config = run.engine, run.config
        token_loss = build_cross_entropy(config, run.ctx)
        self.runner: ForwardBackward = build_forward_backward(
            config, run.ctx, model, engine.weights, engine.stages, token_loss, None, None, engine.time
        )

    @torch.no_grad()
    def sums_of(self, batch: RankBatch) -> list[RowSums]:
        """For each micro-batch and row the sum of each answer, on all ranks that share the model."""
        ctx, engine = self.run.ctx, self.run.engine
        engine.weights.finish_gather()
        training = self.model.training
        self.model.eval()
        tables: list[Tensor] = []

        def share(losses: Tensor, micro_batch: Batch) -> Tensor:
            tables.append(segment_sums(-losses * micro_batch[ANSWER], micro_batch, ctx.cp).double())
            return losses.sum() * 0.0

        batches = engine.device_batches.take(batch)
        try:
            with without_adapters(self.model) if self.without_adapter else nullcontext():
                self.runner.forward(batches, share)
        finally:
            self.model.train(training)
        return [
            self._rows(number, arrays, tables, batches[number]) for number, arrays in enumerate(batch.micro_batches)
        ]

    def _rows(self, number: int, arrays: Arrays, tables: Sequence[Tensor], batch: Batch) -> RowSums:
        ctx = self.run.ctx
        # A stage before the last one has no losses.
        nothing = segment_sums(torch.zeros_like(batch[ANSWER]), batch, ctx.cp).double()
        table = tables[number] if tables else nothing
        if ctx.pp.size > 1:
            table = table.contiguous()
            all_reduce_(table, ctx.pp)
        counts = answers_in(arrays)
        return [row[:count].tolist() for row, count in zip(table.cpu(), counts.tolist(), strict=True)]


def answers_in(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """[B] number of answers in each row; each has a predicted token, and segments are numbered from 0."""
    return np.where(arrays[ANSWER] > 0, arrays["segment_ids"] + 1, 0).max(1)


def at_first_positions(arrays: Mapping[str, np.ndarray], values: Sequence[Sequence[float]]) -> np.ndarray:
    """[B, S] float32: the value of each answer at its first predicted position, else 0. values: for each row."""
    placed = np.zeros(arrays[ANSWER].shape, np.float32)
    for row, of_answers in enumerate(values):
        predicted, segments = arrays[ANSWER][row] > 0, arrays["segment_ids"][row]
        for answer, value in enumerate(of_answers):
            positions = np.flatnonzero(predicted & (segments == answer))
            if len(positions):
                placed[row, positions[0]] = value
    return placed
