"""Self-attention with an output gate: out = linear_proj(attention * sigmoid(gate)), the gate a second projection of the
input beside the queries (Qwen3-Next, 2025)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.cache import Cache
from mt_core.nn.layout import normal
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.nn.norm import Norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import AttentionConfigLike, SelfAttention
from mt_models.blocks.rotary import RotaryAngles


class GatedSelfAttention(SelfAttention):
    """Rows of linear_qkv are grouped as those of `SelfAttention`, with the gates of a group's query heads behind its
    query heads, as Megatron stores them: queries, gates, key, value.

    head_norm: makes the norms of query and key heads; default: the configured ones. window, rotates: as of
    SelfAttention.
    """

    def __init__(
        self,
        config: AttentionConfigLike,
        core: AttentionCore,
        ctx: ParallelContext,
        *,
        head_norm: Callable[[], Norm] | None = None,
        window: int | None = None,
        rotates: bool = True,
    ) -> None:
        super().__init__(config, core, ctx, window=window, rotates=rotates)
        # Replaces the matrix that SelfAttention has built, by one with the rows of the gates.
        self.rows += config.num_attention_heads * config.head_dim
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            self.rows,
            ctx,
            bias=config.add_bias_linear or config.add_qkv_bias,
            init=normal(config.init_method_std),
            padded=-(-self.rows // ctx.tp.size) * ctx.tp.size,
        )
        if head_norm is not None:
            self.q_layernorm, self.k_layernorm = head_norm(), head_norm()

    def forward(self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None, cache: Cache | None) -> Tensor:
        q, gate, k, v = self.project_with_gate(x)
        q, k = self.normalize(q, k)
        if angles is not None and self.rotates:
            angles = angles.within(self.window)
            q, k = self.apply_rotary(q, k, angles.cos, angles.sin, self.rotary_interleaved)
        out = self.attend_or_decode(q, k, v, pattern, cache) * torch.sigmoid(gate)
        return self.linear_proj(out.flatten(2))

    def project_with_gate(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[B, S, H] -> q and gate [B, S, N, D], k and v [B, S, G, D], of this rank's groups"""
        heads = self.heads_per_group
        # [B, S, G, 2 N / G + 2, D]
        q, gate, k, v = self.groups_of_rows(x).split((heads, heads, 1, 1), dim=3)
        if self.ranks_per_group > 1:
            part = self.tp.rank % self.ranks_per_group
            q, gate = (y.chunk(self.ranks_per_group, 3)[part] for y in (q, gate))
        return q.flatten(2, 3), gate.flatten(2, 3), k.squeeze(3), v.squeeze(3)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Overridden so that no fused kernel stands for a projection without gates.
        raise NotImplementedError("GatedSelfAttention projects by project_with_gate")
