"""The decoder of Llama-like families: RMSNorm, a gated feed-forward, rotary positions."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore
from mt_core.nn.environment import ModelEnvironment
from mt_models.blocks.decoder import CausalDecoder, TokenEmbedding
from mt_models.blocks.decoder_config import DecoderConfig
from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.rotary_scaling import build_rotary


class RotaryDecoder(CausalDecoder):
    """tokens [B, S] -> logits [B, S, vocab]; a family gives a function that builds layer number i."""

    config: DecoderConfig

    def __init__(self, config: DecoderConfig, environment: ModelEnvironment, layer: Callable[[int], nn.Module]) -> None:
        super().__init__(config, environment, TokenEmbedding, layer)
        self.rotary = build_rotary(config)

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles:
        return self.rotary.angles(position_ids, capacity)

    @property
    def max_sequence_length(self) -> int:
        return self.config.max_sequence_length


def attention_core(
    config: DecoderConfig,
    environment: ModelEnvironment,
    *,
    window: int | None = None,
    logit_softcap: float | None = None,
    sinks: bool = False,
) -> AttentionCore:
    """The core of the backend that the configuration names."""
    return environment.attention(
        config.attention_backend,
        num_heads=config.num_attention_heads,
        num_query_groups=config.query_groups,
        head_dim=config.head_dim,
        dropout=config.attention_dropout,
        window=window,
        logit_softcap=logit_softcap,
        sinks=sinks,
    )
