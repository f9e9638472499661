"""Mamba-2: x + mixer(norm(x)), the mixer a recurrence with a state of fixed size. No position embeddings."""

from __future__ import annotations

from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.dropout import Dropout
from mt_core.nn.norm import build_norm
from mt_models.blocks.mamba_mixer import MambaMixer
from mt_models.blocks.mixed_decoder import MambaLayer, MixedDecoder
from mt_models.mamba.config import MambaConfig


class MambaModel(MixedDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    def __init__(self, config: MambaConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context, lambda number: mamba_layer(config, context))


def mamba_layer(config: MambaConfig, context: ModelBuildContext) -> MambaLayer:
    ctx = context.parallel
    mixer = MambaMixer(config, ctx, config.output_init_std)
    norm = build_norm(config.normalization, config.hidden_size, config.norm_epsilon, ctx)
    return MambaLayer(mixer, norm, Dropout(0.0, ctx))


def build_mamba(config: MambaConfig, context: ModelBuildContext) -> MambaModel:
    return MambaModel(config, context)
