"""Qwen3-Next, Qwen3.5 and 3.6: pre-norm layers of gated delta nets or gated attention, norms that multiply by 1 +
weight."""

from __future__ import annotations

from functools import partial

from torch import nn

from mt_core.nn.build_context import ModelBuildContext
from mt_models.blocks.decoder import attention_core
from mt_models.blocks.gated_attention import GatedSelfAttention
from mt_models.blocks.gated_delta_net import GatedDeltaNet
from mt_models.blocks.norm import ZeroCenteredRMSNorm
from mt_models.blocks.predicting_decoder import PredictingDecoder
from mt_models.blocks.transformer import TransformerLayer
from mt_models.qwen_next.config import QwenNextConfig


class QwenNextLayer(TransformerLayer):
    """x + block(norm(x)), then x + feed_forward(norm(x)): [batch, sequence, hidden] -> the same.

    linear: the block is a gated delta net, else gated attention.
    """

    def __init__(self, config: QwenNextConfig, context: ModelBuildContext, number: int, *, linear: bool) -> None:
        ctx, core = context.parallel, attention_core(config, context)
        attention: nn.Module = GatedDeltaNet(config, ctx) if linear else gated_attention(config, context)
        super().__init__(config, core, context.feed_forward(config.feed_forward, config, number), ctx, attention)
        # Replace the norms that TransformerLayer has built: these multiply by 1 + weight.
        self.input_layernorm = ZeroCenteredRMSNorm(config.hidden_size, config.norm_epsilon, ctx)
        self.pre_mlp_layernorm = ZeroCenteredRMSNorm(config.hidden_size, config.norm_epsilon, ctx)


def gated_attention(config: QwenNextConfig, context: ModelBuildContext) -> GatedSelfAttention:
    ctx = context.parallel
    norm = partial(ZeroCenteredRMSNorm, config.head_dim, config.norm_epsilon, ctx, per_head=True)
    return GatedSelfAttention(config, attention_core(config, context), ctx, head_norm=norm)


class QwenNextModel(PredictingDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    config: QwenNextConfig

    def __init__(self, config: QwenNextConfig, context: ModelBuildContext) -> None:
        linear, counted = config.linear_layers, config.with_predicted_layers()
        super().__init__(
            config,
            context,
            lambda number: QwenNextLayer(config, context, number, linear=linear[number]),
            # The feed-forward of the predicted layer is looked up by number, which the pattern of MoE layers has to
            # reach.
            lambda depth: QwenNextLayer(counted, context, config.num_layers + depth, linear=False),
            partial(ZeroCenteredRMSNorm, config.hidden_size, config.norm_epsilon, context.parallel),
        )


def build_qwen_next(config: QwenNextConfig, context: ModelBuildContext) -> QwenNextModel:
    return QwenNextModel(config, context)
