"""Token ids and pixels of images with texts against the processors of `transformers`, with a tokenizer made here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.data.images.marker_tokenizer import write_marker_tokenizer
from tests.data.images.reference_processors import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    InternVLProcessor,
    idefics3_processor,
)

from mt_core.interfaces import SplitRequest
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


IDEFICS3 = {"image_longest_edge": 3 * SIDE, "image_markers": "idefics3", "resample": "lanczos"}
INTERNVL = {
    "max_num_tiles": 12, "use_thumbnail": True, "resize": "squash", "image_markers": "internvl",
    "image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD,
}  # fmt: skip
CASES = {
    "idefics3": (IDEFICS3, "<image>", lambda tokenizer: idefics3_processor(tokenizer, SIDE, 3 * SIDE, FEATURES)),
    "internvl": (INTERNVL, "<IMG_CONTEXT>", lambda tokenizer: InternVLProcessor(tokenizer, SIDE, FEATURES)),
}


@pytest.mark.parametrize("family", CASES)
def test_tiles_and_markers_are_those_of_the_processor(family: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    keys, mark, make = CASES[family]
    images, text = images_in(tmp_path), "see <image>\n\nhere"
    processor = make(transformers.AutoTokenizer.from_pretrained(tokenizer_folder))
    lines = [{"image": f"{number}.png", "text": text} for number in range(len(images))]
    samples = samples_of(tokenizer_folder, lines, mark, tmp_path, **keys)
    for sample, image in zip(samples, images, strict=True):
        theirs = processor(images=[[image]], text=[text.replace("<image>", mark)], return_tensors="np")
        ids = theirs["input_ids"][0].tolist()
        assert sample["tokens"][: len(ids)].tolist() == ids
        views = theirs["pixel_values"].reshape(-1, 3, SIDE, SIDE)
        assert_same_pixels(sample["images"][: len(views)], views, 1 / 255 / min(keys.get("image_std", [0.5])))
        assert not sample["images"][len(views) :].any()
        # What counts is the text without its first token, and the end.
        assert sample["loss_mask"].sum() == len(processor.tokenizer(text.replace("<image>", "")).input_ids)
