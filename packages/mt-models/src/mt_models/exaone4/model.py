"""EXAONE 4 and K-EXAONE: a Llama-like decoder, and behind K-EXAONE's a layer of multi-token prediction."""

from __future__ import annotations

from mt_core.nn.build_context import ModelBuildContext
from mt_models.blocks.decoder import attention_core, rotary_attention, rotary_layer
from mt_models.blocks.predicting_decoder import PredictingDecoder
from mt_models.blocks.transformer import TransformerLayer
from mt_models.blocks.window_pattern import first_without_window
from mt_models.exaone4.config import Exaone4Config


def build_exaone4(config: Exaone4Config, context: ModelBuildContext) -> PredictingDecoder:
    """See `ModelSpec.build`."""
    return PredictingDecoder(
        config,
        context,
        lambda number: rotary_layer(config, context, number),
        lambda depth: predicted_layer(config, context, config.num_layers + depth),
    )


def predicted_layer(config: Exaone4Config, context: ModelBuildContext, number: int) -> TransformerLayer:
    """A dense layer whose attention is that of a layer without a window."""
    core = attention_core(config, context)
    without_window = first_without_window(config.sliding_window_pattern, config.num_layers)
    attention = rotary_attention(config, core, context.parallel, without_window)
    feed_forward = context.feed_forward("dense", config, number)
    return TransformerLayer(config, core, feed_forward, context.parallel, attention)
