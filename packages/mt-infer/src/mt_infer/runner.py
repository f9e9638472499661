"""Runs the model over a batch of chunks, through the pipeline stages of a layout."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core.nn.cache import Conditioning
from mt_core.nn.model import EncodesInStages, as_generator
from mt_core.parallel.collectives import gather_copies
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.p2p_communicator import P2PCommunicator
from mt_core.parallel.pipeline.schedule_tables import ranks_of_stages
from mt_core.parallel.pipeline.stage import Stage, whole
from mt_core.parallel.reductions import all_reduce_
from mt_core.train.pipelining import Stages
from mt_infer.cache.batch import CachedBatch, Chunk
from mt_infer.cache.decode_batch import DecodeBatch
from mt_infer.cache.manager import CacheManager

ValueT = TypeVar("ValueT")


class EarlierStageError(RuntimeError):
    """A request's inputs could not be encoded on another rank, which has the reason."""


@dataclass(frozen=True)
class PlacedStages:
    """All pipeline stages of a model, in order, and the rank along pp that holds each."""

    stages: tuple[Stage, ...]
    ranks: tuple[int, ...]


def placed_stages(stages: Stages | None, ctx: ParallelContext) -> PlacedStages | None:
    """Pipeline stages that a model was built with, and their ranks; None for a model without."""
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
        # One stage that holds all layers, on rank 0 of pp: the same code then runs without pipeline.
        self.decoder = placed or PlacedStages((whole(self.model.decoded_layers),), (0,))
        self.encoder: PlacedStages | None = None
        if placed is not None and isinstance(model, EncodesInStages):
            # An encoder-decoder cut into stages: the encoder runs once a request (`condition`), the decoder in every
            # step.
            self.encoder, self.decoder = placed_stacks(model, placed)
        self.vocab_shares: tuple[int, ...] = ()
        """Ids of each rank of tp, after a forward pass; empty for one rank."""
        # The constructor is collective over pp.
        self._p2p = P2PCommunicator(ctx.pp, ctx.device) if placed is not None else None

    @property
    def has_logits(self) -> bool:
        """Whether this rank runs the last stage."""
        return self.decoder.ranks[-1] == self.ctx.pp.rank

    def batch(self, chunks: Sequence[Chunk], manager: CacheManager, *, is_batch_invariant: bool) -> CachedBatch:
        """The chunks with their cache, as the model's layout needs them."""
        # Sequence parallelism scatters positions over tp in equal parts.
        multiple = self.ctx.tp.size if self.ctx.sequence_parallel else 1
        return CachedBatch(chunks, manager, self.ctx.device, is_batch_invariant=is_batch_invariant, multiple=multiple)

    def logits(self, batch: CachedBatch | DecodeBatch) -> Tensor | None:
        """[R, vocab] in fp32: of the requested positions, in their order; None on ranks without the last stage."""

        def decode(stage: Stage, hidden: Any) -> Any:
            return self.model.decode_stage(stage, hidden, batch)

        # Shapes between stages depend on the number of positions alone: the key of the communicator's headers.
        hidden = self._through(self.decoder, decode, batch.tokens.shape[1])
        return self._whole_rows(hidden, batch) if self.has_logits else None

    def condition(self, inputs: Mapping[str, Tensor]) -> Conditioning:
        """The model's, on every rank that decodes. An exception of one stage of an encoder leaves no other waiting: the
        stages behind it raise EarlierStageError, and `agreed_error` tells those before it."""
        if self.encoder is None:
            return self.model.condition(inputs)
        model = self.model
        assert isinstance(model, EncodesInStages)
        # Distinct from the keys of `logits`, which are numbers.
        shapes = ("encoder", *(tuple(tensor.shape) for tensor in inputs.values()))

        def encode(stage: Stage, hidden: Any) -> Tensor:
            return model.encode_stage(stage, hidden, inputs)

        # The last stages of the encoder and the first of the decoder may be on other ranks: the output is sent to all
        # of the decoder, whose every layer attends to it.
        hidden, error = self._encoded(self.encoder, encode, shapes)
        memory, error = self._to_decoder(hidden, shapes, error)
        if error is not None:
            raise error
        return {} if memory is None else model.conditioned(memory, inputs)

    def agreed_error(self, error: str | None) -> str | None:
        """The error of the first rank of the model that has one. Collective over them."""
        axis = self.ctx.axis("model")
        if axis.size == 1:
            return error
        everyone: list[str | None] = [None] * axis.size
        dist.all_gather_object(everyone, error, group=axis.group)
        return next((message for message in everyone if message is not None), None)

    def _encoded(
        self, placed: PlacedStages, run: Callable[[Stage, Any], Tensor], key: Hashable
    ) -> tuple[Tensor | None, Exception | None]:
        """The same as `_through`, where an exception is returned, and the next stage is sent that there are no hidden
        states."""
        this_rank, last = self.ctx.pp.rank, len(placed.stages) - 1
        hidden, error = None, None
        for number, (stage, rank) in enumerate(zip(placed.stages, placed.ranks, strict=True)):
            if rank != this_rank:
                continue
            if number and placed.ranks[number - 1] != this_rank:
                hidden, error = self._receive_or_error(placed.ranks[number - 1], (number, key), error)
            if error is None:
                try:
                    hidden = run(stage, hidden)
                except Exception as raised:
                    hidden, error = None, raised
            if number < last and placed.ranks[number + 1] != this_rank:
                self._send_or_error(hidden, placed.ranks[number + 1], (number + 1, key))
        self._finish_sends()
        return hidden, error

    def _through(self, placed: PlacedStages, run: Callable[[Stage, Any], Any], key: Hashable) -> Any:
        """`run` of this rank's stages, in turn with those of the others: hidden states (None for the first stage) ->
        those of the next. Returns the last one's here. key: determines the shapes of what is sent."""
        this_rank, last = self.ctx.pp.rank, len(placed.stages) - 1
        hidden: Any = None
        for number, (stage, rank) in enumerate(zip(placed.stages, placed.ranks, strict=True)):
            # A rank may hold several stages (interleaved or V-shaped placement): it runs each in its turn, in the order
            # of the model, and stages on the same rank pass hidden states without communication.
            if rank != this_rank:
                continue
            if number and placed.ranks[number - 1] != this_rank:
                hidden = self._receive(placed.ranks[number - 1], (number, key))
            hidden = run(stage, hidden)
            if number < last and placed.ranks[number + 1] != this_rank:
                self._send(hidden, placed.ranks[number + 1], (number + 1, key))
        self._finish_sends()
        return hidden

    def _finish_sends(self) -> None:
        if self._p2p is not None:
            # Sends are asynchronous and keep their tensors until they are done: none may outlive the step.
            self._p2p.finish()

    def _to_decoder(
        self, hidden: Tensor | None, key: Hashable, error: Exception | None
    ) -> tuple[Tensor | None, Exception | None]:
        """The encoder's output, from the rank of its last stage, on all that decode; None on others."""
        assert self.encoder is not None
        this_rank, source = self.ctx.pp.rank, self.encoder.ranks[-1]
        others = set(self.decoder.ranks) - {source}
        if this_rank == source:
            # Sends and receives of a pair match by order; any order of the receivers does.
            for rank in sorted(others):
                self._send_or_error(hidden, rank, key)
            self._finish_sends()
            return hidden, error
        return self._receive_or_error(source, key, error) if this_rank in others else (None, error)

    def from_last_stage(self, value: ValueT) -> ValueT:
        """What the last stage's ranks have, on every rank of the model; any object that pickles."""
        return from_stage_rank(value, self.decoder.ranks[-1], self.ctx)

    def _whole_rows(self, logits: Tensor, batch: CachedBatch | DecodeBatch) -> Tensor:
        # Computed on every rank of tp: each samples for itself, without a broadcast along tp.
        every = gather_vocab(logits, self.ctx)
        self.vocab_shares = every.shares
        rows = every.logits[0]
        if isinstance(batch, CachedBatch) and batch.multiple > 1:
            rows = rows[batch.logit_rows]  # of all positions, which sequence parallelism shares
        # fp32 for sampling: softmax and cumulative sums over a vocabulary are not precise in bf16.
        return rows.float()

    def _send(self, hidden: Any, to: int, key: Hashable) -> None:
        assert self._p2p is not None
        self._p2p.send_hidden(hidden, to, key)

    def _receive(self, sender: int, key: Hashable) -> Any:
        assert self._p2p is not None
        incoming = self._p2p.receive_hidden(sender, key)
        return incoming.form.pack(incoming.wait())

    def _send_or_error(self, hidden: Tensor | None, to: int, key: Hashable) -> None:
        self._send(torch.tensor([int(hidden is not None)], device=self.ctx.device), to, ENCODED)
        if hidden is not None:
            self._send(hidden, to, key)

    def _receive_or_error(
        self, sender: int, key: Hashable, error: Exception | None
    ) -> tuple[Tensor | None, Exception | None]:
        """error: of an earlier stage on this rank, which stays."""
        if not int(self._receive(sender, ENCODED).item()):
            return None, error or EarlierStageError("an earlier stage of the encoder has failed")
        hidden = self._receive(sender, key)
        return (hidden, None) if error is None else (None, error)


ENCODED = "whether hidden states follow"
"""Key of a message of one number, before each message of an encoder."""


def placed_stacks(model: EncodesInStages, placed: PlacedStages) -> tuple[PlacedStages, PlacedStages]:
    """The stages of the encoder and of the decoder, each in the numbering of its stack."""
    parts = [(model.stacks_of_stage(stage), rank) for stage, rank in zip(placed.stages, placed.ranks, strict=True)]
    # One placed stage may hold the end of the encoder and the beginning of the decoder: it is then in both.
    encoder = [(stage_of_stack, rank) for (stage_of_stack, _), rank in parts if stage_of_stack is not None]
    decoder = [(stage_of_stack, rank) for (_, stage_of_stack), rank in parts if stage_of_stack is not None]
    return PlacedStages(*zip(*encoder, strict=True)), PlacedStages(*zip(*decoder, strict=True))


def from_stage_rank(value: ValueT, rank: int, ctx: ParallelContext) -> ValueT:
    """What this rank along pp has, on all of them; any object that pickles. Collective over pp."""
    if ctx.pp.size == 1:
        return value
    assert ctx.pp.group is not None
    everyone: list[ValueT] = [value]
    # Along pp, for each rank of tp apart. Ranks of tp have the same gathered logits and the same random numbers, so
    # that the objects of the last stage's ranks are equal.
    source = dist.get_global_rank(ctx.pp.group, rank)
    dist.broadcast_object_list(everyone, src=source, group=ctx.pp.group, device=ctx.device)
    return everyone[0]


class GatheredLogits(NamedTuple):
    """logits: [1, R, vocab]. shares: ids of each rank of tp; empty for one rank."""

    logits: Tensor
    shares: tuple[int, ...]


def gather_vocab(logits: Tensor, ctx: ParallelContext) -> GatheredLogits:
    """[1, R, ids of this rank] -> [1, R, vocab] on every rank of tp. The last ranks may have fewer ids, or none."""
    if ctx.tp.size == 1:
        return GatheredLogits(logits, ())
    # Parts are not equal: logits leave out the padding of the vocabulary, which the last ranks hold. gather needs equal
    # shapes: pad to the largest, and cut the result. Only the last parts are short, so that padding is at the end.
    counts = torch.zeros(ctx.tp.size, dtype=torch.int64, device=logits.device)
    counts[ctx.tp.rank] = logits.shape[-1]
    all_reduce_(counts, ctx.tp)
    # Waits for the device: a layout with tp has no CUDA graphs of decode steps.
    shares = tuple(counts.tolist())
    share = max(shares)
    padded = torch.nn.functional.pad(logits, (0, share - logits.shape[-1]))
    # [1, R, tp * share]
    every = gather_copies(padded, logits.ndim - 1, ctx.tp)
    return GatheredLogits(every[..., : sum(shares)], shares)
