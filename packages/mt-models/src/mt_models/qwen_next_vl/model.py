"""Qwen3.5 and 3.6 with pictures: merged patches of images replace the image tokens of a text.

Shapes: B batch, S sequence, H hidden of the decoder, V vocabulary, T new positions of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache, CachedSequence
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.rotary import RotaryAngles
from mt_models.llava.vision_language import replace_words, spread, word_embeddings
from mt_models.qwen3_vl.model import Qwen3VLModel, interleaved_angles
from mt_models.qwen_next.model import QwenNextModel
from mt_models.qwen_next_vl.config import QwenNextVLConfig, QwenNextVLDecoderConfig


@dataclass
class SplicedImages:
    """Features of images in the place of token embeddings.

    places [B, S] bool, features [B, S, H] with zeros elsewhere, both of whole sequences. ahead: by how many places the
    tokens that are embedded come before their positions, as multi-token prediction embeds them.
    """

    places: Tensor
    features: Tensor
    ctx: ParallelContext
    ahead: int = 0

    def replaced(self, module: nn.Module, inputs: tuple[Tensor, ...], words: Tensor) -> Tensor:
        """Forward hook of the token embeddings."""
        places, features = (_moved(x, self.ahead) for x in (self.places, self.features))
        return replace_words(words, places, features, self.ctx)

    @contextmanager
    def moved(self, by: int) -> Iterator[None]:
        self.ahead = by
        try:
            yield
        finally:
            self.ahead = 0


def _moved(x: Tensor, by: int) -> Tensor:
    """[B, S, ...] shifted left by `by`, padded with zeros."""
    return x if by == 0 else torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), 1)


class QwenNextVLDecoder(QwenNextModel):
    """tokens [B, S], positions [B or 1, S] of a text or [3, B, S] of one with images -> logits [B, S, V]"""

    config: QwenNextVLDecoderConfig
    images: SplicedImages | None = None

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles:
        # A text alone: its three coordinates would be equal, which is the rotation of the family qwen_next.
        if position_ids.ndim == 2:
            return super().angles(position_ids, capacity)
        return interleaved_angles(self.rotary, self.config.mrope_section, position_ids)

    def embedded_ahead(self, tokens: Tensor, position_ids: Tensor, by: int) -> Tensor:
        with nullcontext() if self.images is None else self.images.moved(by):
            return super().embedded_ahead(tokens, position_ids, by)


class QwenNextVLModel(Qwen3VLModel):
    """tokens [B, S], images and their grids -> logits [B, S, V]."""

    config: QwenNextVLConfig

    def __init__(self, config: QwenNextVLConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context)
        if self.prediction_depths:
            self.inputs = (*self.inputs, "labels", "loss_mask")

    def build_decoder(self, context: ModelBuildContext) -> nn.Module:
        decoder = self.config.decoder
        decoder_context = context.config.model_copy(update={"model": decoder})
        return QwenNextVLDecoder(decoder, replace(context, config=decoder_context))

    # -- training ------------------------------------------------------------------------------------

    def forward(
        self,
        tokens: Tensor,
        images: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        image_grids: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """labels, loss_mask [B, S]: for multi-token prediction, which embeds the images among the tokens ahead, too."""
        words, positions, spliced = self._prepared(tokens, images, position_ids, image_grids)
        with spliced:
            logits: Tensor = self.language_model(words, positions, segment_ids, labels, loss_mask)
        return logits

    def run_stage(
        self,
        stage: Stage,
        hidden: Any,
        tokens: Tensor,
        images: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        image_grids: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Any:
        """In training with multi-token prediction stages pass the features [B, S, H] of images on beside the hidden
        states: the last one embeds the tokens ahead."""
        predicts = self.prediction_depths and labels is not None and self.training and torch.is_grad_enabled()
        if not predicts:
            return super().run_stage(stage, hidden, tokens, images, position_ids, segment_ids, image_grids)
        words, positions, spliced = self._prepared(tokens, images, position_ids, image_grids, is_first=stage.first)
        features: Tensor | None = None
        if not stage.first:
            hidden, features = hidden
            if stage.last:
                spliced = self._with_spread(tokens == self.config.image_token_index, features)
        with spliced:
            x = self.language_model.run_stage(stage, hidden, words, positions, segment_ids, None, labels, loss_mask)
            if stage.first:
                spliced_images = self.language_model.images
                features = torch.zeros_like(x) if spliced_images is None else spliced_images.features
        return x if stage.last else (x, features)

    def _spliced(self, places: Tensor, features: Tensor) -> AbstractContextManager[None]:
        return self._with_spread(places, spread(places, features))

    @contextmanager
    def _with_spread(self, places: Tensor, features: Tensor) -> Iterator[None]:
        """Within this context, the token embeddings return features [B, S, H] where `places` is True."""
        decoder = self.language_model
        table = word_embeddings(decoder)
        decoder.images = SplicedImages(places, features, table.ctx)
        handle = table.register_forward_hook(decoder.images.replaced)
        try:
            yield
        finally:
            handle.remove()
            decoder.images = None

    # -- drafts of multi-token prediction --------------------------------------------------------------

    @property
    def prediction_depths(self) -> int:
        depths: int = self.language_model.prediction_depths
        return depths

    def logits_ahead(self, depth: int, state: Tensor) -> Tensor:
        """See `PredictsAhead`."""
        logits: Tensor = self.language_model.logits_ahead(depth, state)
        return logits

    def predict_ahead(self, depth: int, hidden: Tensor, tokens: Tensor, cache: Cache) -> Tensor:
        """See `PredictsAhead`. With pipeline parallelism the last stage has no features, and embeds a word in their
        place: what is drafted behind images is then guessed worse, and what is sampled is the same."""
        places, features = self._features_ahead(depth + 1, tokens, cache)
        words, positions = tokens.masked_fill(places, 0), self.cached_positions(cache)
        with self._spliced(places, torch.cat(features)) if features else nullcontext():
            return self.language_model.predict_ahead(depth, hidden, words, cache, positions)

    def _features_ahead(self, by: int, tokens: Tensor, cache: Cache) -> tuple[Tensor, list[Tensor]]:
        """Where the tokens [1, T], `by` places behind the cache's positions, stand for features; and those."""
        places, features, end = torch.zeros_like(tokens, dtype=torch.bool), [], 0
        for sequence in cache.sequences:
            begin, end = end, end + sequence.count
            of_images = tokens[0, begin:end] == self.config.image_token_index
            if "features" not in sequence.conditioning:
                # Of the first stage's ranks only; without it the id, which need not be in the vocabulary, is a word.
                places[0, begin:end] = of_images & ("image_grids" in sequence.conditioning)
                continue
            first, rows = self._image_tokens_before(sequence, by), sequence.conditioning["features"]
            # Counts from the beginning: tokens beyond the features were generated.
            has_feature = of_images & (first + of_images.cumsum(0) <= len(rows))
            places[0, begin:end] = has_feature
            features.append(rows[first : first + int(has_feature.sum())])
        return places, features

    def _image_tokens_before(self, sequence: CachedSequence, by: int) -> int:
        """How many precede the token that is `by` places behind the sequence's first new position."""
        before = torch.cat((sequence.past, sequence.new[:by]))
        return int((before == self.config.image_token_index).sum())


def build_qwen_next_vl(config: QwenNextVLConfig, context: ModelBuildContext) -> QwenNextVLModel:
    """See `ModelSpec.build`."""
    return QwenNextVLModel(config, context)
