"""LLaVA (Liu et al., 2023): image features, projected to the hidden size, replace the image tokens of a text.

Shapes: B batch, S sequence, N images, F features of an image, W width of a feature, H hidden of the decoder, V
vocabulary (this rank's ids under tensor parallelism). Each image has F image tokens in the text, which its
features replace. Tower and projection have whole sequences on every rank even if sequence parallelism shards the
decoder's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError, DataError
from mt_core.nn.cache import Cache, Conditioning, KeepsState, layers_with_state
from mt_core.nn.embedding import VocabParallelEmbedding
from mt_core.nn.environment import ModelEnvironment
from mt_core.nn.model import Model, contract
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.freeze import freeze
from mt_models.llava.config import LlavaConfig
from mt_models.llava.projection import VisionProjection
from mt_models.llava.splicing import spliced_words
from mt_models.vision.model import build_tower


class LlavaModel(Model):
    """tokens [B, S], images -> logits [B, S, V]."""

    inputs: tuple[str, ...] = ("tokens", "images", "position_ids", "segment_ids")
    continues_text: ClassVar[bool] = True
    language_model: Any
    """A decoder of any family."""

    def __init__(self, config: LlavaConfig, environment: ModelEnvironment) -> None:
        super().__init__()
        self.config = config
        self.vision_model = build_tower(config.vision_model, environment)
        self.vision_projection = VisionProjection(config, environment.parallel)
        self.language_model = build_decoder(config, environment)
        self._leave_untrained()

    def forward(
        self,
        tokens: Tensor,
        images: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """images [N, C, img_h, img_w], or [B, N / B, C, img_h, img_w]: in the order of their image tokens in
        the batch, row by row. None for a text without image tokens.

        Raises DataError when images and image tokens are not as many.
        """
        places = tokens == self.config.image_token_index
        words = tokens.masked_fill(places, 0)  # the image token need not be in the vocabulary
        images = images.flatten(0, 1) if images is not None and images.ndim == 5 else images
        self._require_tokens(places, 0 if images is None else len(images))
        if images is None:
            return self.language_model(words, position_ids, segment_ids)
        table = word_embeddings(self.language_model)
        assert table is not None  # build_decoder has looked
        with spliced_words(table, places, self.features(images).flatten(0, 1)):
            return self.language_model(words, position_ids, segment_ids)

    def features(self, images: Tensor) -> Tensor:
        """[N, C, img_h, img_w] -> [N, F, H]: what replaces the image tokens."""
        wanted = self.config.feature_states
        states = list(islice(self.vision_model.states(images), max(wanted) + 1))
        features = torch.cat([states[state] for state in wanted], dim=-1)
        return self.vision_projection(features[:, 1:] if self.config.drops_class_token else features)

    conditioned_by: ClassVar[tuple[str, ...]] = ("images",)

    def condition(self, inputs: Mapping[str, Tensor]) -> Conditioning:
        """images [N, C, img_h, img_w], in the order of their tokens -> features [N F, H]"""
        return {"features": self.features(inputs["images"]).flatten(0, 1)} if "images" in inputs else {}

    def decode_stage(self, stage: Stage, hidden: Tensor | None, cache: Cache) -> Any:
        """The features of a sequence's images replace its image tokens, whatever part of them is in this pass.

        An image token that was generated is a word like any other: no feature belongs to it.
        """
        places = torch.zeros_like(cache.tokens, dtype=torch.bool)
        features = list(self._take_features(cache, places)) if stage.first else []
        words = cache.tokens.masked_fill(places, 0)
        spliced: Any = nullcontext()
        if features:
            table = word_embeddings(self.language_model)
            assert table is not None
            spliced = spliced_words(table, places, torch.cat(features))
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
        """The parts in model.freeze, and the modules of the tower that no feature passes through, thus without
        gradients."""
        unread = self.vision_model.behind(max(self.config.feature_states))
        for module in (*unread, *(self.get_submodule(part) for part in self.config.freeze)):
            freeze(module)


def build_decoder(config: LlavaConfig, environment: ModelEnvironment) -> nn.Module:
    """The decoder of any family that continues text. Raises ConfigError for another."""
    decoder = config.decoder
    spec = environment.host.models.get(decoder.family, key="model.language_model.family")
    # What the decoder's builder asks of the whole configuration, it asks for its own model.
    own = replace(environment, config=environment.config.model_copy(update={"model": decoder}))
    model = spec.build.load()(decoder, own)
    if not contract(model).continues_text or word_embeddings(model) is None:
        raise ConfigError(
            f"model.language_model.family={decoder.family} does not continue text, and LLaVA needs a decoder that "
            "does, such as llama, mistral, qwen, gemma or gpt"
        )
    return model


def word_embeddings(model: nn.Module) -> VocabParallelEmbedding | None:
    """The table of token embeddings, `embedding.word_embeddings` in every family that has one."""
    table = getattr(getattr(model, "embedding", None), "word_embeddings", None)
    return table if isinstance(table, VocabParallelEmbedding) else None


def build_llava(config: LlavaConfig, environment: ModelEnvironment) -> LlavaModel:
    return LlavaModel(config, environment)
