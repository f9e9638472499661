"""Mistral Large 4: layers of latent attention over chosen keys and MoE, frequencies with learned factors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import KeepsState
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.decoder import TokenEmbedding
from mt_models.blocks.sparse_latent_attention import Choices
from mt_models.deepseek_v32.model import check_stages, sparse_layer
from mt_models.gemma.model import SoftcappedDecoder
from mt_models.mistral_large4.attention import LearnedRotary, SharedLatentAttention
from mt_models.mistral_large4.config import MistralLarge4Config


class MistralLarge4Model(SoftcappedDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    config: MistralLarge4Config
    rotary: LearnedRotary

    def __init__(self, config: MistralLarge4Config, context: ModelBuildContext) -> None:
        check_stages(config, context.all_stages or ())
        check_sources(config, context.all_stages or ())
        choices = Choices()
        super().__init__(
            config,
            context,
            TokenEmbedding,
            lambda number: sparse_layer(config, context, number, choices, SharedLatentAttention),
        )
        self.rotary = LearnedRotary(config, context.parallel)

    def cached_layers(self) -> Iterator[KeepsState]:
        """The layers with latents of their own, and all indexers."""
        for layer in self.decoder.layers:
            attention = layer.self_attention
            assert isinstance(attention, SharedLatentAttention)
            if attention.owns_latents:
                yield attention
            if attention.core_attention.indexer is not None:
                yield attention.core_attention.indexer

    def stage_modules(self, stage: Stage) -> Iterator[nn.Module]:
        yield from super().stage_modules(stage)
        # Every stage rotates, so that each has the factors.
        yield self.rotary


def check_sources(config: MistralLarge4Config, stages: Iterable[Stage]) -> None:
    """Raises ConfigError for a pipeline stage with a layer that reads latents of another stage."""
    for stage in stages:
        outside = [number for number in stage.layers if config.kv_source_of(number) not in stage.layers]
        if outside:
            raise ConfigError(
                f"parallel.pipeline_model_parallel_size: layer {outside[0]} reads the latents of layer "
                f"{config.kv_source_of(outside[0])} (model.kv_source_layers), in another pipeline stage, which are not "
                "sent; a stage has to hold both"
            )


def build_mistral_large4(config: MistralLarge4Config, context: ModelBuildContext) -> MistralLarge4Model:
    """See `ModelSpec.build`."""
    return MistralLarge4Model(config, context)
