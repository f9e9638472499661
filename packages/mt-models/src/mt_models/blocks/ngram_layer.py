"""Embeddings of n-grams, added to residual streams within a layer (Qwen4-Exp, 2026).

For the embeddings e of a position's n-grams (`ngram_ids`), side by side, and each of the streams X_i:

    g = <norm(W_k,i e), norm(X_i)> / sqrt(H)      v_i = sigmoid(sign(g) sqrt(|g|)) W_v e
    X_i <- X_i + v_i + silu(conv(norm(v)))_i

The convolution is causal, depthwise and dilated by the length of the longest n-gram.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.cache import Cache, SequenceState
from mt_core.nn.embedding import VocabParallelEmbedding
from mt_core.nn.layout import LayoutModule, ParameterLayout, normal, sequence_axes, zeros
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.parallel.collectives import gather_from
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.convolutions import with_past
from mt_models.blocks.gated_streams import GatedStreamsConfigLike, StreamNorm
from mt_models.blocks.linear import ReplicatedLinear
from mt_models.blocks.ngram_ids import NGramTable

LEAST = 1e-6
"""Least magnitude of a gate, whose square root has no derivative at 0."""


class NGramConfigLike(GatedStreamsConfigLike, Protocol):
    """What the layer reads from the configuration of its model."""

    @property
    def ngram_embedding_size(self) -> int: ...
    @property
    def ngram_rows_divisible_by(self) -> int: ...
    @property
    def ngram_conv_kernel(self) -> int: ...
    @property
    def ngram_max_length(self) -> int: ...
    @property
    def ngram_end_of_text_id(self) -> int | None: ...
    def ngram_table_of(self, layer: int) -> NGramTable: ...


class TokenContext(nn.Module):
    """The ids before the new positions of a cached sequence."""

    def __init__(self, count: int, end_of_text: int) -> None:
        super().__init__()
        self.count, self.end_of_text = count, end_of_text

    def cached_state(self) -> SequenceState:
        """The last ids as their distance from that of the end of a text, of which there are as many before a
        sequence."""
        return SequenceState((((self.count,), torch.int64),))

    def before(self, tokens: Tensor, cache: Cache | None) -> Tensor:
        """[B, S] -> [B, count + S] of whole sequences; of a cache [1, S, count + 1], the ids up to each position."""
        if cache is None:
            return F.pad(tokens, (self.count, 0), value=self.end_of_text)

        def advance(new: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
            (ids,), (past,) = new, state
            history = torch.cat((past + self.end_of_text, ids), 1)
            kept = history[:, history.shape[1] - self.count :] - self.end_of_text
            return history.unfold(1, self.count + 1, 1), (kept,)

        return cache.advance(self, advance, (tokens,))


class DilatedConvolution(LayoutModule):
    """Causal depthwise convolution of every `dilation`-th position: [B, S, C] -> the same.

    weight [C, 1, k], on every rank. Sequence parallelism gathers the positions, of which each rank keeps its own.
    """

    weight: Tensor

    def __init__(self, channels: int, taps: int, dilation: int, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.taps, self.dilation = taps, dilation
        layout = ParameterLayout((channels, 1, taps), zeros, partial_gradient=sequence_axes(ctx))
        self.declare("weight", layout)

    @property
    def reach(self) -> int:
        """How many positions before its own the first tap is."""
        return (self.taps - 1) * self.dilation

    def forward(self, x: Tensor, segments: Tensor | None, cache: Cache | None) -> Tensor:
        tp = self.ctx.tp
        if not self.ctx.sequence_parallel:
            return self._over_whole(x, segments, cache)
        whole = self._over_whole(gather_from(x, SEQUENCE_DIM, tp), segments, cache)
        return whole.chunk(tp.size, SEQUENCE_DIM)[tp.rank]

    def _over_whole(self, x: Tensor, segments: Tensor | None, cache: Cache | None) -> Tensor:
        if cache is not None:
            return cache.advance(self, self._advance, (x,))
        return self._convolve(with_past(x, self.reach, None)) if segments is None else self._of_documents(x, segments)

    def _convolve(self, extended: Tensor) -> Tensor:
        """[B, reach + S, C] -> [B, S, C]"""
        rows = extended.transpose(1, 2)
        return F.conv1d(rows, self.weight, groups=rows.shape[1], dilation=self.dilation).transpose(1, 2)

    def _of_documents(self, x: Tensor, segments: Tensor) -> Tensor:
        """segments [B, S]: documents see nothing of one another."""
        extended, length = with_past(x, self.reach, None), x.shape[1]
        before = F.pad(segments, (self.reach, 0), value=-1)
        total = torch.zeros_like(x)
        for tap in range(self.taps):
            start = tap * self.dilation
            same_document = before[:, start : start + length] == segments
            total = total + extended[:, start : start + length] * self.weight[:, 0, tap] * same_document[..., None]
        return total

    def _advance(self, inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        extended = with_past(inputs[0], self.reach, state[0])
        return self._convolve(extended), (extended[:, extended.shape[1] - self.reach :],)

    def cached_state(self) -> SequenceState:
        """The inputs that later positions read."""
        return SequenceState((((self.reach, self.weight.shape[0]), self.weight.dtype),))


class NGramLayer(nn.Module):
    """What layer `number` adds to the streams [B, S, n H] for the n-grams that end at each position."""

    def __init__(self, config: NGramConfigLike, ctx: ParallelContext, number: int) -> None:
        super().__init__()
        assert config.ngram_end_of_text_id is not None  # required by the configuration of the family
        self.streams, self.hidden = config.residual_streams, config.hidden_size
        self.table, self.end_of_text = config.ngram_table_of(number), config.ngram_end_of_text_id
        self.heads, size = len(self.table.sizes), config.ngram_embedding_size
        width, init = self.streams * self.hidden, normal(config.init_method_std)
        self.context = TokenContext(config.ngram_max_length - 1, self.end_of_text)
        self.embedding = VocabParallelEmbedding(
            self.table.rows(config.ngram_rows_divisible_by), size // self.heads, ctx, init=init, divisible_by=1
        )
        self.key_proj = ReplicatedLinear(size, width, ctx, init=init, bias=False, on_sequence=True)
        self.value_proj = ReplicatedLinear(size, self.hidden, ctx, init=init, bias=False, on_sequence=True)
        self.key_norm, self.query_norm, self.conv_norm = (StreamNorm(config, ctx) for _ in range(3))
        self.conv = DilatedConvolution(width, config.ngram_conv_kernel, config.ngram_max_length, ctx)

    def forward(self, streams: Tensor, tokens: Tensor, segments: Tensor | None, cache: Cache | None) -> Tensor:
        """tokens, segments [B, S]: of whole sequences."""
        embedded = self.embeddings(tokens, segments, cache)
        keys = self.key_norm(self.key_proj(embedded)).unflatten(-1, (self.streams, self.hidden))
        queries = self.query_norm(streams).unflatten(-1, (self.streams, self.hidden))
        gate = (keys * queries).sum(-1, keepdim=True) / math.sqrt(self.hidden)
        gate = gate.abs().clamp_min(LEAST).sqrt() * gate.sign()
        values = (gate.sigmoid() * self.value_proj(embedded).unsqueeze(-2)).flatten(-2)
        return values + F.silu(self.conv(self.conv_norm(values), segments, cache))

    def embeddings(self, tokens: Tensor, segments: Tensor | None, cache: Cache | None) -> Tensor:
        """[B, S] -> [B, S, embedding size], of this rank's positions under sequence parallelism"""
        history = self.context.before(tokens, cache)
        if cache is None:
            rows = ngram_rows(history, self.table, self.end_of_text, segments)
        else:
            # [S, count + 1]: each position with the ids before it is a sequence of its own.
            rows = ngram_rows(history[0], self.table, self.end_of_text).transpose(0, 1)
        # The rows of a position side by side, so that a shard of the sequence has whole positions.
        return self.embedding(rows.flatten(1)).unflatten(1, (-1, self.heads)).flatten(2)


def ngram_rows(history: Tensor, table: NGramTable, end_of_text: int, segments: Tensor | None = None) -> Tensor:
    """history [B, longest - 1 + S] int64: the ids of S positions with those before them -> [B, S, heads] rows.

    segments [B, S]: documents of a packed sequence, which see nothing of one another.
    """
    longest = len(table.multipliers)
    length, heads = history.shape[1] - (longest - 1), len(table.sizes) // (longest - 1)
    sizes, offsets = (torch.tensor(values, device=history.device) for values in (table.sizes, table.offsets))
    token = history[:, longest - 1 :]
    mixed, rows = token * table.multipliers[0], list[Tensor]()
    for back in range(1, longest):
        before = history[:, longest - 1 - back :][:, :length]
        ended = token == end_of_text if back > 1 else torch.zeros_like(token, dtype=torch.bool)
        if segments is not None:
            ended = ended | _in_other_segment(segments, back)
        token = before.masked_fill(ended, end_of_text)
        mixed = mixed ^ (token * table.multipliers[back])
        head_range = slice((back - 1) * heads, back * heads)
        rows.append(mixed[..., None] % sizes[head_range] + offsets[head_range])
    return torch.cat(rows, -1)


def _in_other_segment(segments: Tensor, back: int) -> Tensor:
    """[B, S] -> [B, S] bool: whether the position `back` before each is of another document."""
    other = torch.zeros_like(segments, dtype=torch.bool)
    other[:, back:] = segments[:, back:] != segments[:, :-back]
    return other
