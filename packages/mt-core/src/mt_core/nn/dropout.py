"""Dropout, and other noise, with the same values in every parallel layout.

Before each use torch's own generator is seeded by (run's seed, first sample of the micro-batch, the module's place in
the model). So what is dropped depends neither on which rank has the samples or layers, nor on what was drawn before.
Ranks that share a sequence draw for all of it and keep their own positions.

Attention dropout runs inside kernels with their own order of draws. There masks are independent of data and pipeline
parallelism and of recomputation, but each tensor-parallel rank has a separate stream for its heads.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.context_parallel.zigzag import shard_sequence
from mt_core.nn.layout import stream_seed
from mt_core.parallel.context import ParallelContext

SEQUENCE_DIM = 1


SAMPLE: ContextVar[int] = ContextVar("number of the first sample of the micro-batch at hand", default=0)
"""Set by what runs micro-batches, before each; a recomputed forward pass finds what the first one found."""


class AtSample:
    """Context manager: `number` is the current sample. Reentrant, as a split backward pass recomputes twice."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._before: list[Token[int]] = []

    def __enter__(self) -> None:
        self._before.append(SAMPLE.set(self.number))

    def __exit__(self, *error: object) -> None:
        SAMPLE.reset(self._before.pop())


@dataclass(frozen=True)
class DropoutStreams:
    """The streams of a run."""

    seed: int

    def begin(self, site: str) -> None:
        seed = stream_seed(self.seed, f"dropout of {site} at sample {SAMPLE.get()}")
        # torch.manual_seed formats a stack for each kind of device that is not in use: 0.4 ms at every dropout.
        # The default generators: F.dropout and attention kernels take no other.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)


class SampleNoise(nn.Module):
    """A place of a model that draws random numbers for the positions of sequences.

    Until `use_streams` gives it streams, it draws from torch's generator as it finds it.
    """

    def __init__(self, ctx: ParallelContext) -> None:
        super().__init__()
        self.ctx = ctx
        self.streams: DropoutStreams | None = None
        self.site = ""

    @property
    def divides_positions(self) -> bool:
        """Whether ranks have different positions of one sequence here."""
        return self.ctx.cp.size > 1 or self.ctx.sequence_parallel

    def seed(self) -> None:
        """Seed the stream of this module."""
        if self.streams is not None:
            self.streams.begin(self.site)

    def own_positions(self, whole: Tensor) -> Tensor:
        """[B, S of the whole sequence, ...] -> this rank's positions."""
        # First context-parallel chunks, then the sequence-parallel share of these: the order in which the tokens were
        # cut.
        shard = shard_sequence(whole, SEQUENCE_DIM, self.ctx.cp)
        if not self.ctx.sequence_parallel:
            return shard
        # A copy: autograd keeps it, and would keep what the whole sequence drew with a view.
        return shard.chunk(self.ctx.tp.size, SEQUENCE_DIM)[self.ctx.tp.rank].clone()


class Dropout(SampleNoise):
    """Zeroes each element with probability `rate` in training, and scales the rest by 1 / (1 - rate)."""

    def __init__(self, rate: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.rate = rate

    def begin(self) -> float:
        """Seed the stream of this module; returns the rate, 0 in evaluation. For kernels with built-in dropout."""
        if not self.training or self.rate == 0.0:
            return 0.0
        self.seed()
        return self.rate

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, ...] -> the same"""
        rate = self.begin()
        # Every rank has whole sequences: nothing more is drawn than is used.
        if rate == 0.0 or self.streams is None or not self.divides_positions:
            return F.dropout(x, rate, rate > 0.0)
        return x * self._kept(x, 1.0 - rate) / (1.0 - rate)

    def _kept(self, x: Tensor, keep: float) -> Tensor:
        """This rank's part of what is kept of the whole sequence: bool, as x."""
        ranks = self.ctx.cp.size * (self.ctx.tp.size if self.ctx.sequence_parallel else 1)
        shape = (x.shape[0], x.shape[SEQUENCE_DIM] * ranks, *x.shape[2:])
        # Drawn for all ranks' positions, [B, S, ...]: 1 byte a number, and no communication.
        return self.own_positions(torch.empty(shape, dtype=torch.bool, device=x.device).bernoulli_(keep))


class AttentionDropout(Dropout):
    """The rate for an attention core, whose stream `begin` starts: one for each tensor-parallel rank's heads."""

    def begin(self) -> float:
        if self.streams is not None and self.training and self.rate > 0.0:
            # Ranks have other heads of one layer under one name: without the rank their masks would be equal.
            self.streams.begin(f"{self.site} of tensor-parallel rank {self.ctx.tp.rank}")
            return self.rate
        return self.rate if self.training else 0.0


class InnerDropout(Dropout):
    """Dropout between the two matrices of a feed-forward, of whose columns each tensor-parallel rank has a part."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, S of whole sequences or of this rank's context-parallel chunks, F / tensor-parallel size] -> the same"""
        rate, tp, cp = self.begin(), self.ctx.tp, self.ctx.cp
        if rate == 0.0 or self.streams is None or (tp.size == 1 and cp.size == 1):
            return F.dropout(x, rate, rate > 0.0)
        shape = (x.shape[0], x.shape[SEQUENCE_DIM] * cp.size, x.shape[-1] * tp.size)
        kept = torch.empty(shape, dtype=torch.bool, device=x.device).bernoulli_(1.0 - rate)
        # A copy: autograd keeps it, and would keep that of all columns with a view.
        kept = shard_sequence(kept, SEQUENCE_DIM, cp).chunk(tp.size, -1)[tp.rank].clone()
        return x * kept / (1.0 - rate)


def use_streams(model: nn.Module, streams: DropoutStreams) -> None:
    """Give every place of a model that draws the streams and its canonical name."""
    for name, module in model.named_modules():
        if isinstance(module, SampleNoise):
            module.streams, module.site = streams, name
