"""Layers with one block each: x + block(norm(x)). Models with several kinds of layers are stacks of these.

All take (x, pattern, angles, cache) and use what they need. x is [batch, sequence, hidden] in the dtype of the
residual stream; blocks compute in that of the weights. multiplier: of what the block adds.
"""

from __future__ import annotations

from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.cache import Cache
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.mamba_mixer import MambaMixer
from mt_models.blocks.rotary import RotaryAngles


class MambaLayer(nn.Module):
    """x + mixer(norm(x))"""

    def __init__(
        self, mixer: MambaMixer, hidden_size: int, epsilon: float, ctx: ParallelContext, multiplier: float = 1.0
    ) -> None:
        super().__init__()
        self.dtype, self.multiplier = ctx.params_dtype, multiplier
        self.norm = build_norm("RMSNorm", hidden_size, epsilon, ctx)
        self.mixer = mixer

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x, normed = self.norm.add(x)
        # With fp32_residual_connection x is fp32 and the block's output is added
        # to it in fp32. Otherwise `to` does nothing.
        return x + scaled(self.mixer(normed.to(self.dtype), pattern.segment_ids, cache), self.multiplier)


class AttentionLayer(nn.Module):
    """x + self_attention(input_layernorm(x))"""

    def __init__(
        self, attention: SelfAttention, hidden_size: int, epsilon: float, ctx: ParallelContext, multiplier: float = 1.0
    ) -> None:
        super().__init__()
        self.dtype, self.multiplier = ctx.params_dtype, multiplier
        self.input_layernorm = build_norm("RMSNorm", hidden_size, epsilon, ctx)
        self.self_attention = attention

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x, normed = self.input_layernorm.add(x)
        return x + scaled(self.self_attention(normed.to(self.dtype), pattern, angles, cache), self.multiplier)


class FeedForwardLayer(nn.Module):
    """x + mlp(pre_mlp_layernorm(x))"""

    def __init__(
        self, feed_forward: nn.Module, hidden_size: int, epsilon: float, ctx: ParallelContext, multiplier: float = 1.0
    ) -> None:
        super().__init__()
        self.dtype, self.multiplier = ctx.params_dtype, multiplier
        self.pre_mlp_layernorm = build_norm("RMSNorm", hidden_size, epsilon, ctx)
        self.mlp = feed_forward

    def forward(
        self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None = None, cache: Cache | None = None
    ) -> Tensor:
        x, normed = self.pre_mlp_layernorm.add(x)
        return x + scaled(self.mlp(normed.to(self.dtype)), self.multiplier)


def scaled(x: Tensor, multiplier: float) -> Tensor:
    # Without a product by 1, whose result would be a copy.
    return x if multiplier == 1.0 else x * multiplier
