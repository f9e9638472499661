"""Images: sizes against Pillow's resampling, fake pictures, files with classes, texts with an image, bad input."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SplitRequest
from mt_core.plugins import load_plugins
from mt_core.specs import DATASETS
from mt_data.datasets.images.pixels import ImageFile, cubic, decode_image, fit, image_size, read_image, resize
from mt_data.datasets.images.shapes import COLOURS, KINDS, draw
from mt_data.datasets.specs import IMAGE_DATASETS
from mt_data.tokenizers.byte_level import ByteLevelTokenizer

TOKENIZER = ByteLevelTokenizer()
IMAGE = 261
"""The first id behind the vocabulary."""


def build(name: str, part: str = "train", samples: int | None = None, length: int = 64, **keys):
    spec = load_plugins()[DATASETS].get(name)
    config = spec.config_type.load().model_validate({"dataset_type": name, **keys})
    return spec.build.load()(config, TOKENIZER, SplitRequest(part, samples, length, seed=7))


def some_image(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8)


OPTIONAL = ("segment_ids", "image_grids", "audio", "audio_lengths")
"""Fields that some keys add."""


def test_samples_have_the_declared_fields(pairs, folder: Path) -> None:
    sizes = {"img_h": 6, "img_w": 4}
    image = {"image_token_index": IMAGE, "image_seq_length": 3}
    keys = {
        "shapes": {},
        "image_folder": {"train_data_path": [str(folder / "train")], "num_classes": 2},
        "captioned_shapes": image,
        "image_text": pairs({"text": "a cat"}) | image,
    }
    for spec in IMAGE_DATASETS:
        sample = build(spec.name, samples=1, **{**keys[spec.name], **sizes})[0]
        assert {field.name: field.dtype for field in spec.sample if field.name not in OPTIONAL} == {
            name: str(array.dtype) for name, array in sample.items()
        }
        named = {"sequence_length": 64, "max_images": 1, **sizes}
        for field in spec.sample:
            if field.name in OPTIONAL:
                continue
            shape = tuple(named.get(size) or int(size) for size in re.findall(r"\w+", field.shape))
            assert sample[field.name].shape == shape, field.name


# -- pixels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resample", ["bicubic", "lanczos"])
@pytest.mark.parametrize("size", [(8, 8), (31, 17), (64, 50), (20, 97)])
def test_resizing_equals_pillow(size, resample) -> None:
    image = some_image(40, 33)
    filter_ = Image.Resampling[resample.upper()]
    expected = np.asarray(Image.fromarray(image).resize(size[::-1], filter_))
    np.testing.assert_array_equal(resize(image, *size, resample), expected)


def test_resizing_takes_memory_that_is_linear_in_the_pixels() -> None:
    """The weights of all old pixels for all new ones would be 1.3 TB."""
    row = np.full((1, 100_000, 3), 200, np.uint8)
    assert (fit(row, 16, 16, "crop") == 200).all()


def test_a_crop_is_the_middle_of_the_resized_image() -> None:
    image = some_image(30, 77)
    larger = np.asarray(Image.fromarray(image).resize((51, 20), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(fit(image, 20, 20, "crop"), larger[:, 15:35])


def test_the_filter_is_the_cubic_one() -> None:
    assert cubic(np.array([0.0, 1.0, 2.0, 0.5, 1.5])).tolist() == [1.0, 0.0, 0.0, 0.5625, -0.0625]


def test_crop_takes_the_middle_and_squash_takes_all() -> None:
    image = np.zeros((10, 30, 3), np.uint8)
    image[:, 10:20] = 200  # the middle third
    assert (fit(image, 10, 10, "crop") == 200).all()
    squashed = fit(image, 10, 10, "squash")
    assert squashed.shape == (10, 10, 3)
    assert squashed[:, 0].max() == 0
    assert squashed[:, 5].min() > 150


# -- fake pictures --------------------------------------------------------------------------------


def test_pictures_are_the_same_everywhere_and_differ_by_number_split_and_seed() -> None:
    first = draw(16, 16, seed=1, split="train", index=5)
    assert np.array_equal(first.pixels, draw(16, 16, seed=1, split="train", index=5).pixels)
    # By hand: what this NumPy and every other gives.
    assert first.caption == "a green cross at the top left"
    for other in ({"index": 6}, {"split": "valid"}, {"seed": 2}):
        keys = {"seed": 1, "split": "train", "index": 5, **other}
        assert not np.array_equal(first.pixels, draw(16, 16, **keys).pixels)


def test_a_picture_shows_what_its_caption_says() -> None:
    for index in range(40):
        picture = draw(48, 48, seed=3, split="train", index=index)
        distance = np.abs(picture.pixels.astype(int) - COLOURS[picture.colour]).max(-1)
        ys, xs = np.nonzero(distance <= 40)
        vertical, horizontal = picture.place.split()
        assert (ys.mean() < 24) == (vertical == "top")
        assert (xs.mean() < 24) == (horizontal == "left")


def test_shapes_are_classes_of_about_equal_size() -> None:
    data = build("shapes", samples=600, img_h=8, img_w=12)
    sample = data[0]
    assert sample["images"].shape == (3, 8, 12)
    assert sample["images"].dtype == np.float32
    assert -1 <= sample["images"].min() < sample["images"].max() <= 1
    counts = np.bincount([int(data[i]["labels"]) for i in range(len(data))], minlength=len(KINDS))
    assert counts.min() > 70
    assert data.config.num_classes == len(counts)
    assert "picture 3 of the train split with seed 7" in data.describe(3)
    with pytest.raises(IndexError):
        data[600]


def test_a_caption_follows_its_image_and_is_what_counts() -> None:
    data = build("captioned_shapes", samples=3, img_h=8, img_w=8, image_token_index=IMAGE, image_seq_length=4)
    sample = data[1]
    caption = draw(8, 8, seed=7, split="train", index=1).caption.encode()
    text = [*caption, TOKENIZER.special.eod]
    assert sample["tokens"][:4].tolist() == [IMAGE] * 4
    assert sample["tokens"][4 : 4 + len(text) - 1].tolist() == text[:-1]
    # The last image position predicts the first letter; padding and images are not predicted.
    assert sample["labels"][3 : 3 + len(text)].tolist() == text
    assert sample["loss_mask"].tolist() == [0.0] * 3 + [1.0] * len(text) + [0.0] * (64 - 3 - len(text))
    assert IMAGE not in sample["labels"]
    assert sample["images"].shape == (3, 8, 8)


# -- files with classes ------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve images of two classes; the value of every pixel is the class."""
    for number in range(12):
        label = "cat" if number % 2 else "ant"
        (tmp_path / "train" / label).mkdir(parents=True, exist_ok=True)
        value = 255 if label == "cat" else 0
        np.save(tmp_path / "train" / label / f"{number:02}.npy", np.full((6, 9, 3), value, np.uint8))
    (tmp_path / "train" / "notes.txt").write_text("not an image")
    return tmp_path


def test_folders_are_classes_in_the_order_of_their_names(folder: Path) -> None:
    data = build("image_folder", data_path=[str(folder / "train")], split="50,50,0", num_classes=2, img_h=4, img_w=4)
    assert len(data) == 6
    seen = set()
    for index in range(6):
        sample = data[index]
        assert sample["images"].shape == (3, 4, 4)
        # ant is 0 and black, which is -1; cat is 1 and white.
        assert (sample["images"] == 2 * sample["labels"] - 1).all()
        seen.add(int(sample["labels"]))
        assert f"/{('ant', 'cat')[int(sample['labels'])]}/" in data.describe(index)
    assert seen == {0, 1}, "a split has one class only"
    valid = build(
        "image_folder", "valid", data_path=[str(folder / "train")], split="50,50,0", num_classes=2, img_h=4, img_w=4
    )
    assert not {f.path for f in data.files} & {f.path for f in valid.files}


def test_classes_are_numbered_over_all_splits(folder: Path) -> None:
    """The validation folder lacks a class; the other keeps its number."""
    (folder / "valid" / "cat").mkdir(parents=True)
    np.save(folder / "valid" / "cat" / "x.npy", some_image(5, 5))
    keys = {"train_data_path": [str(folder / "train")], "valid_data_path": [str(folder / "valid")]}
    data = build("image_folder", "valid", num_classes=2, img_h=4, img_w=4, **keys)
    assert data[0]["labels"] == 1


def test_a_list_names_images_and_classes(folder: Path) -> None:
    lines = [{"image": "train/cat/01.npy", "label": "b"}, {"image": "train/ant/00.npy", "label": "a"}]
    (folder / "list.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    keys = {"train_data_path": [str(folder / "list.jsonl")], "num_classes": 2, "img_h": 4, "img_w": 4}
    data = build("image_folder", **keys)
    assert sorted((int(s["labels"]), float(s["images"].mean())) for s in (data[0], data[1])) == [(0, -1.0), (1, 1.0)]
    assert "list.jsonl, line" in data.describe(0)


def test_images_are_decoded_by_pillow(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    image = some_image(7, 5)
    pillow.fromarray(image).save(tmp_path / "x.png")
    assert np.array_equal(read_image(ImageFile(tmp_path / "x.png")), image)
    # Palettes and transparency become red, green and blue.
    pillow.fromarray(image).convert("P").save(tmp_path / "x.gif")
    assert read_image(ImageFile(tmp_path / "x.gif")).shape == (7, 5, 3)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(DataError, match=r"broken.png cannot be read as an image"):
        read_image(ImageFile(tmp_path / "broken.png"))


def test_without_pillow_the_message_says_what_to_install(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"x.png: image files are decoded by Pillow.*pip install 'mt-data\[images\]'"):
        read_image(ImageFile(tmp_path / "x.png"))


def test_arrays_that_are_no_images_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "grey.npy", np.zeros((4, 4), np.uint8))
    with pytest.raises(DataError, match=r"grey.npy holds uint8 \[4, 4\]; an image is uint8 \[height, width, 3\]"):
        read_image(ImageFile(tmp_path / "grey.npy"))
    # 3 PB, of which none are in the file.
    head = {"descr": "|u1", "fortran_order": False, "shape": (10**15, 1, 3)}
    with (tmp_path / "huge.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, head)
    with pytest.raises(DataError, match=r"huge.npy cannot be read as an array"):
        read_image(ImageFile(tmp_path / "huge.npy"))
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"objects.npy cannot be read as an array"):
        read_image(ImageFile(tmp_path / "objects.npy"))


# -- files with texts --------------------------------------------------------------------------------


@pytest.fixture
def pairs(tmp_path: Path):
    """A function from lines to the keys of a data set of them; the image is 6 by 6."""
    np.save(tmp_path / "x.npy", some_image(6, 6))

    def write(*lines: dict, **keys) -> dict:
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"image": "x.npy", **line}) + "\n" for line in lines))
        path = str(tmp_path / "pairs.jsonl")
        sizes = {"img_h": 6, "img_w": 6, "image_token_index": IMAGE, "image_seq_length": 3}
        return {"train_data_path": [path], **sizes, **keys}

    return write


def shown(sample) -> str:
    """The input as text: an image position is #."""
    return "".join("#" if t == IMAGE else "$" if t == 256 else chr(t) if t < 256 else "." for t in sample["tokens"])


def learnt(sample) -> str:
    """The labels that count."""
    ids = sample["labels"][sample["loss_mask"] == 1]
    return "".join("$" if t == 256 else chr(t) for t in ids)


def test_a_text_has_its_image_before_it_or_where_the_mark_is(pairs) -> None:
    data = build("image_text", **pairs({"text": "a cat"}, {"text": "see <image> there"}), length=24)
    samples = {shown(data[i]).rstrip("."): data[i] for i in range(2)}
    assert set(samples) == {"###a cat", "see ### there"}
    assert learnt(samples["###a cat"]) == "a cat$"
    # The first letter has nothing before it; the image is not predicted, nor does it hide what follows.
    assert learnt(samples["see ### there"]) == "ee  there$"
    assert np.array_equal(
        samples["###a cat"]["images"], (some_image(6, 6).astype(np.float32) / 255 - 0.5).transpose(2, 0, 1)[None] / 0.5
    )


def test_a_conversation_counts_in_its_answers(pairs) -> None:
    turns = [
        {"from": "human", "value": "<image>\nWhat?"},
        {"from": "gpt", "value": "A cat."},
        {"from": "human", "value": "Big?"},
        {"from": "gpt", "value": "No."},
    ]
    sample = build("image_text", **pairs({"conversations": turns}))[0]
    assert shown(sample).startswith("User: ###\nWhat?\n\nAssistant: A cat.$\n\nUser: Big?\n\nAssistant: No.")
    assert learnt(sample) == " A cat.$ No.$"


def test_a_conversation_without_a_mark_begins_with_its_image(pairs) -> None:
    turns = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "A cat."}]
    sample = build("image_text", **pairs({"conversations": turns}, chat_template="chatml"))[0]
    assert shown(sample).startswith("<|im_start|>user\n###\nWhat?<|im_end|>")


def test_a_long_text_is_cut_behind_its_image(pairs) -> None:
    keys = pairs({"text": "abcdefghijklmnop"})
    sample = build("image_text", **keys, length=8)[0]
    assert shown(sample) == "###abcde"
    assert learnt(sample) == "abcdef"
    with pytest.raises(DataError, match=r"line 1 has 19 positions, more than data.seq_length=8.*truncate"):
        build("image_text", **keys, length=8, on_too_long="error")[0]
    with pytest.raises(DataError, match=r"the images end at position 17, behind data.seq_length=16; an image is never"):
        build("image_text", **pairs({"text": "abcdefghijklmn<image>op"}), length=16)[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"image": None, "text": "x"}, r'line 1: expected a path or a list of paths under "image", found None'),
        ({"txt": "x"}, r'line 1: expected a text under "text", found only the keys image, txt.*did you mean .txt'),
        (
            {"text": "<image> and <image>"},
            r'line 1 has "<image>" 2 times, and the number of images is 1.*max_unusable_records',
        ),
        ({"conversations": []}, r'"conversations" must be a list of at least one turn'),
        ({"conversations": [{"from": "bot", "value": "x"}]}, r"line 1, turn 1: expected .*human.*found .*bot"),
        ({"conversations": [{"from": "human", "value": "x"}]}, r"line 1 has no answer of the assistant"),
    ],
)
def test_lines_that_are_no_image_with_a_text_are_named(pairs, line, words) -> None:
    with pytest.raises(DataError, match=words):
        build("image_text", **pairs(line))[0]


@pytest.mark.parametrize(
    ("name", "keys", "error", "words"),
    [
        ("shapes", {"img_h": 0}, Exception, "img_h"),
        ("shapes", {"image_std": [0.5, 0.5]}, Exception, "image_std"),
        ("shapes", {"reset_attention_mask": True}, Exception, "data.reset_attention_mask=True has no effect"),
        (
            "captioned_shapes",
            {"image_token_index": 261, "image_seq_length": 64},
            ConfigError,
            "data.seq_length=64 has no room for text beside data.image_seq_length=64",
        ),
        (
            "captioned_shapes",
            {"image_token_index": 256, "image_seq_length": 4},
            ConfigError,
            "data.image_token_index=256 is a special id of the tokenizer; take one.*such as 261",
        ),
    ],
)
def test_keys_that_cannot_serve_are_refused(name, keys, error, words) -> None:
    with pytest.raises(error, match=words):
        build(name, **keys)


def test_folders_without_images_and_other_numbers_of_classes_are_refused(folder: Path, tmp_path: Path) -> None:
    keys = {"img_h": 4, "img_w": 4}
    with pytest.raises(DataError, match=r"data.num_classes=3, and the images have 2 classes \(ant, cat\).*to 2"):
        build("image_folder", train_data_path=[str(folder / "train")], num_classes=3, **keys)
    with pytest.raises(DataError, match=r"has no images; it must be a folder that has a folder of images for each cl"):
        build("image_folder", train_data_path=[str(folder / "train" / "cat")], num_classes=2, **keys)


def test_pictures_are_read_as_they_are_shown(tmp_path: Path) -> None:
    """With Exif's orientation 6 the first row of the file is the right side of the picture."""
    from PIL import Image

    shown = some_image(4, 6)
    exif = Image.Exif()
    exif[0x0112] = 6
    file = tmp_path / "phone.png"
    Image.fromarray(np.rot90(shown)).save(file, exif=exif)
    np.testing.assert_array_equal(read_image(ImageFile(file)), shown)
    np.testing.assert_array_equal(decode_image(file, "it"), shown)
    assert image_size(ImageFile(file)) == (4, 6)


def test_no_other_program_decodes_an_image(tmp_path: Path) -> None:
    """Ghostscript decodes EPS, whatever the name of the file is."""
    Image.fromarray(some_image(8, 8)).save(tmp_path / "x.jpg", "eps")
    for read in (read_image, image_size):
        with pytest.raises(DataError, match=r"x.jpg cannot be read as an image: PNG, JPEG.* it is none"):
            read(ImageFile(tmp_path / "x.jpg"))


@pytest.mark.parametrize("suffix", ["png", "tif", "jpg", "webp"])
def test_the_size_of_a_turned_image_is_that_of_its_pixels(tmp_path: Path, suffix: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(some_image(4, 6)).save(tmp_path / f"x.{suffix}", exif=exif)
    assert image_size(ImageFile(tmp_path / f"x.{suffix}")) == (6, 4)
    assert read_image(ImageFile(tmp_path / f"x.{suffix}")).shape == (6, 4, 3)


def test_damaged_exif_is_no_error(tmp_path: Path) -> None:
    """The orientation is used where it can be read."""
    exif = Image.Exif()
    exif[0x010F], exif[0x0112] = "maker", 6
    whole = exif.tobytes()
    cases = {
        whole: (6, 4),
        # The maker's text is under a tag of numbers: "bad operand type for abs(): 'str'" when it is written again.
        whole.replace(b"\x01\x0f\x00\x02", b"\x01\x3e\x00\x02"): (6, 4),
        whole.replace(b"MM", b"MX"): (4, 6),
    }
    for data, size in cases.items():
        Image.fromarray(some_image(4, 6)).save(tmp_path / "x.png", exif=data)
        assert image_size(ImageFile(tmp_path / "x.png")) == size
        assert read_image(ImageFile(tmp_path / "x.png")).shape[:2] == size


def test_an_image_far_longer_than_wide_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1, 201, 3), np.uint8))
    Image.fromarray(np.zeros((201, 1, 3), np.uint8)).save(tmp_path / "x.png")
    for name, size in (("x.npy", "1 x 201"), ("x.png", "201 x 1")):
        for read in (read_image, image_size):
            with pytest.raises(DataError, match=rf"{name}: an image of {size} pixels is more than 200 times"):
                read(ImageFile(tmp_path / name))


RAMP = np.linspace(0, 1, 24).reshape(4, 6)
WIDE = {
    "png": np.uint16(RAMP * 65535),
    "pgm": np.uint16(RAMP * 65535),
    "tiff": np.uint16(RAMP * 65535),
    "32.tiff": np.int32(RAMP * (2**31 - 1)),
}


PLANES, SIGN = ((tag).to_bytes(2, "little") + b"\3\0" + b"\1\0\0\0" + b"\1\0" for tag in (284, 339))


@pytest.mark.parametrize("suffix", WIDE)
def test_whole_numbers_of_more_bits_are_scaled(tmp_path: Path, suffix: str) -> None:
    """From their type's range to 0 to 255, in every format that keeps them, beside what was written in 8 bits."""
    path = tmp_path / f"image.{suffix}"
    Image.fromarray(WIDE[suffix]).save(path)
    found = read_image(ImageFile(path)).astype(int)
    assert found.shape == (4, 6, 3)
    assert np.abs(found - np.round(RAMP * 255)[..., None]).max() <= 1
    with path.open("rb") as file:
        assert (decode_image(file, "it") == found).all()


def test_unsigned_numbers_of_32_bits_have_their_own_range(tmp_path: Path) -> None:
    """Pillow writes signed ones alone: the tag that says so is changed to unsigned, and the bits with it."""
    values = np.uint32(RAMP * (2**32 - 1))
    Image.fromarray(values.view(np.int32)).save(tmp_path / "a.tiff")
    written = (tmp_path / "a.tiff").read_bytes()
    # Tag 339, a SHORT, one of them, of value 2 (signed).
    signed = (339).to_bytes(2, "little") + b"\3\0" + b"\1\0\0\0" + b"\2\0"
    assert written.count(signed) == 1
    (tmp_path / "b.tiff").write_bytes(written.replace(signed, signed[:-2] + b"\1\0"))
    found = read_image(ImageFile(tmp_path / "b.tiff")).astype(int)
    assert np.abs(found - np.round(RAMP * 255)[..., None]).max() <= 1
    with pytest.raises(DataError, match=r"a.tiff: an image of whole numbers below 0 \(the least is -"):
        read_image(ImageFile(tmp_path / "a.tiff"))


def with_tag(written: bytes, tag: int, before: int, after: int) -> bytes:
    """A TIFF of Pillow with another value of a tag, a SHORT of which there is one."""
    entry = tag.to_bytes(2, "little") + b"\3\0" + b"\1\0\0\0"
    assert written.count(entry + before.to_bytes(2, "little")) == 1
    return written.replace(entry + before.to_bytes(2, "little"), entry + after.to_bytes(2, "little"))


@pytest.mark.parametrize("values", [np.uint8(RAMP * 255), np.uint16(RAMP * 65535)], ids=["8 bits", "16 bits"])
def test_pictures_whose_zero_is_white_are_turned_around(tmp_path: Path, values: np.ndarray) -> None:
    """The tag of the photometric interpretation: Pillow heeds it for 8 bits, and not for 16."""
    path = tmp_path / "a.tiff"
    Image.fromarray(values).save(path)
    path.write_bytes(with_tag(path.read_bytes(), 262, 1, 0))
    found = read_image(ImageFile(path)).astype(int)
    assert np.abs(found - np.round(255 - RAMP * 255)[..., None]).max() <= 1


def test_numbers_of_8_bits_with_a_sign_are_no_unsigned_ones(tmp_path: Path) -> None:
    Image.fromarray(np.uint8(np.round(RAMP * 127))).save(tmp_path / "a.tiff")
    Image.fromarray(np.uint8(RAMP * 255)).save(tmp_path / "b.tiff")
    for path in tmp_path.iterdir():
        # Pillow leaves the tag out for unsigned numbers, which are the default: the tag of the planes, 1, stands there.
        path.write_bytes(with_tag(path.read_bytes().replace(PLANES, SIGN), 339, 1, 2))
    found = read_image(ImageFile(tmp_path / "a.tiff")).astype(int)
    assert np.abs(found - np.round(RAMP * 255)[..., None]).max() <= 1
    with pytest.raises(DataError, match=r"b.tiff: an image of whole numbers below 0 \(the least is -"):
        read_image(ImageFile(tmp_path / "b.tiff"))


def test_floating_point_images_are_refused_by_name(tmp_path: Path) -> None:
    Image.fromarray(np.float32(RAMP)).save(tmp_path / "a.tiff")
    with pytest.raises(DataError, match=r"a.tiff: an image of floating-point values \(Pillow's mode F\)"):
        read_image(ImageFile(tmp_path / "a.tiff"))
