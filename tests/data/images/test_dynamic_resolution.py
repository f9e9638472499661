"""Images in their own proportions: against the processor of Qwen2-VL, packed, synthetic, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SplitRequest
from mt_core.plugins import load_plugins
from mt_core.specs import DATASETS
from mt_data.datasets.images.image_text import ImageTextDataConfig
from mt_data.datasets.images.pixels import as_input
from mt_data.datasets.images.shapes import draw
from mt_data.datasets.images.tiles import DynamicResolution
from mt_data.tokenizers.byte_level import ByteLevelTokenizer

transformers = pytest.importorskip("transformers")

IMAGE, LENGTH = 261, 64
KEYS = {
    "img_h": 28, "img_w": 28, "image_token_index": IMAGE, "image_seq_length": 1, "dynamic_resolution": True,
    "min_pixels": 4 * 784, "max_pixels": 20 * 784, "seq_length": LENGTH,
}  # fmt: skip
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def build(name: str, samples: int | None = None, **keys):
    spec = load_plugins()[DATASETS].get(name)
    config = spec.config_type.load().model_validate({"dataset_type": name, **KEYS, **keys})
    return spec.build.load()(config, ByteLevelTokenizer(), SplitRequest("train", samples, LENGTH, seed=7))


def cells(pixel_values: np.ndarray) -> np.ndarray:
    """Patches of two equal frames in the order of the processor -> cells [V, 3, 28, 28]."""
    frames = pixel_values.reshape(-1, 2, 2, 3, 2, 14, 14)
    assert (frames[:, :, :, :, 0] == frames[:, :, :, :, 1]).all()
    return frames[:, :, :, :, 0].transpose(0, 3, 1, 4, 2, 5).reshape(-1, 3, 28, 28)


@pytest.mark.slow
def test_images_equal_those_of_the_processor_of_qwen2_vl() -> None:
    """Larger, smaller and stretched. Sums that end near one half may be rounded to the other side."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config = ImageTextDataConfig.model_validate({**KEYS, **CLIP})
    size = {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels}
    processor = Qwen2VLImageProcessorPil(size=size)
    for height, width in ((20, 31), (28, 200), (300, 170), (75, 75)):
        pixels = draw(height, width, seed=0, split="test", index=height).pixels
        expected = processor(images=[Image.fromarray(pixels)], return_tensors="np")
        grid = config.tiling.grid(height, width)
        assert [1, 2 * grid.rows, 2 * grid.columns] == expected["image_grid_thw"][0].tolist()
        views = np.stack([as_input(view, config) for view in config.tiling.views(pixels, grid)])
        distance = np.abs(views - cells(expected["pixel_values"])) * np.array(config.image_std)[:, None, None] * 255
        assert distance.max() < 1.01
        assert distance.mean() < 0.001


def test_sizes_equal_those_of_the_processor() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    chance = np.random.default_rng(0)
    tiling = DynamicResolution(28, 28, min_pixels=3136, max_pixels=50_000)
    for height, width in np.exp(chance.uniform(1.6, 7, (300, 2))).astype(int).tolist():
        if max(height, width) <= 200 * min(height, width):
            expected = smart_resize(height, width, 28, 3136, 50_000)
            assert tuple(28 * side for side in tiling.grid(height, width)) == expected, (height, width)


def test_no_image_has_more_than_the_most_pixels() -> None:
    """The processor makes 56 cells of 28 x 5600 pixels, since a row has at least one."""
    for cells, size, grid in ((16, (28, 5600), (1, 16)), (16, (5600, 28), (16, 1)), (3, (8, 8), (1, 3))):
        tiling = DynamicResolution(28, 28, min_pixels=3 * 784, max_pixels=cells * 784)
        assert tiling.grid(*size) == grid


def test_views_of_an_image_are_within_the_bounds() -> None:
    """The processor rounds 3 x 9 cells, made smaller to fill 16, down to 2 x 6, fewer than the fewest pixels."""
    assert DynamicResolution(28, 28, min_pixels=15 * 784, max_pixels=16 * 784).grid(84, 252) == (2, 6)
    chance = np.random.default_rng(0)
    for img_h, img_w, least, height, width in chance.integers(1, [9, 9, 400, 120, 120], (3000, 5)).tolist():
        cell = img_h * img_w
        most = -(-least // cell) * cell + int(chance.integers(2) * chance.integers(100))
        tiling = DynamicResolution(img_h, img_w, min_pixels=least, max_pixels=most)
        assert tiling.min_views <= tiling.grid(height, width).tiles <= tiling.max_views, (tiling, height, width)


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A record with an image of 2 x 3 cells, one with images of 2 x 2 and 3 x 4, and a text."""
    for name, size in (("a", (56, 84)), ("b", (56, 56)), ("c", (84, 112))):
        np.save(tmp_path / f"{name}.npy", draw(*size, seed=0, split="test", index=ord(name)).pixels)
    lines = [
        {"image": "a.npy", "text": "<image>one"},
        {"images": ["b.npy", "c.npy"], "text": "x<image>y<image>two"},
        {"text": "three"},
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_packed_records_have_the_grids_of_their_images_in_order(records: Path) -> None:
    (sample,) = build("image_text", train_data_path=[str(records)], packing=True)
    count = (sample["tokens"] == IMAGE).sum()
    assert count == 6 + 4 + 12
    grids = sample["image_grids"]
    assert (grids.shape, grids.dtype) == ((LENGTH // 4, 2), np.int64)
    given = [tuple(grid) for grid in grids[grids.any(1)].tolist()]
    assert given in ([(2, 3), (2, 2), (3, 4)], [(2, 2), (3, 4), (2, 3)])
    assert sample["images"].shape == (LENGTH, 3, 28, 28)
    assert not sample["images"][count:].any()
    # The second cell of the first image is 28 pixels further right.
    pixels = np.load(records.parent / ("a.npy" if given[0] == (2, 3) else "b.npy"))
    np.testing.assert_allclose(sample["images"][1], pixels[:28, 28:56].transpose(2, 0, 1) / 127.5 - 1, atol=1e-6)


def test_made_up_pictures_have_sizes_of_their_own() -> None:
    dataset = build("captioned_shapes", samples=8)
    found = set()
    for sample in (dataset[index] for index in range(8)):
        (rows, columns), count = sample["image_grids"][0].tolist(), int((sample["tokens"] == IMAGE).sum())
        assert rows * columns == count
        assert 4 <= count <= 20
        assert sample["images"][count - 1].any()
        assert not sample["images"][count:].any()
        found.add((rows, columns))
    assert len(found) > 4


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"max_pixels": 3000}, "data.max_pixels=3000 has to be at least data.min_pixels=3136 rounded up"),
        # No number of whole cells has between 240 and 250 pixels.
        ({"img_h": 10, "img_w": 10, "min_pixels": 240, "max_pixels": 250}, "cells of 100 pixels, which is 300"),
    ],
)
def test_fewest_pixels_above_the_most_are_refused(keys: dict[str, int], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ImageTextDataConfig.model_validate({**KEYS, **keys})


def test_pictures_larger_than_a_sample_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="data.min_pixels=15680 makes pictures of 20 cells.*data.seq_length=16 allows 16"
    ):
        build("captioned_shapes", samples=1, min_pixels=20 * 784, seq_length=16)


def test_images_that_cannot_serve_are_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({"image": "a.npy", "text": "one"}) + "\n")
    for shape, words in (
        ((2, 500), "2 x 500 pixels is more than 200 times"),
        ((400, 400), "behind data.seq_length=16"),
    ):
        np.save(tmp_path / "a.npy", np.zeros((*shape, 3), np.uint8))
        spec = load_plugins()[DATASETS].get("image_text")
        keys = {**KEYS, "train_data_path": [str(path)], "seq_length": 16, "max_pixels": 30 * 784}
        config = spec.config_type.load().model_validate(keys)
        with pytest.raises(DataError, match=words):
            spec.build.load()(config, ByteLevelTokenizer(), SplitRequest("train", 1, 16, seed=7))
