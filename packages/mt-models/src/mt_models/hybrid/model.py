"""Hybrids: each layer is x + block(norm(x)) with one block, Mamba-2, attention, or a feed-forward."""

from __future__ import annotations

from torch import Tensor, nn

from mt_core.nn.environment import ModelEnvironment
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.mamba_mixer import MambaMixer
from mt_models.blocks.mixed_decoder import MixedDecoder
from mt_models.blocks.residual_layer import AttentionLayer, FeedForwardLayer, MambaLayer
from mt_models.blocks.rotary import RotaryAngles, inverse_frequencies
from mt_models.blocks.rotary_scaling import FixedRotary
from mt_models.hybrid import pattern
from mt_models.hybrid.config import HybridConfig


class HybridModel(MixedDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    config: HybridConfig

    def __init__(self, config: HybridConfig, environment: ModelEnvironment) -> None:
        super().__init__(config, environment, lambda number: hybrid_layer(config, environment, number))
        self.rotary: FixedRotary | None = None
        if config.position_embedding_type == "rope":
            self.rotary = FixedRotary(inverse_frequencies(config.rotary_dim, config.rotary_base))

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles | None:
        return None if self.rotary is None else self.rotary.angles(position_ids)


def hybrid_layer(config: HybridConfig, environment: ModelEnvironment, number: int) -> nn.Module:
    """The layer that the pattern has at this place."""
    ctx = environment.parallel
    match config.layers[number]:
        case pattern.MAMBA:
            mixer = MambaMixer(config, ctx, config.output_init_std)
            return MambaLayer(mixer, config.hidden_size, config.norm_epsilon, ctx)
        case pattern.ATTENTION:
            return AttentionLayer(self_attention(config, environment), config.hidden_size, config.norm_epsilon, ctx)
        # - or E; check_pattern has refused other symbols.
        case symbol:
            kind = "moe" if symbol == pattern.EXPERTS else "dense"
            feed_forward = environment.feed_forward(kind, config, number)
            return FeedForwardLayer(feed_forward, config.hidden_size, config.norm_epsilon, ctx)


def self_attention(config: HybridConfig, environment: ModelEnvironment) -> SelfAttention:
    core = environment.attention(
        config.attention_backend,
        num_heads=config.num_attention_heads,
        num_query_groups=config.query_groups,
        head_dim=config.head_dim,
        dropout=config.attention_dropout,
    )
    return SelfAttention(config, core, environment.parallel)


def build_hybrid(config: HybridConfig, environment: ModelEnvironment) -> HybridModel:
    return HybridModel(config, environment)
