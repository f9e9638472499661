"""DeepSeek-V2 and V3: pre-norm layers of latent attention and MoE."""

from __future__ import annotations

from mt_core.nn.build_context import ModelBuildContext
from mt_models.blocks.decoder import attention_core
from mt_models.blocks.latent_attention import LatentAttention
from mt_models.blocks.predicting_decoder import PredictingDecoder
from mt_models.blocks.transformer import TransformerLayer
from mt_models.deepseek.config import DeepseekConfig


class DeepseekModel(PredictingDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    config: DeepseekConfig

    def __init__(self, config: DeepseekConfig, context: ModelBuildContext) -> None:
        # The feed-forward of layer num_layers + d is looked up by number, which the pattern of MoE layers has to reach.
        counted = config.with_predicted_layers() if config.mtp_num_layers else config
        super().__init__(
            config,
            context,
            lambda number: deepseek_layer(config, context, number),
            lambda depth: deepseek_layer(counted, context, config.num_layers + depth),
        )


def deepseek_layer(config: DeepseekConfig, context: ModelBuildContext, number: int) -> TransformerLayer:
    ctx, core = context.parallel, attention_core(config, context)
    feed_forward = context.feed_forward(config.feed_forward, config, number)
    attention = LatentAttention(config, core, ctx, remakes_heads=context.recompute.selects("mla_up_proj"))
    return TransformerLayer(config, core, feed_forward, ctx, attention)


def build_deepseek(config: DeepseekConfig, context: ModelBuildContext) -> DeepseekModel:
    return DeepseekModel(config, context)
