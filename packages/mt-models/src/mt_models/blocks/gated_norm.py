"""The gated norm at the end of a Mamba-2 mixer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.layout import LayoutModule, ParameterLayout, Split, ones
from mt_core.parallel.context import ParallelContext


class GatedRMSNorm(LayoutModule):
    """RMSNorm of x * silu(gate), the mean square over each of `groups` equal parts of the channels, in fp32.

    Tensor parallelism gives each rank whole groups. (The norm is applied after the gate: norm_before_gate=False.)
    """

    weight: Tensor

    def __init__(self, size: int, groups: int, eps: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.group_size, self.eps = size // groups, eps
        self.declare("weight", ParameterLayout((size,), ones, (Split(dim=0, axis="tp"),)))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [..., channels of this rank]"""
        # [..., C] -> [..., groups of this rank, C / groups]. Whole groups: the mean square needs no all-reduce over tp.
        gated = (x.float() * F.silu(gate.float())).unflatten(-1, (-1, self.group_size))
        normed = F.rms_norm(gated, (self.group_size,), eps=self.eps).flatten(-2)
        return (normed * self.weight.float()).to(x.dtype)
