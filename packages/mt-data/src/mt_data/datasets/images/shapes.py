"""Synthetic images: one coloured shape on a noisy background. The same everywhere, and as many as one likes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError
from mt_core.interfaces import Split, SplitRequest, Tokenizer
from mt_data.datasets.images.config import ImageDataConfig, ImageTextKeys
from mt_data.datasets.images.pixels import as_input
from mt_data.datasets.images.sample import EncodedText, SampleShape, labelled, padded_sounds
from mt_data.datasets.images.tiles import DynamicResolution, Grid, grids, padded_grids
from mt_data.datasets.images.videos import views_of_frames
from mt_data.datasets.sounds.rules import RULES, SAMPLING_RATE, SOUND
from mt_data.datasets.splits import SPLITS
from mt_data.datasets.text_files import Encode, bare_encoder

Distances = NDArray[np.float64]

KINDS: dict[str, Callable[[Distances, Distances], NDArray[np.bool_]]] = {
    "circle": lambda y, x: np.hypot(y, x) <= 1,
    "square": lambda y, x: np.maximum(np.abs(y), np.abs(x)) <= 0.8,
    "triangle": lambda y, x: (np.abs(x) <= (y + 1) / 2) & (y <= 0.8),
    "cross": lambda y, x: (np.minimum(np.abs(y), np.abs(x)) <= 0.3) & (np.maximum(np.abs(y), np.abs(x)) <= 1),
    "ring": lambda y, x: (np.hypot(y, x) <= 1) & (np.hypot(y, x) >= 0.55),
    "bar": lambda y, x: (np.abs(y) <= 0.3) & (np.abs(x) <= 1),
}
"""Which points belong to a shape of radius 1 around (0, 0); y points down."""
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 215, 40),
    "purple": (160, 50, 190),
    "white": (245, 245, 245),
}
PLACES = ("top left", "top right", "bottom left", "bottom right")
EPOCH = 10_000
"""Samples when no number is requested."""
NOISE = 40
BRIGHTEST_BACKGROUND = 90


@dataclass(frozen=True)
class Picture:
    """pixels: uint8 [height, width, 3]. The rest is what it shows, by name."""

    pixels: NDArray[np.uint8]
    kind: str
    colour: str
    place: str

    @property
    def caption(self) -> str:
        return f"a {self.colour} {self.kind} at the {self.place}"


def draw(height: int, width: int, *, seed: int, split: Split, index: int) -> Picture:
    """Picture number `index` of a split. RandomState's streams never change between versions of NumPy."""
    random = np.random.RandomState([seed % 2**32, SPLITS.index(split), index])
    kind = list(KINDS)[random.randint(len(KINDS))]
    colour = list(COLOURS)[random.randint(len(COLOURS))]
    place = random.randint(len(PLACES))
    radius = min(height, width) * random.uniform(0.16, 0.24)
    # The middle of a quarter, moved a little.
    middle_y = height * (0.25 + 0.5 * (place // 2) + random.uniform(-0.04, 0.04))
    middle_x = width * (0.25 + 0.5 * (place % 2) + random.uniform(-0.04, 0.04))
    # [height, 1] and [1, width]: distances from the middle in units of the radius, to the centres of the pixels.
    y = (np.arange(height) + 0.5 - middle_y)[:, None] / radius
    x = (np.arange(width) + 0.5 - middle_x)[None, :] / radius
    background = random.randint(0, BRIGHTEST_BACKGROUND)
    inside = KINDS[kind](*np.broadcast_arrays(y, x))
    plain = np.where(inside[..., None], COLOURS[colour], background)
    noisy = plain + random.randint(-NOISE, NOISE + 1, size=(height, width, 3))
    return Picture(noisy.clip(0, 255).astype(np.uint8), kind, colour, PLACES[place])


# -- images with texts that describe them ------------------------------------------------------------

PITCHES = {"low": 200.0, "middle": 800.0, "high": 3200.0}
"""Frequencies of the tones in Hz; each tone is up to a tenth higher or lower."""
TONE_SAMPLES = 1600
"""A tenth of a second."""


@dataclass(frozen=True)
class Tone:
    """samples: fp32 at 16 kHz. kind: its pitch, by name."""

    samples: NDArray[np.float32]
    kind: str


def draw_tone(*, seed: int, split: Split, index: int) -> Tone:
    """Tone number `index` of a split: a sine with noise, of any phase and loudness."""
    # The last number keeps this stream apart from those of the picture.
    random = np.random.RandomState([seed % 2**32, SPLITS.index(split), index, 2])
    kind = list(PITCHES)[random.randint(len(PITCHES))]
    turns = PITCHES[kind] * random.uniform(0.9, 1.1) * np.arange(TONE_SAMPLES) / SAMPLING_RATE + random.uniform()
    wave = random.uniform(0.1, 0.8) * np.sin(2 * np.pi * turns) + 0.02 * random.standard_normal(TONE_SAMPLES)
    return Tone(wave.astype(np.float32), kind)


MAX_PROPORTION = 3
"""Proportions of images in dynamic resolution: the longer side in units of the shorter."""


class CaptionedShapesDataConfig(ImageTextKeys):
    """Synthetic images of one shape each, and a text that says which: "a red circle at the top left". In dynamic
    resolution each has a size of its own. With audio_token_index each has a tone too: "..., a high tone"."""

    dataset_type: str = "captioned_shapes"


class CaptionedShapesDataset:
    """Sample k is picture k of the split: the image, its caption, the end-of-document id."""

    def __init__(
        self, config: CaptionedShapesDataConfig, encode: Encode, eod: int, shape: SampleShape, request: SplitRequest
    ) -> None:
        self.config, self.encode, self.eod, self.shape = config, encode, eod, shape
        self.split, self.seed = request.split, request.seed
        self.length = EPOCH if request.num_samples is None else request.num_samples
        self.sizes = sizes_in_cells(config) if config.dynamic_resolution else [Grid(1, 1)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of captioned shapes, of which there are {len(self)}")
        grid = self._grid(index)
        height, width = grid.rows * self.config.img_h, grid.columns * self.config.img_w
        picture = draw(height, width, seed=self.seed, split=self.split, index=index)
        # In dynamic resolution each cell is a view with image_length features.
        media = EncodedText(self.shape.image.tokens * grid.tiles, self.shape.image.counted * grid.tiles)
        words, sounds = picture.caption, {}
        if self.config.audio_token_index is not None:
            tone = draw_tone(seed=self.seed, split=self.split, index=index)
            tokens = [SOUND] * RULES[self.config.audio_rule].positions(len(tone.samples))
            media += EncodedText(tokens, [False] * len(tokens))
            words, sounds = f"{words}, a {tone.kind} tone", padded_sounds([tone.samples], self.config)
        caption = [*self.encode(words), self.eod]
        sample = self.shape.arrays(media + EncodedText(caption, [True] * len(caption))) | sounds
        if not self.config.dynamic_resolution:
            return {**sample, "images": as_input(picture.pixels, self.config)}
        return {**sample, "images": self._cells(picture.pixels, grid), "image_grids": padded_grids([grid], 1)}

    def _cells(self, pixels: NDArray[np.uint8], grid: Grid) -> NDArray[np.float32]:
        """[most_cells, 3 (of each frame), img_h, img_w], the rest is 0."""
        views = views_of_frames([pixels], grid, DynamicResolution.of(self.config), self.config)
        images = np.zeros((self.config.most_cells, *views[0].shape), np.float32)
        images[: len(views)] = views
        return images

    def _grid(self, index: int) -> Grid:
        """The size of picture `index`, in cells."""
        # The last number keeps this stream apart from the one that draws the picture (shapes.draw).
        random = np.random.RandomState([self.seed % 2**32, SPLITS.index(self.split), index, 1])
        return self.sizes[random.randint(len(self.sizes))]

    def describe(self, index: int) -> str:
        return f"fake picture {index} of the {self.split} split with seed {self.seed}"


def sizes_in_cells(config: CaptionedShapesDataConfig) -> list[Grid]:
    """Sizes of pictures in dynamic resolution, in cells. Raises ConfigError where none is allowed."""
    sizes = [
        grid
        for grid in grids(config.most_cells)
        if grid.tiles >= config.fewest_cells and max(grid) <= MAX_PROPORTION * min(grid)
    ]
    if not sizes:
        raise ConfigError(
            f"data.min_pixels={config.min_pixels} makes pictures of {config.fewest_cells} cells at least, and "
            f"data.max_pixels={config.max_pixels} with data.seq_length={config.seq_length} allows {config.most_cells}, "
            f"with one side at most {MAX_PROPORTION} times as long as the other; make data.min_pixels smaller"
        )
    return sizes


def build_captioned_shapes(
    config: CaptionedShapesDataConfig, tokenizer: Tokenizer, request: SplitRequest
) -> CaptionedShapesDataset:
    """Samples of IMAGE_TEXT_SAMPLE; splits differ in every picture. Raises ConfigError without an eod id, and for
    sizes that cannot be."""
    if (eod := tokenizer.special.eod) is None:
        raise ConfigError('data.dataset_type="captioned_shapes" ends captions, and the tokenizer has no id for that')
    shape = SampleShape.of(config, tokenizer, request.sequence_length)
    if config.audio_token_index is not None and config.max_audio_samples < TONE_SAMPLES:
        raise ConfigError(
            f"data.max_audio_seconds={config.max_audio_seconds} is shorter than the tones of captioned_shapes, which "
            f"have {TONE_SAMPLES / SAMPLING_RATE} seconds"
        )
    return CaptionedShapesDataset(config, bare_encoder(tokenizer), eod, shape, request)


# -- images with classes -----------------------------------------------------------------------------


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
