"""DeepSeek-V2 and V3: pre-norm layers of latent attention and MoE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.loss import build_cross_entropy
from mt_core.parallel.pipeline.stage import Stage, whole
from mt_models.blocks.decoder import RotaryDecoder, TokenEmbedding, attention_core
from mt_models.blocks.latent_attention import LatentAttention
from mt_models.blocks.multi_token import MultiTokenPrediction
from mt_models.blocks.transformer import TransformerLayer
from mt_models.deepseek.config import DeepseekConfig


class DeepseekModel(RotaryDecoder):
    """tokens [B, S] -> logits [B, S, vocab]

    With multi-token prediction its inputs in training are labels and loss_mask too, and the last pipeline stage has a
    copy of the token embeddings.
    """

    config: DeepseekConfig

    def __init__(self, config: DeepseekConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context, lambda number: deepseek_layer(config, context, number))
        targets = ("labels", "loss_mask") if config.mtp_num_layers else ()
        self.inputs = ("tokens", "position_ids", "segment_ids", *targets)
        self.mtp: MultiTokenPrediction | None = None
        if config.mtp_num_layers and context.has_last:
            self.mtp = build_prediction(config, context)
            # Also where the LM head is untied: every depth embeds the tokens that follow.
            self.embedding = self.embedding or TokenEmbedding(config, context.parallel)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        *,
        project: bool = True,
    ) -> Any:
        """labels, loss_mask [B, S]: for multi-token prediction, whose losses are attached to the logits in training."""
        stage = whole(self.config.num_layers)
        return self.run_stage(stage, None, tokens, position_ids, segment_ids, None, labels, loss_mask, project=project)

    def run_stage(
        self,
        stage: Stage,
        hidden: Tensor | None,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        *,
        project: bool = True,
    ) -> Any:
        # In evaluation, generation and other stages it is the plain decoder. The losses need the state before the LM
        # head, so that this repeats run_stage of CausalDecoder with the prediction between decoder and head.
        predicts = stage.last and self.training and torch.is_grad_enabled()
        if self.mtp is None or not predicts or labels is None or loss_mask is None:
            return super().run_stage(stage, hidden, tokens, position_ids, segment_ids, cache, project=project)
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        embedding = self.embedding
        assert embedding is not None
        if stage.first:
            hidden = embedding(tokens, position_ids)
        assert hidden is not None
        pattern, angles = self.pattern(segment_ids, tokens.device), self.angles(position_ids, None)
        x = self.decoder(hidden, pattern, angles, None, stage)
        batch = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        if segment_ids is not None:
            batch["segment_ids"] = segment_ids
        x = self.mtp(x, batch, lambda ids: embedding(ids, position_ids), self.logits, pattern, angles)
        return self.logits(x) if project else self.unprojected(x)

    @property
    def prediction_depths(self) -> int:
        return self.config.mtp_num_layers

    def predict_ahead(self, depth: int, hidden: Tensor, tokens: Tensor, cache: Cache) -> Tensor:
        assert self.mtp is not None
        assert self.embedding is not None
        # Drafting: `tokens` are those depth + 1 places behind the cache's positions (PredictsAhead), so no shift here.
        embedded = self.embedding(tokens, cache.position_ids)
        pattern = self.pattern(None, tokens.device)
        angles = self.angles(cache.position_ids, cache.capacities)
        return self.mtp.layers[depth](hidden, embedded, pattern, angles, cache)

    def stage_modules(self, stage: Stage) -> Iterator[nn.Module]:
        yield from super().stage_modules(stage)
        if stage.last and self.mtp is not None:
            # A tied copy, or that of a first stage, is among the decoder's modules already; twice it would count twice.
            if self.output_layer is not None and not stage.first and self.embedding is not None:
                yield self.embedding
            yield self.mtp


def deepseek_layer(config: DeepseekConfig, context: ModelBuildContext, number: int) -> TransformerLayer:
    ctx, core = context.parallel, attention_core(config, context)
    feed_forward = context.feed_forward(config.feed_forward, config, number)
    attention = LatentAttention(config, core, ctx, remakes_heads=context.recompute.selects("mla_up_proj"))
    return TransformerLayer(config, core, feed_forward, ctx, attention)


def build_prediction(config: DeepseekConfig, context: ModelBuildContext) -> MultiTokenPrediction:
    # The feed-forward of layer num_layers + d is looked up by number, which the pattern of MoE layers has to reach.
    counted = config.with_predicted_layers()

    def layer(depth: int) -> nn.Module:
        return deepseek_layer(counted, context, config.num_layers + depth)

    loss = build_cross_entropy(context.config, context.parallel)
    return MultiTokenPrediction(config, layer, loss, context.recompute, context.parallel)


def build_deepseek(config: DeepseekConfig, context: ModelBuildContext) -> DeepseekModel:
    return DeepseekModel(config, context)
