"""What a gated delta net computes between its projections: convolutions, decays, the delta rule.

Shapes: B batch, S positions, G key heads of D channels, H value heads of V channels, k taps of the convolution, C = 2
G D + H V channels of queries, keys and values side by side. The heads are all of the model's, or those of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.batch_invariance import is_batch_invariant
from mt_core.nn.context_parallel.masks import SegmentGatherer
from mt_core.nn.context_parallel.ulysses import group_repeats, to_heads, to_tokens
from mt_core.nn.context_parallel.zigzag import in_order
from mt_core.parallel.context import Axis
from mt_models.blocks.convolutions import PLAIN, Convolutions
from mt_models.blocks.gated_delta_rule import DeltaInputs, recurrent_delta_rule


class DeltaRule(Protocol):
    """Computes whole sequences: see `recurrent_delta_rule`."""

    def __call__(
        self, inputs: DeltaInputs, *, state: Tensor | None = None, segment_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


class DeltaWeights(NamedTuple):
    conv: Tensor
    """[C, k]: taps of queries, keys and values."""
    A_log: Tensor
    """[H]: the state decays by the rate exp(A_log)."""
    dt_bias: Tensor
    """[H]"""


@dataclass(frozen=True)
class DeltaHeads:
    """How many heads there are, and their channels."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, C] -> q and k [B, S, G, D], v [B, S, H, V]"""
        q, k, v = mixed.split(self.blocks, -1)
        return (
            q.unflatten(-1, (-1, self.key_dim)),
            k.unflatten(-1, (-1, self.key_dim)),
            v.unflatten(-1, (-1, self.value_dim)),
        )


@dataclass(frozen=True)
class DeltaScan:
    """q, k, v = silu(convolution); beta = strength sigmoid(b); g = -exp(A_log) softplus(a + dt_bias); the delta
    rule."""

    heads: DeltaHeads
    rule: DeltaRule
    strength: float
    recurrent: DeltaRule = recurrent_delta_rule
    """The rule, one position after the other."""
    step: DeltaRule = recurrent_delta_rule
    """The same for single positions that are decoded."""
    convolutions: Convolutions = field(default=PLAIN, kw_only=True)

    def __call__(
        self, mixed: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights, segment_ids: Tensor | None = None
    ) -> Tensor:
        """mixed [B, S, C], b and a [B, S, H] -> [B, S, H, V]. segment_ids [B, S]: convolutions and state are reset
        between documents."""
        inputs = self._inputs(self.convolutions.whole(mixed, weights.conv, None, segment_ids, True), b, a, weights)
        # The chunked form depends on where a sequence's chunks begin, and a sequence that is decoded in parts has
        # others.
        rule = self.recurrent if is_batch_invariant() else self.rule
        return rule(inputs, segment_ids=segment_ids)[0]

    def advance(
        self, mixed: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights, past: Tensor, state: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The positions after a state -> [B, S, H, V], and the state behind them. past [B, k - 1, C]: the last inputs
        of the convolutions; state [B, H, D, V]."""
        convolved, kept = self.convolutions.step(mixed, weights.conv, None, past, True)
        inputs = self._inputs(convolved, b, a, weights)
        rule = self.step if mixed.shape[1] == 1 else self.rule
        o, state = (self.recurrent if is_batch_invariant() else rule)(inputs, state=state)
        return o, (kept, state)

    def _inputs(self, convolved: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights) -> DeltaInputs:
        q, k, v = self.heads.split(convolved)
        beta = b.sigmoid()
        return DeltaInputs(q, k, v, self._decays(a, weights), beta if self.strength == 1.0 else beta * self.strength)

    def _decays(self, a: Tensor, weights: DeltaWeights) -> Tensor:
        """[B, S, H]"""
        # In fp32: they are summed over positions in the exponent of the decay. -exp keeps the rate negative for every
        # value of the parameter.
        return -weights.A_log.float().exp() * F.softplus(a.float() + weights.dt_bias)


# -- context parallelism, as for Mamba (see mt_models.blocks.mamba_scan) -------------------------------


class ContextParallelDeltaScan:
    """A DeltaScan for tensors in zig-zag shards: an all-to-all exchanges positions for heads, and a second one sends
    the results back. Collective: every rank of the axis calls it, in the same order."""

    def __init__(self, scan: DeltaScan, axis: Axis) -> None:
        heads = scan.heads
        self.heads, self.axis = heads, axis
        # A rank needs the keys of its own value heads: key heads that cannot be divided over the ranks are repeated.
        self.repeats = group_repeats(heads.value_heads, heads.key_heads, axis.size)
        local = DeltaHeads(
            heads.key_heads * self.repeats // axis.size, heads.key_dim, heads.value_heads // axis.size, heads.value_dim
        )
        self.scan = replace(scan, heads=local)
        # [CP, B, S / CP] of all ranks -> [B, S], in the order of the sequence.
        self.gather_segments = SegmentGatherer(
            axis, lambda shards: in_order(shards.movedim(0, 1).flatten(1, 2), 1, axis.size)
        )

    def __call__(
        self, mixed: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights, segment_ids: Tensor | None = None
    ) -> Tensor:
        """[B, S / CP, ...] of all heads of a tensor-parallel rank -> [B, S / CP, H, V]"""
        q, k, v = self.heads.split(mixed)
        q, k = (x.repeat_interleave(self.repeats, dim=2) for x in (q, k))
        # One all-to-all for all five. b gets a channel dimension of 1, and so does a that is of heads.
        a = a.unflatten(-1, (self.heads.value_heads, -1))
        q, k, v, b, a = to_heads((q, k, v, b[..., None], a), self.axis)
        qkv = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
        o = self.scan(qkv, b.squeeze(-1), a.flatten(2), self._own(weights), self.gather_segments(segment_ids))
        return to_tokens(o, self.axis)

    def _own(self, weights: DeltaWeights) -> DeltaWeights:
        """The heads that this rank scans. Each rank's gradient of them is complete, and zero for the others: the sum
        over ranks, which data parallelism takes anyway, equals that of one process."""
        q, k, v = weights.conv.split(self.heads.blocks)
        q, k = (x.unflatten(0, (-1, self.heads.key_dim)).repeat_interleave(self.repeats, dim=0) for x in (q, k))
        v = v.unflatten(0, (-1, self.heads.value_dim))
        conv = torch.cat([self._share(x).flatten(0, 1) for x in (q, k, v)])
        return DeltaWeights(conv, self._share(weights.A_log), self._share(weights.dt_bias))

    def _share(self, x: Tensor) -> Tensor:
        return x.chunk(self.axis.size)[self.axis.rank]
