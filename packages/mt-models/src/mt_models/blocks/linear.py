"""Linear layers that are not in mt_core: one replicated on every tensor-parallel rank, for the small matrices of heads,
and a column-parallel one whose output is several blocks of different sizes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mt_core.nn.layout import Init, ParameterLayout, Split, sequence_axes, zeros
from mt_core.nn.linear import Cut, LinearModule, column_parallel_linear, linear
from mt_core.parallel.context import AxisName, ParallelContext


class ReplicatedLinear(LinearModule):
    """y = x W^T + b, W [out, in].

    on_sequence: it is applied to the residual stream, which sequence parallelism shards, so that each rank's
    gradient is partial, from its own positions.
    """

    cut: Cut = "none"
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ctx: ParallelContext,
        *,
        init: Init,
        bias: bool = True,
        on_sequence: bool = False,
    ) -> None:
        super().__init__(ctx)
        self.multiply = whole_linear
        # Without on_sequence every rank has all positions and computes the
        # whole gradient: summing it would multiply it.
        partial: tuple[AxisName, ...] = sequence_axes(ctx) if on_sequence else ()
        self.declare("weight", ParameterLayout((out_features, in_features), init, partial_gradient=partial))
        self.declare("bias", ParameterLayout((out_features,), zeros, partial_gradient=partial) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return self.multiply(x, self.weight, self.bias, self.ctx)


def whole_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ctx: ParallelContext) -> Tensor:
    """x W^T + b on every rank."""
    return linear(x, weight, bias)


def effective_weight(layer: LinearModule) -> Tensor:
    """The weight [out, in] of this rank, with the update of an adapter that a model transform gave the layer, where the
    matrix itself is used and not its product."""
    adapter = getattr(layer, "adapter", None)
    return layer.weight if adapter is None or not adapter.is_on else adapter.effective_weight(layer.weight)


# -- packed: several blocks of different sizes, such as Mamba's input projection ---------------------


def packed_layout(blocks: Sequence[int], rest: Sequence[int], init: Init) -> ParameterLayout:
    """Layout [sum of blocks, *rest]; a tensor-parallel rank holds its share of each block. Block sizes have to be
    divisible by the ranks."""
    return ParameterLayout((sum(blocks), *rest), init, (Split(dim=0, axis="tp", sections=tuple(blocks)),))


class PackedColumnParallelLinear(LinearModule):
    """y = x W^T + b, W [sum of blocks, in], with the rows of every block sharded over the ranks."""

    cut: Cut = "output"
    bias: Tensor | None

    def __init__(
        self, in_features: int, blocks: Sequence[int], ctx: ParallelContext, *, bias: bool, init: Init
    ) -> None:
        super().__init__(ctx)
        self.multiply = column_parallel_linear
        self.local_blocks = [block // ctx.tp.size for block in blocks]
        self.declare("weight", packed_layout(blocks, (in_features,), init))
        self.declare("bias", packed_layout(blocks, (), zeros) if bias else None)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """[B, S, in] (S sharded with sequence parallelism) -> [B, S, block / tp] for each block"""
        return self.joined(x).split(self.local_blocks, dim=-1)

    def joined(self, x: Tensor) -> Tensor:
        """The blocks side by side."""
        # One product for all blocks, since they read the same x: its gradient is reduced once.
        return self.multiply(x, self.weight, self.bias, self.ctx)
