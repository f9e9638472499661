"""Self-attention whose heads are gated: head n of the output times sigmoid(w_n . x), one number for each head and
position (LFM3, Step 3.5)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.cache import Cache
from mt_core.nn.layout import normal
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import AttentionConfigLike, SelfAttention
from mt_models.blocks.rotary import RotaryAngles


class HeadGatedAttention(SelfAttention):
    """The rows of linear_gate [heads, hidden] are divided over tensor-parallel ranks as the query heads are. It has no
    bias. options: those of `SelfAttention`."""

    def __init__(self, config: AttentionConfigLike, core: AttentionCore, ctx: ParallelContext, **options: Any) -> None:
        super().__init__(config, core, ctx, **options)
        # A matrix of its own rather than rows of linear_qkv: these have biases in some models, and gates never have.
        self.linear_gate = ColumnParallelLinear(
            config.hidden_size, config.num_attention_heads, ctx, bias=False, init=normal(config.init_method_std)
        )

    def forward(self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None, cache: Cache | None) -> Tensor:
        rotation = angles.within(self.window) if angles is not None and self.rotates else None
        q, k, v = self.project_and_rotate(x, rotation)
        # [B, S, N] of this rank's heads, S of the whole sequence as in q
        gate = torch.sigmoid(self.linear_gate(x))
        out = self.attend_or_decode(q, k, v, pattern, cache) * gate[..., None]
        return self.linear_proj(out.flatten(2))
