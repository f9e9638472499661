"""Gemma 4 with pictures: pooled patches of images replace the image tokens of a text.

Shapes: B batch, S sequence, V cells (pooled squares of patches) of a batch, H hidden of the decoder. Features are not
multiplied by sqrt(H), as token embeddings are. Positions of images have the layers' embeddings of one token. With
pipeline parallelism the vision transformer and the projection are parts of the first stage; every stage computes masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Conditioning
from mt_core.parallel.context import ParallelContext
from mt_models.gemma4.attention import IMAGE_TOKENS, ImagePattern
from mt_models.gemma4.model import Gemma4Model
from mt_models.gemma4_vl.audio import Gemma4AudioTower, SoundEmbedding
from mt_models.gemma4_vl.config import Gemma4VLConfig, Gemma4VLDecoderConfig
from mt_models.gemma4_vl.vision import Gemma4VisionTower, PooledProjection
from mt_models.llava.dynamic_resolution import DynamicResolutionModel
from mt_models.llava.vision_language import spliced_words
from mt_models.sound.language_model import SOUNDS, SoundLanguageModel
from mt_models.sound.spectrogram import GEMMA_SHORTEST


class Gemma4VLDecoder(Gemma4Model):
    """Gemma 4 with the places of images as an input: see `with_places`."""

    config: Gemma4VLDecoderConfig
    places: Tensor | None = None
    image_token: int = -1

    @contextmanager
    def with_places(self, places: Tensor) -> Iterator[None]:
        """Within this context a forward pass has images at `places`, bool [B, S]."""
        self.places = places
        try:
            yield
        finally:
            self.places = None

    def pattern(self, segment_ids: Tensor | None, device: torch.device) -> AttentionPattern:
        if not self.config.bidirectional_images:
            return super().pattern(segment_ids, device)
        return ImagePattern(segment_ids=segment_ids, places=self.places, image_token=self.image_token)

    def embeddings_of_layers(self, tokens: Tensor, hidden: Tensor) -> Tensor | None:
        if self.per_layer_inputs is None or self.places is None:
            return super().embeddings_of_layers(tokens, hidden)
        tokens = tokens.masked_fill(self.places, self.config.per_layer_image_token)
        return self.per_layer_inputs(tokens, hidden, self.places)


class Gemma4VLModel(DynamicResolutionModel):
    """tokens [B, S], images and their grids -> logits [B, S, vocab]."""

    config: Gemma4VLConfig

    def build_tower(self, context: ModelBuildContext) -> nn.Module:
        return Gemma4VisionTower(self.config.vision_model, context)

    def build_projection(self, ctx: ParallelContext) -> nn.Module:
        return PooledProjection(self.config, ctx)

    def build_decoder(self, context: ModelBuildContext) -> nn.Module:
        decoder = self.config.decoder
        # As build_decoder of other families, with a decoder that no other family uses.
        decoder_context = context.config.model_copy(update={"model": decoder})
        model = self.decoder_type()(decoder, replace(context, config=decoder_context))
        model.image_token = self.config.image_token_index
        return model

    def decoder_type(self) -> type[Gemma4VLDecoder]:
        return Gemma4VLDecoder

    @property
    def is_divisible(self) -> bool:  # type: ignore[override]
        """Whether layers read the hidden states of the layer before them alone."""
        return bool(self.config.decoder.is_divisible)

    @property
    def undivided_token(self) -> int | None:
        """A run of this id is computed in one forward pass, since its positions see one another."""
        return self.config.image_token_index if self.config.decoder.bidirectional_images else None

    # -- images in the text --------------------------------------------------------------------------

    def _prepared(
        self,
        tokens: Tensor,
        images: Tensor | None,
        position_ids: Tensor | None,
        image_grids: Tensor | None,
        *,
        is_first: bool = True,
    ) -> tuple[Tensor, Tensor | None, AbstractContextManager[Any]]:
        words, positions, spliced = super()._prepared(tokens, images, position_ids, image_grids, is_first=is_first)
        # On every stage: where images are decides what local layers see.
        places = self.language_model.with_places(tokens == self.config.image_token_index)
        return words, positions, _both(spliced, places)

    def _spliced(self, places: Tensor, features: Tensor) -> AbstractContextManager[Any]:
        # In place of token embeddings that are scaled already.
        replaced = spliced_words(self.language_model.embedding, places, features)
        return _both(replaced, self.language_model.with_places(places))

    # -- generation ----------------------------------------------------------------------------------

    def condition(self, inputs: Mapping[str, Tensor]) -> Conditioning:
        conditioning = super().condition(inputs)
        if "images" not in inputs:
            return conditioning
        return {**conditioning, IMAGE_TOKENS: torch.tensor(len(inputs["images"]))}


# -- sound -------------------------------------------------------------------------------------------


class Gemma4SoundDecoder(Gemma4VLDecoder):
    """Gemma 4 with the places of images and of sound."""

    sounds: Tensor | None = None

    @contextmanager
    def with_sounds(self, places: Tensor) -> Iterator[None]:
        """Within this context a forward pass has sound at `places`, bool [B, S]."""
        self.sounds = places
        try:
            yield
        finally:
            self.sounds = None

    def embeddings_of_layers(self, tokens: Tensor, hidden: Tensor) -> Tensor | None:
        masks = [places for places in (self.places, self.sounds) if places is not None]
        if self.per_layer_inputs is None or not masks:
            return Gemma4Model.embeddings_of_layers(self, tokens, hidden)
        places = torch.stack(masks).any(0)
        return self.per_layer_inputs(tokens.masked_fill(places, self.config.per_layer_image_token), hidden, places)


class Gemma4SoundModel(SoundLanguageModel, Gemma4VLModel):
    """tokens [B, S], images and their grids, sounds and their lengths -> logits [B, S, vocab]."""

    inputs: tuple[str, ...] = (*Gemma4VLModel.inputs, *SOUNDS)
    conditioned_by: ClassVar[tuple[str, ...]] = (*Gemma4VLModel.conditioned_by, *SOUNDS)
    SHORTEST: ClassVar[int] = GEMMA_SHORTEST

    def build_audio_tower(self, context: ModelBuildContext) -> nn.Module:
        assert self.config.audio_model is not None
        return Gemma4AudioTower(self.config.audio_model, context)

    def build_audio_projection(self, ctx: ParallelContext) -> nn.Module:
        return SoundEmbedding(self.config, ctx)

    def decoder_type(self) -> type[Gemma4VLDecoder]:
        return Gemma4SoundDecoder

    def sound_positions(self, samples: int) -> int:
        return self.config.sound_positions(samples)

    def _spliced_sounds(self, places: Tensor, features: Tensor) -> AbstractContextManager[Any]:
        # In place of token embeddings that are scaled already.
        replaced = spliced_words(self.language_model.embedding, places, features)
        return _both(replaced, self.language_model.with_sounds(places))


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(first)
        stack.enter_context(second)
        yield


def build_gemma4_vl(config: Gemma4VLConfig, context: ModelBuildContext) -> Gemma4VLModel:
    """See `ModelSpec.build`."""
    return Gemma4VLModel(config, context) if config.audio_model is None else Gemma4SoundModel(config, context)
