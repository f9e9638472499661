"""DeepSeek-V3.2 and GLM-5: the layers of DeepSeek-V3 with attention over chosen keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.decoder import freeze
from mt_models.blocks.predicting_decoder import PredictingDecoder
from mt_models.blocks.sparse_latent_attention import Choices, SparseLatentAttention
from mt_models.blocks.transformer import TransformerLayer
from mt_models.deepseek_v32.config import DeepseekV32Config, IndexedAttentionConfig


class DeepseekV32Model(PredictingDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    config: DeepseekV32Config

    def __init__(self, config: DeepseekV32Config, context: ModelBuildContext) -> None:
        check_stages(config, context.all_stages or ())
        # As in DeepSeek-V3 the feed-forward of layer num_layers + d is looked up by number.
        counted, choices = config.with_predicted_layers(), Choices()
        super().__init__(
            config,
            context,
            lambda number: sparse_layer(config, context, number, choices),
            lambda depth: sparse_layer(counted, context, config.num_layers + depth, choices),
        )


def sparse_layer(
    config: Any,
    context: ModelBuildContext,
    number: int,
    choices: Choices,
    attention_type: type[SparseLatentAttention] = SparseLatentAttention,
) -> TransformerLayer:
    """config: an `IndexedAttentionConfig` of the family whose attention is `attention_type`."""
    ctx = context.parallel
    core = context.attention(
        config.attention_backend,
        num_heads=config.num_attention_heads,
        num_query_groups=config.num_attention_heads,
        head_dim=config.head_dim,
        dropout=config.attention_dropout,
        # The choice of keys is a bias of zeros and infinities; sequences that are shorter have none.
        bias=context.config.data.seq_length > config.dsa_indexer_topk and not config.dsa_dense_warmup,
    )
    remakes = context.recompute.selects("mla_up_proj")
    attention = attention_type(config, core, ctx, number, choices, remakes_heads=remakes)
    if attention.core_attention.indexer is not None and attention.loss is None:
        # Nothing would give it a gradient.
        freeze(attention.core_attention.indexer)
    return TransformerLayer(config, core, context.feed_forward(config.feed_forward, config, number), ctx, attention)


def check_stages(config: IndexedAttentionConfig, stages: Iterable[Stage]) -> None:
    """Raises ConfigError for a pipeline stage whose first layers need what an indexer of another stage chooses."""
    for stage in stages:
        outside = [number for number in stage.layers if config.indexer_of(number) not in stage.layers]
        if outside:
            raise ConfigError(
                f"parallel.pipeline_model_parallel_size: layer {outside[0]} attends to the keys that the indexer of "
                f"layer {config.indexer_of(outside[0])} chooses, in another pipeline stage, which are not sent; stages "
                "have to begin with a layer that has an indexer (model.dsa_indexer_topk_freq, "
                "model.dsa_indexer_skip_topk_offset)"
            )


def build_deepseek_v32(config: DeepseekV32Config, context: ModelBuildContext) -> DeepseekV32Model:
    return DeepseekV32Model(config, context)
