"""Shared experts: a dense feed-forward that is applied to every token, in addition to the routed experts."""

from __future__ import annotations

from torch import Tensor

from mt_core.nn.activations import activate, is_gated
from mt_core.nn.feed_forward import FeedForwardShape
from mt_core.nn.layout import LayoutModule, ParameterLayout, normal, sequence_axes
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear, linear
from mt_core.parallel.context import ParallelContext


class SharedExperts(LayoutModule):
    """linear_fc2(activation(linear_fc1(x))), times sigmoid(x gate_weight^T) if gated: [B, S, H] -> the same.

    gate_weight: [1, H], replicated over tp. Several shared experts are one feed-forward of their total width.
    """

    gate_weight: Tensor | None

    def __init__(self, shape: FeedForwardShape, ffn_size: int, ctx: ParallelContext, *, gate: bool) -> None:
        super().__init__(ctx)
        self.activation = shape.activation
        blocks = 2 if is_gated(shape.activation) else 1
        hidden, bias = shape.hidden_size, shape.add_bias_linear
        self.linear_fc1 = ColumnParallelLinear(
            hidden, blocks * ffn_size, ctx, bias=bias, init=normal(shape.init_method_std), sections=blocks
        )
        self.linear_fc2 = RowParallelLinear(ffn_size, hidden, ctx, bias=bias, init=normal(shape.output_init_std))
        # With sequence parallelism each tensor-parallel rank applies the gate to other positions, so its gradient is
        # partial.
        layout = ParameterLayout((1, hidden), normal(shape.init_method_std), partial_gradient=sequence_axes(ctx))
        self.declare("gate_weight", layout if gate else None)

    def forward(self, x: Tensor) -> Tensor:
        # [B, S, H]
        out = self.linear_fc2(activate(self.activation, self.linear_fc1(x)))
        return out if self.gate_weight is None else out * linear(x, self.gate_weight, None).sigmoid()
