"""Models of images of any size: each merged patch ("cell") of an image has one image token in the text.

Shapes: B batch, S sequence, M cells of a row at most, K images of a row at most, V cells of a batch, C colours, side:
of a cell in pixels, H hidden of the decoder. With pipeline parallelism the vision transformer and the projection are
parts of the first stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mt_core.errors import ConfigError, DataError
from mt_core.nn.cache import Conditioning
from mt_models.llava.vision_language import VisionLanguageModel
from mt_models.vision.patches import Grid, TimedGrid


class DynamicResolutionModel(VisionLanguageModel):
    """tokens [B, S], images and their grids -> logits [B, S, vocab].

    The tower takes images [V, C, side, side], cell by cell, and the grids of the images. takes_times: those with their
    third numbers.
    """

    inputs: tuple[str, ...] = (*VisionLanguageModel.inputs, "image_grids")
    conditioned_by: ClassVar[tuple[str, ...]] = ("images", "image_grids")

    takes_times: ClassVar[bool] = False

    def features(self, images: Tensor, grids: Sequence[Grid] | Sequence[TimedGrid]) -> Tensor:
        """images [V, C, side, side], cell by cell, and rows and columns of cells of each image -> [V, H]"""
        assert self.vision_projection is not None
        features: Tensor = self.vision_projection(self.vision_model(images, grids))
        return features

    def features_of_batch(self, places: Tensor, images: Tensor, image_grids: Tensor | None) -> Tensor:
        """images [B, M, C, side, side]: the cells of the images of each row, in the order of their image tokens.
        image_grids int64 [B, K, 2]: rows and columns of cells of each image; [B, K, 3] with a third number of views of
        videos. What is beyond is padding (grids of 0)."""
        # `tolist` waits for the device if the grids are there: sizes of windows and
        # numbers of cells are shapes, which the host needs.
        grids = [] if image_grids is None else [self._grids(of_row) for of_row in image_grids.tolist()]
        counts = [cells(of_row) for of_row in grids] or [0] * len(places)
        self._require_tokens_of_rows(places.sum(1).tolist(), counts)
        if not any(counts):
            # A batch of texts alone: the features of a padding cell are not used, and have gradients of zero.
            return self.features(images[0, :1], self._grids([(1, 1)]))[:0]
        # [V, C, side, side] of the batch, without the padding of each row
        own_cells = torch.cat([row[:count] for row, count in zip(images, counts, strict=True)])
        return self.features(own_cells, [grid for of_row in grids for grid in of_row])

    def _grids(self, grids: Sequence[Sequence[int]]) -> list[Any]:
        """What the tower takes of a row's grids."""
        return timed_grids(grids) if self.takes_times else real_grids(grids)

    def _require_tokens_of_rows(self, token_counts: list[int], wanted: list[int]) -> None:
        """Raises DataError unless each row has as many image tokens as its images have cells."""
        if token_counts != wanted:
            raise DataError(
                f"the rows of the batch have {token_counts} image tokens (id {self.config.image_token_index}), and "
                f"images of {wanted} merged patches; write the image token once for each merged patch"
            )

    def condition(self, inputs: Mapping[str, Tensor]) -> Conditioning:
        """images [V, C, side, side], image_grids [K, 2] -> features [V, H], of the first stage's ranks."""
        if "images" not in inputs or self.vision_model is None:
            return {}
        return {"features": self.features(inputs["images"], self._grids(inputs["image_grids"].tolist()))}

    def features_of_request(self, inputs: Mapping[str, Tensor]) -> int:
        if ("images" in inputs) != ("image_grids" in inputs):
            raise ConfigError("images: images need image_grids, int64 [images, 2], rows and columns of cells of each")
        count = cells(real_grids(inputs["image_grids"].tolist())) if "images" in inputs else 0
        if count != len(inputs.get("images", ())):
            raise ConfigError(f"images: the grids have {count} cells, and there are {len(inputs['images'])}")
        return count


def real_grids(grids: Sequence[Sequence[int]]) -> list[Grid]:
    """Without the padding, and without times of videos."""
    return [(grid[0], grid[1]) for grid in grids if grid[0]]


def timed_grids(grids: Sequence[Sequence[int]]) -> list[TimedGrid]:
    """Without the padding; the third number of images is 0."""
    return [(grid[0], grid[1], grid[2] if len(grid) > 2 else 0) for grid in grids if grid[0]]


def cells(grids: Sequence[Sequence[int]]) -> int:
    return sum(grid[0] * grid[1] for grid in grids)
