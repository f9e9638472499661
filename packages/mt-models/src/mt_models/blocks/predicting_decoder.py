"""Decoders with layers of multi-token prediction behind them (DeepSeek-V3, Qwen3-Next, Nemotron 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.loss import build_cross_entropy
from mt_core.parallel.pipeline.stage import Stage, whole
from mt_models.blocks.decoder import CausalDecoder, RotaryDecoder, TokenEmbedding
from mt_models.blocks.multi_token import MultiTokenPrediction, TokenPrediction, shifted


class PredictingConfigLike(Protocol):
    """What is read from the configuration beside what a decoder reads."""

    @property
    def mtp_num_layers(self) -> int: ...


class PredictsTokens(CausalDecoder):
    """What multi-token prediction adds to a decoder, whose constructor calls `add_prediction`.

    The inputs in training are labels and loss_mask too, and the last pipeline stage has a copy of the token embeddings.
    """

    depth_type: type[TokenPrediction] = TokenPrediction
    # Without values: a value of the class would hide the module.
    prediction_depths: int
    mtp: MultiTokenPrediction | None

    def add_prediction(
        self,
        config: Any,
        context: ModelBuildContext,
        predicted_layer: Callable[[int], nn.Module],
        norm: Callable[[], nn.Module] | None = None,
    ) -> None:
        """predicted_layer: builds the layer of depth d, from 0. norm: makes a norm over the hidden size; default: the
        configured one."""
        predicts: PredictingConfigLike = config
        self.prediction_depths = predicts.mtp_num_layers
        targets = ("labels", "loss_mask") if predicts.mtp_num_layers else ()
        self.inputs = ("tokens", "position_ids", "segment_ids", *targets)
        self.mtp = None
        if predicts.mtp_num_layers and context.has_last:
            ctx = context.parallel
            loss = build_cross_entropy(context.config, ctx)
            self.mtp = MultiTokenPrediction(
                config, predicted_layer, loss, context.recompute, ctx, norm, self.depth_type
            )
            # Also where the LM head is untied: every depth embeds the tokens that follow.
            self.embedding = self.embedding or TokenEmbedding(config, ctx)

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
        x = self.through_layers(hidden, tokens, pattern, angles, None, stage)
        batch = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        if segment_ids is not None:
            batch["segment_ids"] = segment_ids
        ahead = partial(self.embedded_ahead, tokens, position_ids)
        x = self.mtp(x, batch, ahead, self.predicted_logits, pattern, angles)
        return self.logits(x) if project else self.unprojected(x)

    def embedded_ahead(self, tokens: Tensor, position_ids: Tensor, by: int) -> Tensor:
        """Embeddings [B, S, H] of the tokens `by` places ahead; those of token 0 behind the end."""
        assert self.embedding is not None
        return self.embedding(shifted(tokens, by), position_ids)

    def predicted_logits(self, state: Tensor) -> Tensor:
        """Logits [B, S, vocab] from what a depth gives the LM head, [B, S, H]."""
        return self.logits(state)

    def predict_ahead(
        self, depth: int, hidden: Tensor, tokens: Tensor, cache: Cache, position_ids: Tensor | None = None
    ) -> Tensor:
        """See `PredictsAhead`. position_ids: default: the cache's."""
        assert self.mtp is not None
        assert self.embedding is not None
        # Drafting: `tokens` are those depth + 1 places behind the cache's positions (PredictsAhead), so no shift here.
        position_ids = cache.position_ids if position_ids is None else position_ids
        embedded = self.embedding(tokens, position_ids)
        pattern = self.pattern(None, tokens.device)
        angles = self.angles(position_ids, cache.capacities)
        return self.mtp.layers[depth](hidden, embedded, pattern, angles, cache)

    def logits_ahead(self, depth: int, state: Tensor) -> Tensor:
        """See `PredictsAhead`."""
        assert self.mtp is not None
        layer = self.mtp.layers[depth]
        assert isinstance(layer, TokenPrediction)
        return self.predicted_logits(layer.head_input(state))

    def stage_modules(self, stage: Stage) -> Iterator[nn.Module]:
        yield from super().stage_modules(stage)
        if stage.last and self.mtp is not None:
            # A tied copy, or that of a first stage, is among the decoder's modules already; twice it would count twice.
            if self.output_layer is not None and not stage.first and self.embedding is not None:
                yield self.embedding
            yield self.mtp


class PredictingDecoder(PredictsTokens, RotaryDecoder):
    """tokens [B, S] -> logits [B, S, vocab]

    layer: builds layer number i. predicted_layer: builds that of depth d, from 0. norm: makes a norm over the hidden
    size; default: the configured one.
    """

    def __init__(
        self,
        config: Any,
        context: ModelBuildContext,
        layer: Callable[[int], nn.Module],
        predicted_layer: Callable[[int], nn.Module],
        norm: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__(config, context, layer, norm)
        self.add_prediction(config, context, predicted_layer, norm)
