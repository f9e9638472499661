"""Qwen2.5-VL (Technical Report, 2025): merged patches of images replace the image tokens of a text.

Shapes: B batch, S sequence, M cells (merged patches) of a row at most, K images of a row at most, V cells of a batch, C
colours, side: of a cell in pixels, H hidden of the decoder. Each cell has one image token in the text. With pipeline
parallelism the vision transformer and the merger are parts of the first stage; every stage computes the positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mt_core.errors import ConfigError, DataError
from mt_core.nn.cache import Cache, Conditioning
from mt_core.nn.environment import ModelEnvironment
from mt_core.nn.model import Model
from mt_core.parallel.pipeline.stage import Stage, whole
from mt_models.llava.model import VisionLanguageModel, word_embeddings
from mt_models.llava.splicing import spliced_words
from mt_models.qwen_vl.config import QwenVLConfig
from mt_models.qwen_vl.decoder import QwenVLDecoder
from mt_models.qwen_vl.patch_groups import Grid
from mt_models.qwen_vl.positions import multimodal_positions
from mt_models.qwen_vl.vision import PatchMerger, QwenVisionTower


class QwenVLModel(VisionLanguageModel):
    """tokens [B, S], images and their grids -> logits [B, S, vocab]."""

    inputs: tuple[str, ...] = ("tokens", "images", "position_ids", "segment_ids", "image_grids")
    conditioned_by: ClassVar[tuple[str, ...]] = ("images", "image_grids")
    config: QwenVLConfig
    vision_model: Any
    language_model: QwenVLDecoder

    def __init__(self, config: QwenVLConfig, environment: ModelEnvironment) -> None:
        Model.__init__(self)  # the base builds a tower of the family vision, and a decoder of any family
        self.config = config
        self.vision_model = self.vision_projection = None
        if environment.has_first:
            self.vision_model = QwenVisionTower(config.vision_model, environment)
            self.vision_projection = PatchMerger(config, environment.parallel)
        decoder = config.decoder
        own = replace(environment, config=environment.config.model_copy(update={"model": decoder}))
        self.language_model = QwenVLDecoder(decoder, own)
        self._leave_untrained()

    def unread_modules(self, tower: Any) -> list[nn.Module]:
        return []

    def forward(
        self,
        tokens: Tensor,
        images: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        image_grids: Tensor | None = None,
    ) -> Tensor:
        """images [B, M, C, side, side]: the cells of the images of each row, in the order of their image tokens.
        image_grids int64 [B, K, 2]: rows and columns of cells of each image. What is beyond is padding (grids of 0).
        position_ids [B, S]: of a text, starting at 0 with each segment. No images: a text without image tokens.

        Raises DataError when cells and image tokens are not as many.
        """
        stage = whole(self.language_model.decoded_layers)
        logits: Tensor = self.run_stage(stage, None, tokens, images, position_ids, segment_ids, image_grids)
        return logits

    def run_stage(
        self,
        stage: Stage,
        hidden: Tensor | None,
        tokens: Tensor,
        images: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        image_grids: Tensor | None = None,
    ) -> Any:
        """hidden [B, S, H] of the previous stage -> the next stage's input, or the logits. See Pipelined."""
        places = tokens == self.config.image_token_index
        if image_grids is not None:
            position_ids = multimodal_positions(places, image_grids, position_ids)
        words = tokens.masked_fill(places, 0)
        with self._images_within(places, images, image_grids) if stage.first else nullcontext():
            return self.language_model.run_stage(stage, hidden, words, position_ids, segment_ids)

    def features_of(self, images: Tensor, grids: Sequence[Grid]) -> Tensor:
        """images [V, C, side, side], cell by cell, and rows and columns of cells of each image -> [V, H]"""
        assert self.vision_projection is not None
        features: Tensor = self.vision_projection(self.vision_model(images, grids))
        return features

    def _images_within(
        self, places: Tensor, images: Tensor | None, image_grids: Tensor | None
    ) -> AbstractContextManager[None]:
        """A context in which the features of images are spliced in at `places` [B, S]."""
        if images is None or image_grids is None:
            require_tokens([int(places.sum())], [0], self.config.image_token_index)
            return nullcontext()
        return self._spliced(places, self._cells_of_batch(places, images, image_grids))

    def _spliced(self, places: Tensor, features: Tensor) -> AbstractContextManager[None]:
        return spliced_words(word_embeddings(self.language_model), places, features)

    def _cells_of_batch(self, places: Tensor, images: Tensor, image_grids: Tensor) -> Tensor:
        """[image tokens, H]"""
        grids = [real_grids(own) for own in image_grids.tolist()]
        counts = [cells(own) for own in grids]
        require_tokens(places.sum(1).tolist(), counts, self.config.image_token_index)
        if not any(counts):
            # A batch of texts alone: the features of a padding cell are not used, and have gradients of zero.
            return self.features_of(images[0, :1], [(1, 1)])[:0]
        own_cells = torch.cat([row[:count] for row, count in zip(images, counts, strict=True)])
        return self.features_of(own_cells, [grid for own in grids for grid in own])

    # -- generation ----------------------------------------------------------------------------------

    def condition(self, inputs: Mapping[str, Tensor]) -> Conditioning:
        """images [V, C, side, side], image_grids [K, 2] -> features [V, H], of the first stage's ranks; and the grids,
        on the host, from which every stage computes positions."""
        if "images" not in inputs:
            return {}
        grids = inputs["image_grids"].cpu()
        if self.vision_model is None:
            return {"image_grids": grids}
        return {"image_grids": grids, "features": self.features_of(inputs["images"], real_grids(grids.tolist()))}

    def decode_stage(self, stage: Stage, hidden: Tensor | None, cache: Cache) -> Any:
        """As in training, for whatever part of the images is in this pass. An image token that was generated is a word
        like any other: no feature belongs to it."""
        places = torch.zeros_like(cache.tokens, dtype=torch.bool)
        features = list(self._take_features(cache, places)) if stage.first else []
        words = cache.tokens.masked_fill(places, 0)
        with self._spliced(places, torch.cat(features)) if features else nullcontext():
            return self.language_model.run_stage(stage, hidden, words, self._positions(cache), cache=cache)

    def _positions(self, cache: Cache) -> Tensor:
        """[1, T] of texts alone, [3, 1, T] if a sequence has images."""
        if not any("image_grids" in sequence.conditioning for sequence in cache.sequences):
            return cache.position_ids
        positions, end = cache.position_ids.expand(3, 1, -1).clone(), 0
        for sequence in cache.sequences:
            end += sequence.count
            grids = sequence.conditioning.get("image_grids")
            if grids is not None:
                places = torch.cat([sequence.past, sequence.new])[None] == self.config.image_token_index
                own = multimodal_positions(places, grids[None])[..., sequence.start :]
                positions[..., end - sequence.count : end] = own.to(positions.device)
        return positions

    def check_request(self, tokens: Tensor, inputs: Mapping[str, Tensor]) -> None:
        if ("images" in inputs) != ("image_grids" in inputs):
            raise ConfigError("images: images need image_grids, int64 [images, 2], rows and columns of cells of each")
        count = cells(real_grids(inputs["image_grids"].tolist())) if "images" in inputs else 0
        if count != len(inputs.get("images", ())):
            raise ConfigError(f"images: the grids have {count} cells, and there are {len(inputs['images'])}")
        try:
            require_tokens(
                [int((tokens == self.config.image_token_index).sum())], [count], self.config.image_token_index
            )
        except DataError as error:
            raise ConfigError(f"images: {error}") from None


def real_grids(grids: Sequence[Sequence[int]]) -> list[Grid]:
    """Without the padding."""
    return [(rows, columns) for rows, columns in grids if rows]


def cells(grids: Sequence[Grid]) -> int:
    return sum(rows * columns for rows, columns in grids)


def require_tokens(found: list[int], wanted: list[int], image_token: int) -> None:
    """Raises DataError unless each row has as many image tokens as its images have cells."""
    if found != wanted:
        raise DataError(
            f"the rows of the batch have {found} image tokens (id {image_token}), and images of {wanted} merged patches"
            "; write the image token once for each merged patch"
        )


def build_qwen_vl(config: QwenVLConfig, environment: ModelEnvironment) -> QwenVLModel:
    return QwenVLModel(config, environment)
