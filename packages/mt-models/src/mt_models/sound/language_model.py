"""Models that hear: features of sound replace the audio tokens of a text, as those of images replace image tokens.

Shapes: B batch, S sequence, A samples of a row at most, K sounds of a row at most, H hidden of the decoder. Samples are
fp32 at 16 kHz; spectrograms are computed here, so that data sets and requests have sound as it is. With pipeline
parallelism the audio tower and its projection are parts of the first stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError, DataError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache, Conditioning
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_models.llava.vision_language import VisionLanguageModel, spliced_words, word_embeddings

SOUNDS = ("audio", "audio_lengths")
"""Inputs of models that hear."""
FEATURES = "audio_features"
"""Key of a request's sounds in its conditioning."""


class SoundLanguageModel(VisionLanguageModel):
    """Mixin before a model of images and text: tokens, images, sounds -> logits [B, S, V].

    The configuration has `audio_token_index`.
    """

    TOWERS: ClassVar[tuple[str, ...]] = (*VisionLanguageModel.TOWERS, "audio_model", "audio_projection")
    SHORTEST: ClassVar[int]
    """Samples of the shortest sound that the tower takes."""
    audio_model: Any
    audio_projection: nn.Module | None

    # -- what a family has of its own ----------------------------------------------------------------

    def build_audio_tower(self, context: ModelBuildContext) -> nn.Module:
        """From the samples of sounds to vectors of the tower's width, end to end."""
        raise NotImplementedError

    def build_audio_projection(self, ctx: ParallelContext) -> nn.Module:
        """From what the tower gives to vectors of the decoder's width."""
        raise NotImplementedError

    def sound_positions(self, samples: int) -> int:
        """Audio tokens of a sound."""
        raise NotImplementedError

    # -- parts ---------------------------------------------------------------------------------------

    def build_towers(self, context: ModelBuildContext) -> None:
        super().build_towers(context)
        self.audio_model = self.build_audio_tower(context)
        self.audio_projection = self.build_audio_projection(context.parallel)

    def sound_features(self, sounds: Sequence[Tensor]) -> Tensor:
        """Samples [N] of each sound -> [audio tokens of all, H]."""
        assert self.audio_projection is not None
        features: Tensor = self.audio_projection(self.audio_model(sounds))
        return features

    # -- training ------------------------------------------------------------------------------------

    def forward(
        self,
        tokens: Tensor,
        images: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        image_grids: Tensor | None = None,
        audio: Tensor | None = None,
        audio_lengths: Tensor | None = None,
    ) -> Tensor:
        """images, image_grids: as `features_of_batch` takes them. audio fp32 [B, A]: the samples of the sounds of each
        row, end to end. audio_lengths int64 [B, K]: samples of each sound; 0 is padding.

        Raises DataError when images or sounds and their tokens are not as many.
        """
        words, spliced = self._heard(tokens, audio, audio_lengths)
        with spliced:
            return super().forward(words, images, position_ids, segment_ids, image_grids)

    def run_stage(
        self,
        stage: Stage,
        hidden: Tensor | None,
        tokens: Tensor,
        images: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        image_grids: Tensor | None = None,
        audio: Tensor | None = None,
        audio_lengths: Tensor | None = None,
    ) -> Any:
        words, spliced = self._heard(tokens, audio, audio_lengths, is_first=stage.first)
        with spliced:
            return super().run_stage(stage, hidden, words, images, position_ids, segment_ids, image_grids)

    def _heard(
        self, tokens: Tensor, audio: Tensor | None, audio_lengths: Tensor | None, *, is_first: bool = True
    ) -> tuple[Tensor, AbstractContextManager[Any]]:
        """Ids that are words or images, and a context in which the first stage splices features of sounds in."""
        places = tokens == self.config.audio_token_index
        words = self._without(tokens, places)
        if not is_first:
            return words, nullcontext()
        if audio is None or audio_lengths is None:
            self._require_audio_tokens(places.sum(1).tolist(), [0] * len(places))
            return words, nullcontext()
        features = self._features_of_rows(places, audio, audio_lengths)
        return words, self._spliced_sounds(places, features)

    def _features_of_rows(self, places: Tensor, audio: Tensor, audio_lengths: Tensor) -> Tensor:
        # `tolist` waits for the device: numbers of frames are shapes, which the host needs.
        lengths = [[length for length in row if length] for row in audio_lengths.tolist()]
        wanted = [sum(map(self.sound_positions, row)) for row in lengths]
        self._require_audio_tokens(places.sum(1).tolist(), wanted)
        if not any(lengths):
            # A batch without sound: the features of a silent one are not used, and have gradients of zero.
            return self.sound_features([audio.new_zeros(self.SHORTEST)])[:0]
        pairs = zip(audio, lengths, strict=True)
        return self.sound_features([sound for row, row_lengths in pairs for sound in sounds_of(row, row_lengths)])

    def _without(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Tokens with a word in place of audio tokens, which need not be in the vocabulary. Features replace it."""
        return tokens.masked_fill(places, 1 if self.config.image_token_index == 0 else 0)

    def _spliced_sounds(self, places: Tensor, features: Tensor) -> AbstractContextManager[Any]:
        return spliced_words(word_embeddings(self.language_model), places, features)

    def _require_audio_tokens(self, token_counts: list[int], wanted: list[int]) -> None:
        """Raises DataError unless each row has as many audio tokens as its sounds have features."""
        if token_counts != wanted:
            raise DataError(
                f"the rows of the batch have {token_counts} audio tokens (id {self.config.audio_token_index}), and "
                f"sounds of {wanted} features; write the audio token (model.audio_token_index) once for each feature"
            )

    # -- generation ----------------------------------------------------------------------------------

    def condition(self, inputs: Mapping[str, Tensor]) -> Conditioning:
        """What the images give, and `audio_features` [audio tokens, H] of audio [A] and audio_lengths [K], of the first
        stage's ranks."""
        conditioning = super().condition(inputs)
        if "audio" not in inputs or self.audio_model is None:
            return conditioning
        sounds = sounds_of(inputs["audio"], inputs["audio_lengths"].tolist())
        return {**conditioning, FEATURES: self.sound_features(sounds)}

    def _decode_words(self, stage: Stage, hidden: Tensor | None, words: Tensor, cache: Cache) -> Any:
        places = torch.zeros_like(words, dtype=torch.bool)
        token = self.config.audio_token_index
        features = list(self._take_features(cache, places, token, FEATURES)) if stage.first else []
        if not features:
            return super()._decode_words(stage, hidden, words, cache)
        with self._spliced_sounds(places, torch.cat(features)):
            return super()._decode_words(stage, hidden, self._without(words, places), cache)

    def check_request(self, tokens: Tensor, inputs: Mapping[str, Tensor]) -> None:
        super().check_request(tokens, inputs)
        try:
            token_counts = [int((tokens == self.config.audio_token_index).sum())]
            self._require_audio_tokens(token_counts, [self._positions_of_request(inputs)])
        except DataError as error:
            raise ConfigError(f"audio: {error}") from None

    def _positions_of_request(self, inputs: Mapping[str, Tensor]) -> int:
        """Raises ConfigError for inputs that do not fit one another."""
        if ("audio" in inputs) != ("audio_lengths" in inputs):
            raise ConfigError("audio: sounds need audio_lengths, int64 [sounds], the samples of each")
        if "audio" not in inputs:
            return 0
        lengths = inputs["audio_lengths"].tolist()
        if sum(lengths) != len(inputs["audio"]):
            raise ConfigError(
                f"audio: audio_lengths add up to {sum(lengths)}, and there are {len(inputs['audio'])} samples"
            )
        if short := [length for length in lengths if length < self.SHORTEST]:
            raise ConfigError(f"audio: a sound has {short[0]} samples; at least {self.SHORTEST} are needed")
        return sum(map(self.sound_positions, lengths))


def sounds_of(samples: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
    """The sounds of a row [A], end to end, without the padding behind them."""
    return samples[: sum(lengths)].split(list(lengths))
