"""Runs the model over a batch of chunks, through the pipeline stages of a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core.nn.model import as_generator
from mt_core.parallel.collectives import gather_copies
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.p2p_communicator import P2PCommunicator
from mt_core.parallel.pipeline.placement import ranks_of_stages
from mt_core.parallel.pipeline.stage import Stage, whole
from mt_core.train.pipelining import Stages
from mt_infer.cache.batch import CachedBatch

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class PlacedStages:
    """All pipeline stages of a model, in order, and the rank along pp that holds each."""

    stages: tuple[Stage, ...]
    ranks: tuple[int, ...]


def placed_stages(stages: Stages | None, ctx: ParallelContext) -> PlacedStages | None:
    """Of a model that was built with these stages."""
    if stages is None:
        return None
    return PlacedStages(stages.all, ranks_of_stages(len(stages.all), ctx.pp.size, stages.schedule.placement))


class ModelRunner:
    """This rank's part of the forward passes. Every rank of the model (its tp and pp axes) makes the same calls.

    placed: None for a model of one stage, on this rank.
    """

    def __init__(self, model: nn.Module, ctx: ParallelContext, placed: PlacedStages | None = None) -> None:
        self.model = as_generator(model)
        self.ctx = ctx
        self.stages = (whole(self.model.decoded_layers),) if placed is None else placed.stages
        self.rank_of_stage = (0,) if placed is None else placed.ranks
        self.vocab_shares: tuple[int, ...] = ()
        """Ids of each rank of tp, after a forward pass; empty for one rank."""
        self._p2p = P2PCommunicator(ctx.pp, ctx.device) if len(self.stages) > 1 else None

    @property
    def has_logits(self) -> bool:
        """Whether this rank runs the last stage."""
        return self.rank_of_stage[-1] == self.ctx.pp.rank

    def logits(self, batch: CachedBatch) -> Tensor | None:
        """[R, vocab] in fp32: of the wanted positions, in their order; None on ranks without the last stage."""
        own = self.ctx.pp.rank
        hidden: Any = None
        for number, (stage, rank) in enumerate(zip(self.stages, self.rank_of_stage, strict=True)):
            if rank != own:
                continue
            if number and self.rank_of_stage[number - 1] != own:
                hidden = self._receive(self.rank_of_stage[number - 1], number, batch)
            hidden = self.model.decode_stage(stage, hidden, batch)
            if not stage.last and self.rank_of_stage[number + 1] != own:
                self._send(hidden, self.rank_of_stage[number + 1], number + 1, batch)
        if self._p2p is not None:
            self._p2p.finish()
        return self._whole_rows(hidden, batch) if self.has_logits else None

    def from_last_stage(self, value: ValueT) -> ValueT:
        """What the last stage's ranks have, on every rank of the model; any object that pickles."""
        if self.ctx.pp.size == 1:
            return value
        assert self.ctx.pp.group is not None
        everyone: list[ValueT] = [value]
        source = dist.get_global_rank(self.ctx.pp.group, self.rank_of_stage[-1])
        dist.broadcast_object_list(everyone, src=source, group=self.ctx.pp.group, device=self.ctx.device)
        return everyone[0]

    def _whole_rows(self, logits: Tensor, batch: CachedBatch) -> Tensor:
        every = gather_vocab(logits, self.ctx)
        self.vocab_shares = every.shares
        rows = every.logits[0]
        return (rows[batch.logit_rows] if batch.multiple > 1 else rows).float()

    def _send(self, hidden: Any, to: int, stage: int, batch: CachedBatch) -> None:
        assert self._p2p is not None
        self._p2p.send_hidden(hidden, to, (stage, batch.tokens.shape[1]))

    def _receive(self, sender: int, stage: int, batch: CachedBatch) -> Any:
        assert self._p2p is not None
        incoming = self._p2p.receive_hidden(sender, (stage, batch.tokens.shape[1]))
        return incoming.form.pack(incoming.wait())


class GatheredLogits(NamedTuple):
    """logits: [1, R, vocab]. shares: ids of each rank of tp; empty for one rank."""

    logits: Tensor
    shares: tuple[int, ...]


def gather_vocab(logits: Tensor, ctx: ParallelContext) -> GatheredLogits:
    """[1, R, ids of this rank] -> [1, R, vocab] on every rank of tp. The last ranks may have fewer ids, or none."""
    if ctx.tp.size == 1:
        return GatheredLogits(logits, ())
    counts = torch.zeros(ctx.tp.size, dtype=torch.int64, device=logits.device)
    counts[ctx.tp.rank] = logits.shape[-1]
    dist.all_reduce(counts, group=ctx.tp.group)
    shares = tuple(counts.tolist())
    share = max(shares)
    padded = torch.nn.functional.pad(logits, (0, share - logits.shape[-1]))
    every = gather_copies(padded, logits.ndim - 1, ctx.tp)
    return GatheredLogits(every[..., : sum(shares)], shares)
