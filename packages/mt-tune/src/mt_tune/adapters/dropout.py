"""Dropout of the input of an adapter, the same in every layout."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.context_parallel.zigzag import shard_sequence
from mt_core.nn.dropout import SEQUENCE_DIM, SampleNoise
from mt_core.nn.layout import Split
from mt_core.parallel.context import ParallelContext


class InputDropout(SampleNoise):
    """x [B, S, in] -> the same. splits: of the input features, which ranks of a row-parallel layer have parts of; they
    have all positions then, where others have a part of these under sequence parallelism."""

    def __init__(self, rate: float, splits: tuple[Split, ...], ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.rate = rate
        self.splits = tuple(replace(split, dim=-1) for split in splits)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        self.seed()
        if self.streams is None:
            return F.dropout(x, self.rate)
        keep = 1.0 - self.rate
        return x * self._own(x.new_empty(self._whole_shape(x), dtype=torch.bool).bernoulli_(keep)) / keep

    @property
    def _divides_sequence(self) -> bool:
        return self.ctx.sequence_parallel and not self.splits

    def _whole_shape(self, x: Tensor) -> tuple[int, ...]:
        features = x.shape[-1]
        for split in self.splits:
            features *= self.ctx.axis(split.axis).size
        ranks = self.ctx.cp.size * (self.ctx.tp.size if self._divides_sequence else 1)
        return (x.shape[0], x.shape[SEQUENCE_DIM] * ranks, features)

    def _own(self, kept: Tensor) -> Tensor:
        kept = shard_sequence(kept, SEQUENCE_DIM, self.ctx.cp)
        if self._divides_sequence:
            kept = kept.chunk(self.ctx.tp.size, SEQUENCE_DIM)[self.ctx.tp.rank]
        for split in self.splits:
            axis = self.ctx.axis(split.axis)
            kept = split.cut(kept, axis.size)[axis.rank]
        return kept
