"""What a Mamba-2 mixer computes between its projections: convolutions, time steps, the recurrence, the skip.

Shapes: B batch, S positions, H heads, P head size, G groups, N state size, k taps of the convolution. The heads and
groups are all of the model's, or those of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.batch_invariance import is_batch_invariant
from mt_models.blocks.causal_conv import causal_conv, causal_conv_of_segments, with_past
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
    """Of x [H, P, k], of b and of c [G, N, k]."""
    conv_bias: tuple[Tensor, Tensor, Tensor] | None
    """Of x [H, P], of b and of c [G, N]."""
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

    def __call__(self, inputs: ScanInputs, weights: ScanWeights, segment_ids: Tensor | None = None) -> Tensor:
        """-> [B, S, H, P]. segment_ids [B, S]: convolutions and state are reset between documents."""
        if segment_ids is None:
            parts = [causal_conv(*part) for part in _convolutions(inputs, weights)]
        else:
            parts = [causal_conv_of_segments(*part, segment_ids) for part in _convolutions(inputs, weights)]
        x, b, c = _activated(parts, inputs)
        # The chunked form depends on where a sequence's chunks begin, and a
        # sequence that is decoded in parts has other chunks.
        if is_batch_invariant():
            dt, a = self.time_steps(inputs, weights), rates(weights)
            return recurrent_scan(x, dt, a, b, c, segment_ids=segment_ids)[0] + skipped(x, weights)
        y, _ = chunked_scan(
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
        parts = _convolutions(inputs, weights)
        pasts = before[:3]
        x, b, c = _activated([causal_conv(*part, past) for part, past in zip(parts, pasts, strict=True)], inputs)
        # The last k - 1 inputs, before the convolution, are the past of the next call. With
        # fewer than k - 1 new positions some of them are of the past before, so that they
        # are cut from [past, new] and not from the new alone.
        last_x, last_b, last_c = (
            with_past(part[0], past.shape[1], past)[:, part[0].shape[1] :]
            for part, past in zip(parts, pasts, strict=True)
        )
        dt, a = self.time_steps(inputs, weights), rates(weights)
        # A decode step has one position, for which the recurrence is less work than a chunk with its fp64 sums.
        if x.shape[1] == 1 or is_batch_invariant():
            y, state = recurrent_scan(x, dt, a, b, c, state=before.state)
        else:
            y, state = chunked_scan(x, dt, a, b, c, chunk_size=self.chunk_size, state=before.state)
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


def _activated(parts: list[Tensor], like: ScanInputs) -> list[Tensor]:
    """Flat channels [B, S, C] -> heads or groups as those of `like`."""
    return [F.silu(part).unflatten(-1, shape.shape[2:]) for part, shape in zip(parts, like[:3], strict=True)]
