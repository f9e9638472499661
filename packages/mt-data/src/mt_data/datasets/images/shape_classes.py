"""Synthetic images with classes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mt_core.specs import SplitRequest, Tokenizer
from mt_data.datasets.images.config import ImageDataConfig
from mt_data.datasets.images.pixels import as_input
from mt_data.datasets.images.sample import labelled
from mt_data.datasets.images.shapes import EPOCH, KINDS, draw


class ShapesDataConfig(ImageDataConfig):
    """Synthetic images of one shape each; its kind is the class."""

    dataset_type: str = "shapes"

    @property
    def num_classes(self) -> int:
        return len(KINDS)


class ShapesDataset:
    """Sample k is picture k of the split."""

    def __init__(self, config: ShapesDataConfig, request: SplitRequest) -> None:
        self.config = config
        self.split, self.seed = request.split, request.seed
        self.length = EPOCH if request.num_samples is None else request.num_samples

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of fake shapes, of which there are {len(self)}")
        picture = draw(self.config.img_h, self.config.img_w, seed=self.seed, split=self.split, index=index)
        return labelled(as_input(picture.pixels, self.config), list(KINDS).index(picture.kind))

    def describe(self, index: int) -> str:
        return f"fake picture {index} of the {self.split} split with seed {self.seed}"


def build_shapes(config: ShapesDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> ShapesDataset:
    """Samples of IMAGE_CLASS_SAMPLE; splits differ in every picture."""
    return ShapesDataset(config, request)
