"""Linear layers whose weights are divided over the tensor-parallel axis."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, Split, zeros
from mt_core.parallel.context import ParallelContext


class ColumnParallelLinear(LayoutModule):
    """y = x W^T + b with the output features divided: W [out, in], split on dimension 0.

    sections: blocks of output features that each rank holds a share of (2 for gate and up).
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ctx: ParallelContext,
        *,
        bias: bool,
        init: Init,
        sections: int = 1,
    ) -> None:
        super().__init__(ctx)
        split = Split(dim=0, axis="tp", sections=sections)
        self.declare("weight", ParameterLayout((out_features, in_features), init, (split,)))
        self.declare("bias", ParameterLayout((out_features,), zeros, (split,)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(LayoutModule):
    """y = x W^T + b with the input features divided: W [out, in], split on dimension 1; b is replicated."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, ctx: ParallelContext, *, bias: bool, init: Init) -> None:
        super().__init__(ctx)
        self.declare("weight", ParameterLayout((out_features, in_features), init, (Split(dim=1, axis="tp"),)))
        self.declare("bias", ParameterLayout((out_features,), zeros) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return F.linear(x, self.weight, self.bias)
