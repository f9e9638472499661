"""Token ids and pixels of images with texts against the processors of `transformers`, with a tokenizer made here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.data.images.marker_tokenizer import write_marker_tokenizer

from mt_core.specs import SplitRequest
from mt_data.datasets.images.image_text import ImageTextDataConfig, build_image_text
from mt_data.tokenizers.hugging_face import HuggingFaceConfig, build_hugging_face

transformers = pytest.importorskip("transformers")
SIDE, FEATURES = 16, 3
SIZES = [(40, 20), (19, 50), (16, 16), (64, 63)]
"""Width and height."""


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_marker_tokenizer(folder)
    return folder


def samples_of(folder: Path, texts: list[dict[str, str]], image_token: str, path: Path, **keys):
    """Ids and views of each record of the data set, by its number."""
    (path / "lines.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    tokenizer = build_hugging_face(HuggingFaceConfig(tokenizer_model=str(folder)))
    (image,) = tokenizer.encode(image_token)
    config = ImageTextDataConfig(
        img_h=SIDE, img_w=SIDE, image_token_index=image, image_seq_length=FEATURES,
        train_data_path=[str(path / "lines.jsonl")], **keys,
    )  # fmt: skip
    data = build_image_text(config, tokenizer, SplitRequest("train", None, 400, seed=1))
    found = {}
    for index in range(len(data)):
        (record,) = data.members(index)
        found[record] = data[index]
    return [found[number] for number in range(len(texts))]


def images_in(folder: Path) -> list[Image.Image]:
    images = []
    for number, (width, height) in enumerate(SIZES):
        array = np.random.RandomState(number).randint(0, 256, (height, width, 3)).astype(np.uint8)
        images.append(Image.fromarray(array))
        images[-1].save(folder / f"{number}.png")
    return images


def assert_same_pixels(ours: np.ndarray, theirs: np.ndarray, step: float) -> None:
    """Within two steps of a pixel's value, nearly all equal: sums that end near one half may round either way.

    step: of a pixel's value, in what the model takes.
    """
    assert ours.shape == theirs.shape
    difference = np.abs(ours - theirs) / step
    assert difference.max() < 2.01
    assert np.mean(difference > 0.5) < 0.02


def test_tiles_and_markers_are_those_of_idefics3(tokenizer_folder: Path, tmp_path: Path) -> None:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = images_in(tmp_path)
    processor = transformers.Idefics3Processor(
        Idefics3ImageProcessorPil(size={"longest_edge": 3 * SIDE}, max_image_size={"longest_edge": SIDE}),
        transformers.AutoTokenizer.from_pretrained(tokenizer_folder),
        image_seq_len=FEATURES,
    )
    text = "see <image>\n\nhere"
    lines = [{"image": f"{number}.png", "text": text} for number in range(len(images))]
    keys = {"image_longest_edge": 3 * SIDE, "image_markers": "idefics3", "resample": "lanczos"}
    samples = samples_of(tokenizer_folder, lines, "<image>", tmp_path, **keys)
    for sample, image in zip(samples, images, strict=True):
        theirs = processor(images=[[image]], text=[text], return_tensors="np")
        ids = theirs["input_ids"][0].tolist()
        assert sample["tokens"][: len(ids)].tolist() == ids
        views = theirs["pixel_values"][0]
        assert_same_pixels(sample["images"][: len(views)], views, 2 / 255)
        assert not sample["images"][len(views) :].any()
        assert sample["loss_mask"].sum() == len(processor.tokenizer(text).input_ids) - 1
