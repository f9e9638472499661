"""What a Mamba-2 mixer computes between its projections: convolutions, time steps, the recurrence, the skip.

Shapes: B batch, S positions, H heads, P head size, G groups, N state size, k taps of the convolution. The heads and
groups are all of the model's, or those of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.batch_invariance import is_batch_invariant
from mt_core.nn.context_parallel.masks import SegmentGatherer
from mt_core.nn.context_parallel.ulysses import group_repeats, to_heads, to_tokens
from mt_core.nn.context_parallel.zigzag import in_order
from mt_core.parallel.context import Axis
from mt_models.blocks.convolutions import PLAIN, Convolutions
from mt_models.blocks.state_space import chunked_scan, recurrent_scan


class ScanInputs(NamedTuple):
    x: Tensor
    """[B, S, H, P]"""
    b: Tensor
    """[B, S, G, N]: input matrix of the state."""
    c: Tensor
    """[B, S, G, N]: output matrix of the state."""
    dt: Tensor
    """[B, S, H]: time steps before their bias and softplus."""


class ScanWeights(NamedTuple):
    conv: tuple[Tensor, Tensor, Tensor]
    """Taps of x [H, P, k], of b and of c [G, N, k]."""
    conv_bias: tuple[Tensor, Tensor, Tensor] | None
    """Biases of x [H, P], of b and of c [G, N]."""
    A_log: Tensor
    """[H]: the state decays by the rate exp(A_log)."""
    D: Tensor
    """[H]: factor of the skip connection."""
    dt_bias: Tensor
    """[H]"""


class ScanState(NamedTuple):
    """What goes on from one position to the next."""

    x: Tensor
    """[B, k - 1, H P]: the last inputs of the convolution of x."""
    b: Tensor
    """[B, k - 1, G N]"""
    c: Tensor
    """[B, k - 1, G N]"""
    state: Tensor
    """[B, H, P, N] in fp32"""


@dataclass(frozen=True)
class MambaScan:
    """silu(convolution) of x, b and c; dt = softplus(dt + dt_bias) within its limits; the recurrence; + D x."""

    chunk_size: int
    dt_lower_limit: float
    dt_upper_limit: float | None
    convolutions: Convolutions = PLAIN
    scan: Callable[..., tuple[Tensor, Tensor]] = chunked_scan
    """The recurrence over whole sequences"""
    step: Callable[..., tuple[Tensor, Tensor]] = recurrent_scan
    """The recurrence for single positions"""

    def __call__(self, inputs: ScanInputs, weights: ScanWeights, segment_ids: Tensor | None = None) -> Tensor:
        """-> [B, S, H, P]. segment_ids [B, S]: convolutions and state are reset between documents."""
        parts = [self.convolutions.whole(*part, segment_ids, True) for part in _convolutions(inputs, weights)]
        x, b, c = _by_head(parts, inputs)
        # The chunked form depends on where a sequence's chunks begin, and a
        # sequence that is decoded in parts has other chunks.
        if is_batch_invariant():
            dt, a = self.time_steps(inputs, weights), rates(weights)
            return recurrent_scan(x, dt, a, b, c, segment_ids=segment_ids)[0] + skipped(x, weights)
        y, _ = self.scan(
            x,
            self.time_steps(inputs, weights),
            rates(weights),
            b,
            c,
            chunk_size=self.chunk_size,
            segment_ids=segment_ids,
        )
        return y + skipped(x, weights)

    def advance(self, inputs: ScanInputs, weights: ScanWeights, before: ScanState) -> tuple[Tensor, ScanState]:
        """The positions after a state -> [B, S, H, P], and the state behind them."""
        advanced = [
            self.convolutions.step(*part, past, True)
            for part, past in zip(_convolutions(inputs, weights), before[:3], strict=True)
        ]
        x, b, c = _by_head([part for part, _ in advanced], inputs)
        last_x, last_b, last_c = (last for _, last in advanced)
        dt, a = self.time_steps(inputs, weights), rates(weights)
        # A decode step has one position, for which the recurrence is less work than a chunk with its fp64 sums.
        if x.shape[1] == 1 or is_batch_invariant():
            step = recurrent_scan if is_batch_invariant() else self.step
            y, state = step(x, dt, a, b, c, state=before.state)
        else:
            y, state = self.scan(x, dt, a, b, c, chunk_size=self.chunk_size, state=before.state)
        return y + skipped(x, weights), ScanState(last_x, last_b, last_c, state)

    def time_steps(self, inputs: ScanInputs, weights: ScanWeights) -> Tensor:
        """[B, S, H] in fp32"""
        # In fp32: dt is summed over positions in the exponent of the decay, where roundings of bf16 would add up.
        dt = F.softplus(inputs.dt.float() + weights.dt_bias)
        return dt.clamp(self.dt_lower_limit, self.dt_upper_limit)


def rates(weights: ScanWeights) -> Tensor:
    """[H] in fp32, negative"""
    # -exp keeps the rate negative for every value of the parameter: the state can only decay.
    return -weights.A_log.float().exp()


def skipped(x: Tensor, weights: ScanWeights) -> Tensor:
    """[B, S, H, P]"""
    return x * weights.D[:, None].to(x.dtype)


Convolution = tuple[Tensor, Tensor, Tensor | None]
"""Input [B, S, C], weight [C, k], bias [C]."""


def _convolutions(inputs: ScanInputs, weights: ScanWeights) -> list[Convolution]:
    biases = weights.conv_bias or (None, None, None)
    return [
        # [B, S, H, P] -> [B, S, H P] and [H, P, k] -> [H P, k]; of b and c G N channels. dt is not convolved.
        (part.flatten(2), weight.flatten(0, 1), None if bias is None else bias.flatten())
        for part, weight, bias in zip(inputs[:3], weights.conv, biases, strict=True)
    ]


def _by_head(parts: list[Tensor], like: ScanInputs) -> list[Tensor]:
    """Flat channels [B, S, C] -> heads or groups as those of `like`."""
    return [part.unflatten(-1, shape.shape[2:]) for part, shape in zip(parts, like[:3], strict=True)]


# -- context parallelism, as in Megatron -------------------------------------------------------------
#
# A recurrence needs its positions in order, so an all-to-all exchanges positions for heads: each rank scans the whole
# sequence for its share of the heads, and a second all-to-all sends the results back (as in Ulysses, see
# mt_core.nn.context_parallel.ulysses). Groups that are not divisible by the ranks are repeated. Each rank's gradient of
# the weights of its heads is complete, and zero for the others: the sum over ranks, which data parallelism takes
# anyway, equals that of one process.


class ContextParallelScan:
    """A MambaScan for tensors in zig-zag shards. Collective: every rank of the axis calls it, in the same order."""

    def __init__(self, scan: MambaScan, axis: Axis) -> None:
        self.scan, self.axis = scan, axis
        # [CP, B, S / CP] of all ranks -> [B, CP, S / CP] -> [B, S]; in_order
        # then undoes the zig-zag order of the chunks.
        self.gather_segments = SegmentGatherer(
            axis, lambda shards: in_order(shards.movedim(0, 1).flatten(1, 2), 1, axis.size)
        )

    def __call__(self, inputs: ScanInputs, weights: ScanWeights, segment_ids: Tensor | None = None) -> Tensor:
        """Inputs [B, S / CP, ...] of all heads of a tensor-parallel rank, and their weights -> [B, S / CP, H, P]"""
        # A rank needs the b and c of its own heads. CP = 4 and G = 2: each group
        # is repeated twice, so that 4 can be sharded.
        repeats = group_repeats(inputs.x.shape[2], inputs.b.shape[2], self.axis.size)
        b, c = (group.repeat_interleave(repeats, dim=2) for group in (inputs.b, inputs.c))
        # One all-to-all for all four. dt gets a channel dimension of 1, since
        # the exchange moves [B, S, heads, channels].
        x, b, c, dt = to_heads((inputs.x, b, c, inputs.dt[..., None]), self.axis)
        local_weights = own_weights(weights, repeats, self.axis)
        y = self.scan(ScanInputs(x, b, c, dt.squeeze(-1)), local_weights, self.gather_segments(segment_ids))
        return to_tokens(y, self.axis)


def own_weights(weights: ScanWeights, repeats: int, axis: Axis) -> ScanWeights:
    """The heads that this rank scans, and their groups."""

    # Views of the parameters. Contiguous shares, in the order in which to_heads gives heads to ranks.
    def of_heads(x: Tensor) -> Tensor:
        return x.chunk(axis.size)[axis.rank]

    def of_groups(x: Tensor) -> Tensor:
        return of_heads(x.repeat_interleave(repeats, dim=0))

    def of_parts(parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, b, c = parts
        return of_heads(x), of_groups(b), of_groups(c)

    return ScanWeights(
        of_parts(weights.conv),
        None if weights.conv_bias is None else of_parts(weights.conv_bias),
        of_heads(weights.A_log),
        of_heads(weights.D),
        of_heads(weights.dt_bias),
    )
