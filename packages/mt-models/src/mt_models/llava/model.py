"""LLaVA (Liu et al., 2023): image features, projected to the hidden size, replace the image tokens of a text.

Shapes: B batch, S sequence, N images, F features of an image, W width of a feature, H hidden of the decoder, V
vocabulary (this rank's ids under tensor parallelism). Each image has F image tokens in the text, which its
features replace. Tower and projection have whole sequences on every rank even if sequence parallelism shards the
decoder's; with pipeline parallelism they are parts of the first stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError, DataError
from mt_core.nn.cache import Cache, Conditioning, KeepsState, layers_with_state
from mt_core.nn.context_parallel.zigzag import shard_sequence, unshard_sequence
from mt_core.nn.embedding import VocabParallelEmbedding
from mt_core.nn.environment import ModelEnvironment
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.nn.model import Model, contract
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.freeze import freeze
from mt_models.llava.config import LlavaConfig, VisionLanguageConfig
from mt_models.llava.projection import VisionProjection
from mt_models.llava.splicing import spliced_words
from mt_models.vision.model import VisionTower, build_tower


class VisionLanguageModel(Model):
    """tokens [B, S], images -> logits [B, S, V]: what families of images and text have in common.

    A family has a projection, and says how features come from images.
    """

    inputs: tuple[str, ...] = ("tokens", "images", "position_ids", "segment_ids")
    continues_text: ClassVar[bool] = True
    vision_projection: nn.Module | None
    language_model: Any
    """A decoder of any family."""

    def __init__(self, config: Any, environment: ModelEnvironment) -> None:
        """config: a VisionLanguageConfig."""
        super().__init__()
        self.config = config
        self.cp = environment.parallel.cp
        self.vision_model: VisionTower | None = None
        self.vision_projection = None
        if environment.has_first:
            self.vision_model = build_tower(config.vision_model, environment)
            self.vision_projection = self.build_projection(environment.parallel)
        self.language_model = build_decoder(config, environment)
        self._leave_untrained()

    def build_projection(self, ctx: ParallelContext) -> nn.Module:
        """From what the tower gives to vectors of the decoder's width."""
        raise NotImplementedError

    def features(self, images: Tensor) -> Tensor:
        """[N, C, img_h, img_w] -> [N, F, H]: what replaces the image tokens."""
        raise NotImplementedError

    def unread_modules(self, tower: VisionTower) -> list[nn.Module]:
        """Modules of the tower that no feature passes through."""
        raise NotImplementedError

    def forward(
        self,
        tokens: Tensor,
        images: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """images [N, C, img_h, img_w], in the order of their image tokens in the batch, row by row; or [B, M, C, img_h,
        img_w], of which a row takes as many as it has image tokens for: the others are padding. None for a text without
        image tokens.

        Raises DataError when images and image tokens are not as many.
        """
        places, words = self._places_and_words(tokens)
        with self._with_images(places, images):
            return self.language_model(words, position_ids, segment_ids)

    def run_stage(
        self,
        stage: Stage,
        hidden: Tensor | None,
        tokens: Tensor,
        images: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Any:
        """hidden [B, S, H] of the previous stage -> the next stage's input, or the logits. See Pipelined."""
        places, words = self._places_and_words(tokens)
        with self._with_images(places, images) if stage.first else nullcontext():
            return self.language_model.run_stage(stage, hidden, words, position_ids, segment_ids)

    def stage_modules(self, stage: Stage) -> Iterator[nn.Module]:
        if stage.first:
            yield from (part for part in (self.vision_model, self.vision_projection) if part is not None)
        yield from self.language_model.stage_modules(stage)

    def _places_and_words(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Where image tokens are, and ids that are all in the vocabulary, as the image token need not be."""
        places = tokens == self.config.image_token_index
        return places, tokens.masked_fill(places, 0)

    def _with_images(self, places: Tensor, images: Tensor | None) -> AbstractContextManager[None]:
        """A context in which the features of images are spliced in at `places` [B, S], this rank's positions."""
        if images is None:
            self._require_tokens(places, 0)
            return nullcontext()
        whole = unshard_sequence(places.int(), SEQUENCE_DIM, self.cp).bool()
        features = self._features_of_batch(whole, images)
        if self.cp.size > 1:
            features = features.index_select(0, self._own_features(places, whole))
        return spliced_words(word_embeddings(self.language_model), places, features)

    def _own_features(self, places: Tensor, whole: Tensor) -> Tensor:
        """Numbers, counted over the batch, of the features at this rank's places. places: of its positions. whole: of
        all positions of the sequences."""
        numbers = (whole.flatten().cumsum(0) - 1).view_as(whole)
        return shard_sequence(numbers, SEQUENCE_DIM, self.cp)[places]

    def _features_of_batch(self, places: Tensor, images: Tensor) -> Tensor:
        """[image tokens, H]"""
        if images.ndim == 4:
            self._require_tokens(places, len(images))
            return self.features(images).flatten(0, 1)
        real = self._real_images(places, images.shape[1])
        images = images.flatten(0, 1)
        if not len(real):
            # A batch of texts alone: the features of a padding image are not used, and have gradients of zero.
            return self.features(images[:1]).flatten(0, 1)[:0]
        return self.features(images.index_select(0, real.to(images.device))).flatten(0, 1)

    def _real_images(self, places: Tensor, capacity: int) -> Tensor:
        """Numbers, counted over the batch of `capacity` images a row, of the images that have image tokens."""
        counts, length = places.sum(1), self.config.image_seq_length
        if (counts % length).any() or (counts > capacity * length).any():
            raise DataError(
                f"the rows of the batch have {counts.tolist()} image tokens (id {self.config.image_token_index}), "
                f"and at most {capacity} images of {length} features each; write the image token once for each feature"
            )
        real = torch.arange(capacity, device=places.device) < (counts // length)[:, None]
        return real.flatten().nonzero().squeeze(1)

    conditioned_by: ClassVar[tuple[str, ...]] = ("images",)

    def condition(self, inputs: Mapping[str, Tensor]) -> Conditioning:
        """images [N, C, img_h, img_w], in the order of their tokens -> features [N F, H], of the first stage's ranks"""
        if "images" not in inputs or self.vision_model is None:
            return {}
        return {"features": self.features(inputs["images"]).flatten(0, 1)}

    def decode_stage(self, stage: Stage, hidden: Tensor | None, cache: Cache) -> Any:
        """The features of a sequence's images replace its image tokens, whatever part of them is in this pass.

        An image token that was generated is a word like any other: no feature belongs to it.
        """
        places = torch.zeros_like(cache.tokens, dtype=torch.bool)
        features = list(self._take_features(cache, places)) if stage.first else []
        words = cache.tokens.masked_fill(places, 0)
        spliced: AbstractContextManager[None] = nullcontext()
        if features:
            spliced = spliced_words(word_embeddings(self.language_model), places, torch.cat(features))
        with spliced:
            return self.language_model.run_stage(stage, hidden, words, cache.position_ids, cache=cache)

    def _take_features(self, cache: Cache, places: Tensor) -> Iterator[Tensor]:
        """The features [F of the sequence, H] for new positions, sequence by sequence. Marks their places [1, T]."""
        end = 0
        for sequence in cache.sequences:
            end += sequence.count
            features = sequence.conditioning.get("features")
            if features is None:
                continue
            before, new = (tokens == self.config.image_token_index for tokens in (sequence.past, sequence.new))
            first = int(before.sum())
            own = new & (first + new.cumsum(0) <= len(features))
            if own.any():
                places[0, end - sequence.count : end] = own.to(places.device)
                yield features[first : first + int(own.sum())]

    def check_request(self, tokens: Tensor, inputs: Mapping[str, Tensor]) -> None:
        try:
            self._require_tokens(tokens == self.config.image_token_index, len(inputs.get("images", ())))
        except DataError as error:
            raise ConfigError(f"images: {error}") from None

    def cached_layers(self) -> Iterator[KeepsState]:
        return layers_with_state(self.language_model)

    @property
    def decoded_layers(self) -> int:
        layers: int = self.language_model.decoded_layers
        return layers

    @property
    def max_sequence_length(self) -> int | None:
        """Longest supported sequence, image tokens included; None without a limit."""
        return contract(self.language_model).max_sequence_length

    def _require_tokens(self, places: Tensor, images: int) -> None:
        found, wanted = int(places.sum()), images * self.config.image_seq_length
        if found != wanted:
            raise DataError(
                f"the text has {found} image tokens (id {self.config.image_token_index}), and {images} images of "
                f"{self.config.image_seq_length} features need {wanted}; write the image token once for each feature"
            )

    def _leave_untrained(self) -> None:
        """The parts in model.freeze, and the modules of the tower that are never read, thus without gradients."""
        unread = [] if self.vision_model is None else self.unread_modules(self.vision_model)
        for module in (*unread, *(getattr(self, part) for part in self.config.freeze)):
            if module is not None:
                freeze(module)


class LlavaModel(VisionLanguageModel):
    """LLaVA: states of the tower, side by side, through the projection."""

    config: LlavaConfig

    def build_projection(self, ctx: ParallelContext) -> nn.Module:
        return VisionProjection(self.config, ctx)

    def features(self, images: Tensor) -> Tensor:
        assert self.vision_model is not None
        assert self.vision_projection is not None
        wanted = self.config.feature_states
        states = list(islice(self.vision_model.states(images), max(wanted) + 1))
        features = torch.cat([states[state] for state in wanted], dim=-1)
        projected: Tensor = self.vision_projection(features[:, 1:] if self.config.drops_class_token else features)
        return projected

    def unread_modules(self, tower: VisionTower) -> list[nn.Module]:
        return tower.behind(max(self.config.feature_states))


def build_decoder(config: VisionLanguageConfig, environment: ModelEnvironment) -> nn.Module:
    """The decoder of any family that continues text. Raises ConfigError for another."""
    decoder = config.decoder
    spec = environment.host.models.get(decoder.family, key="model.language_model.family")
    # What the decoder's builder reads of the whole configuration, it reads for its own model.
    own = replace(environment, config=environment.config.model_copy(update={"model": decoder}))
    model = spec.build.load()(decoder, own)
    if not contract(model).continues_text or (environment.has_first and not has_word_embeddings(model)):
        raise ConfigError(
            f"model.language_model.family={decoder.family} does not continue text, and LLaVA needs a decoder that "
            "does, such as llama, mistral, qwen, gemma or gpt"
        )
    return model


def has_word_embeddings(model: nn.Module) -> bool:
    """Whether there is a table of token embeddings, `embedding.word_embeddings` in every family that has one."""
    return isinstance(getattr(getattr(model, "embedding", None), "word_embeddings", None), VocabParallelEmbedding)


def word_embeddings(model: Any) -> VocabParallelEmbedding:
    """Of a decoder that has some."""
    table = model.embedding.word_embeddings
    assert isinstance(table, VocabParallelEmbedding)
    return table


def build_llava(config: LlavaConfig, environment: ModelEnvironment) -> LlavaModel:
    return LlavaModel(config, environment)
