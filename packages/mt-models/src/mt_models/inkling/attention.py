"""Attention with relative positions that a projection of the input weighs, and convolutions of keys and values.

k = norm(conv(Wk x))      v = conv(Wv x)      q = norm(Wq x)      r = Wr x, of R numbers a head
score of a query s and a key t = q_s k_t / D + r_s table[:, s - t]      table [R, extent], of all heads of a layer
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.cache import Cache, PositionState
from mt_core.nn.layout import LayoutModule, ParameterLayout, normal
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.parallel.context import AxisName, ParallelContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.rotary import RotaryAngles
from mt_models.inkling.config import InklingConfig
from mt_models.inkling.residual_conv import ResidualConv


class RelativeTable(LayoutModule):
    """Biases of scores by distance: weight [R, extent], of all heads, each of which weighs the rows."""

    weight: Tensor

    def __init__(self, rank: int, extent: int, std: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        # Tensor-parallel ranks have other heads.
        partial: tuple[AxisName, ...] = ("tp",) if ctx.tp.size > 1 else ()
        self.declare("weight", ParameterLayout((rank, extent), normal(std), partial_gradient=partial))

    def forward(self, factors: Tensor, keys: int) -> Tensor:
        """factors [B, S, N, R] of the last S of `keys` positions -> [B, N, S, keys]; 0 beyond the extent."""
        queries, extent = factors.shape[1], self.weight.shape[1]
        # [B, N, S, extent]
        of_distances = (factors @ self.weight.to(factors.dtype)).transpose(1, 2)
        places = torch.arange(keys, device=factors.device)
        distance = places[keys - queries :, None] - places[None, :]  # [S, keys]
        chosen = distance.clamp(0, extent - 1).expand(*of_distances.shape[:2], -1, -1)
        return of_distances.gather(-1, chosen).masked_fill((distance < 0) | (distance >= extent), 0.0)


class RelativeAttention(SelfAttention):
    """config: with the heads of the layer (`InklingConfig.of_layer`). Rows of linear_qkv are grouped by key-value head:
    of each its query heads, its key, its value, and the R numbers of each of its query heads.

    extent: distances with a bias.
    """

    def __init__(
        self, config: InklingConfig, core: AttentionCore, ctx: ParallelContext, window: int | None, extent: int
    ) -> None:
        super().__init__(config, core, ctx, window=window, rotates=False)
        heads, groups, size = config.num_attention_heads, config.query_groups, self.head_dim
        self.relative_rank = config.relative_rank
        # Replaces the matrix that SelfAttention has built, by one with the rows of relative positions.
        self.rows = heads * (size + self.relative_rank) + 2 * groups * size
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            self.rows,
            ctx,
            bias=False,
            init=normal(config.init_method_std),
            padded=-(-self.rows // ctx.tp.size) * ctx.tp.size,
        )
        # The core divides by sqrt(D).
        self.query_scale = size**-0.5
        self.k_conv = ResidualConv(groups * size, config.conv_kernel, ctx, sharded=True)
        self.v_conv = ResidualConv(groups * size, config.conv_kernel, ctx, sharded=True)
        self.relative = RelativeTable(self.relative_rank, extent, config.init_method_std, ctx)

    def forward(self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None, cache: Cache | None) -> Tensor:
        q, k, v, factors = self.project_with_factors(x)
        k, v = (
            conv(y.flatten(2), pattern, cache).unflatten(2, y.shape[2:])
            for conv, y in ((self.k_conv, k), (self.v_conv, v))
        )
        q, k = self.normalize(q, k)
        if self.window is None and angles is not None and angles.query_scale is not None:
            q, factors = ((y.float() * angles.query_scale).to(y.dtype) for y in (q, factors))
        within = pattern.within(self.window)

        def attend(q: Tensor, factors: Tensor, k: Tensor, v: Tensor) -> Tensor:
            bias = self.relative(factors, k.shape[1])
            return self.attend(q, k, v, replace(within, bias=bias, _mask=None, _within={}))

        out = attend(q, factors, k, v) if cache is None else cache.attend(self, attend, (q, factors), (k, v))
        return self.linear_proj(out.flatten(2))

    def project_with_factors(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[B, S, H] -> q [B, S, N, D], k and v [B, S, G, D], factors [B, S, N, R], of this rank's groups"""
        heads, size = self.heads_per_group, self.head_dim
        # [B, S, G, rows of a group]
        groups = self.linear_qkv(x).unflatten(-1, (-1, self.rows // self.query_groups))
        q, k, v, factors = groups.split((heads * size, size, size, heads * self.relative_rank), dim=-1)
        return q.unflatten(-1, (heads, -1)).flatten(2, 3), k, v, factors.unflatten(-1, (heads, -1)).flatten(2, 3)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Overridden so that no fused kernel stands for a projection without relative positions.
        raise NotImplementedError("RelativeAttention projects by project_with_factors")

    def cached_state(self) -> PositionState:
        """Keys and values of this rank's groups, behind their convolutions."""
        shape = (self.query_groups // self.tp.size, self.head_dim)
        return PositionState((shape, shape), self.linear_qkv.weight.dtype, self.window)
