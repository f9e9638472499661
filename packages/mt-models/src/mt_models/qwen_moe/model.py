"""Qwen-MoE and GLM-4.5: Llama's layers with experts; behind GLM-4.5's, layers of multi-token prediction."""

from __future__ import annotations

from mt_core.nn.build_context import ModelBuildContext
from mt_models.blocks.decoder import rotary_layer
from mt_models.blocks.predicting_decoder import PredictingDecoder
from mt_models.qwen_moe.config import QwenMoeConfig


def build_qwen_moe(config: QwenMoeConfig, context: ModelBuildContext) -> PredictingDecoder:
    """See `ModelSpec.build`."""
    # The feed-forward of layer num_layers + d is looked up by number, which the pattern of MoE layers has to reach.
    counted = config.with_predicted_layers() if config.mtp_num_layers else config
    return PredictingDecoder(
        config,
        context,
        lambda number: rotary_layer(config, context, number),
        lambda depth: rotary_layer(counted, context, config.num_layers + depth),
    )
