"""From an image file to the array that a model takes.

Images are decoded by Pillow (the extra `images`), or read from `.npy` files of uint8 [height, width, 3]. All else is
NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.datasets.images.config import ImageDataConfig, Resample, Resize
from mt_data.datasets.images.image_file import ImageFile
from mt_data.datasets.images.resampling import Taps

if TYPE_CHECKING:
    from PIL.Image import Image

ORIENTATION = 0x0112
"""Exif's tag."""
BITS_PER_SAMPLE, SAMPLE_FORMAT, SIGNED = 258, 339, 2
"""TIFF's tags, and its value for signed whole numbers."""
TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Exif's orientations, and Pillow's names of what undoes them. From 5 on they exchange height and width."""
QUARTER_TURNS = (5, 6, 7, 8)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Those of Pillow that are read. It decodes some others with programs of their own, such as EPS with Ghostscript."""
MAX_PROPORTION = 200
"""Of the longer side of an image to the shorter one."""


def read_image(file: ImageFile) -> NDArray[np.uint8]:
    """uint8 [height, width, 3]. Raises DataError for a file that is no image, or one that needs Pillow without it."""
    if file.suffix == ".npy":
        return _array_of(file)
    with _opened(file) as image:
        return _upright(image, str(file))


def image_size(file: ImageFile) -> tuple[int, int]:
    """Height and width in pixels, from the head of the file. Raises as `read_image` does, where the head is damaged."""
    if file.suffix == ".npy":
        height, width, _ = _array_of(file).shape
        return height, width
    with _opened(file) as image:
        is_turned = _orientation(image) in QUARTER_TURNS
        return (image.width, image.height) if is_turned else (image.height, image.width)


def _array_of(file: ImageFile) -> NDArray[np.uint8]:
    try:
        array = np.load(BytesIO(file.read()), allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:
        raise DataError(f"{file} cannot be read as an array: {error}") from error
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise DataError(
            f"{file} holds {array.dtype} {list(array.shape)}; an image is uint8 [height, width, 3], red, green, blue"
        )
    _require_proportions(array.shape[0], array.shape[1], str(file))
    return array


def decode_image(
    source: Path | BinaryIO, name: str, formats: tuple[str, ...] = FORMATS, max_pixels: int | None = None
) -> NDArray[np.uint8]:
    """uint8 [height, width, 3]. name: of the source, for errors. formats: those of Pillow that are read.

    Raises DataError for what is no image of these formats or has more pixels, and without Pillow.
    """
    with _decoded(source, name, formats) as image:
        if max_pixels is not None and image.width * image.height > max_pixels:
            raise DataError(f"{name} has {image.width} x {image.height} pixels, more than the {max_pixels} allowed")
        return _upright(image, name)


def _upright(image: Image, name: str) -> NDArray[np.uint8]:
    """Pixels in the orientation in which the image is shown: cameras and phones note it beside the pixels (Exif)."""
    from PIL.Image import Transpose

    turn = TURNS.get(_orientation(image))
    # Palettes, grey, CMYK and alpha become three channels; an alpha channel is dropped, not blended.
    image = _eight_bits(image, name).convert("RGB")
    return np.asarray(image if turn is None else image.transpose(Transpose[turn]))


def _eight_bits(image: Image, name: str) -> Image:
    """Of whole numbers of 16 or 32 bits the range of their type as 0 to 255; Pillow would clip them at 255.

    Raises DataError for floating-point values, whose range nothing states, and for negative ones.
    """
    from PIL.Image import fromarray

    if image.mode == "F":
        raise DataError(
            f"{name}: an image of floating-point values (Pillow's mode F) has no fixed range; save it in 8 bits"
        )
    if image.mode != "I" and not image.mode.startswith("I;"):
        return image
    bits, is_signed = _sample_type(image)
    values = np.asarray(image)
    if bits == 32 and not is_signed:
        values = values.astype(np.int32).view(np.uint32)  # Pillow keeps the bits in a signed type
    if values.min() < 0:
        raise DataError(f"{name}: an image of whole numbers below 0 (the least is {values.min()}); save it in 8 bits")
    largest = 2 ** (bits - is_signed) - 1
    return fromarray(((values.astype(np.int64) * 255 + largest // 2) // largest).astype(np.uint8))


def _sample_type(image: Image) -> tuple[int, bool]:
    """Bits of a value, and whether it has a sign."""
    if image.format != "TIFF":  # PNG and PPM: Pillow scales them to 16 bits
        return 16, False
    tags: Any = image.tag_v2  # type: ignore[attr-defined]
    return int(tags.get(BITS_PER_SAMPLE, (1,))[0]), tags.get(SAMPLE_FORMAT, (1,))[0] == SIGNED


def _orientation(image: Image) -> int:
    """From the head of the file, so that no pixels are decoded for it; 1, as stored, where Exif cannot be read."""
    import PIL.Image

    if image.format == "TIFF":  # Pillow turns its pixels itself, and gives the size that they have then
        return 1
    try:
        # A PNG's own getexif decodes all pixels to find Exif data behind them.
        return int(PIL.Image.Image.getexif(image).get(ORIENTATION, 1))
    except Exception:  # the parsers of damaged Exif data raise errors of many kinds
        return 1


@contextmanager
def _opened(file: ImageFile) -> Iterator[Image]:
    _require_pillow(str(file))
    with file.open() as whole:
        part = _member(whole, file) if file.member else whole
        # Opening reads the head; pixels are decoded when they are first used.
        with _decoded(part, str(file)) as image:
            yield image


def _member(archive: BinaryIO, file: ImageFile) -> Any:
    from PIL.ContainerIO import ContainerIO

    # A part of the archive as a file of its own, read in place.
    return ContainerIO(archive, file.offset, file.size)


@contextmanager
def _decoded(source: Any, name: str, formats: tuple[str, ...] = FORMATS) -> Iterator[Image]:
    """A Pillow image of a path or an open file. Raises DataError for what is no image, also while it is used."""
    _require_pillow(name)
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(source, formats=formats) as image:
            _require_proportions(image.height, image.width, name)
            yield image
    # Raised by the body of the caller's `with`, or above: the clause for all exceptions must not wrap it again.
    except DataError:
        raise
    except UnidentifiedImageError:
        raise DataError(f"{name} cannot be read as an image: {', '.join(formats)} are read, and it is none") from None
    except Exception as error:  # decoders of damaged files raise errors of many kinds
        raise DataError(f"{name} cannot be read as an image: {error}") from error


def _require_proportions(height: int, width: int, name: str) -> None:
    if max(height, width) > MAX_PROPORTION * min(height, width):
        raise DataError(
            f"{name}: an image of {height} x {width} pixels is more than {MAX_PROPORTION} times as long as it is wide; "
            "cut it into parts"
        )


def _require_pillow(name: str) -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"{name}: image files are decoded by Pillow, which is not installed (pip install 'mt-data[images]'); "
            ".npy files of uint8 [height, width, 3] need nothing"
        ) from error


def fit(
    image: NDArray[np.uint8], height: int, width: int, how: Resize, resample: Resample = "bicubic"
) -> NDArray[np.uint8]:
    """An image of any size, resized to the requested one: uint8 [height, width, 3].

    crop: the largest part in the middle with the requested proportions is taken. squash: all of it, proportions change.
    """
    if how == "squash":
        return resize(image, height, width, resample)
    # The image is scaled so that it just covers the requested size, and the rest is cut off evenly. Only the pixels of
    # the part are computed.
    scale = max(height / image.shape[0], width / image.shape[1])
    larger = (max(height, round(image.shape[0] * scale)), max(width, round(image.shape[1] * scale)))
    top, left = (larger[0] - height) // 2, (larger[1] - width) // 2
    return _resized_part(image, larger, range(top, top + height), range(left, left + width), resample)


def resize(image: NDArray[np.uint8], height: int, width: int, resample: Resample = "bicubic") -> NDArray[np.uint8]:
    """uint8 [h, w, 3] -> uint8 [height, width, 3], equal to Pillow's."""
    return _resized_part(image, (height, width), range(height), range(width), resample)


def _resized_part(
    image: NDArray[np.uint8], size: tuple[int, int], rows: range, columns: range, resample: Resample
) -> NDArray[np.uint8]:
    """These rows and columns of an image that becomes `size`. Width first, and whole values between, as in Pillow."""
    if image.shape[:2] == size:
        return image[rows.start : rows.stop, columns.start : columns.stop]
    down = Taps.of(image.shape[0], size[0], rows, resample)
    across = Taps.of(image.shape[1], size[1], columns, resample)
    # [used rows, columns, 3] after the horizontal pass, rounded to uint8 as in Pillow, then [rows, columns, 3].
    narrow = across.apply(image[down.used, across.used].swapaxes(0, 1)).swapaxes(0, 1)
    return down.apply(narrow)


def as_input(image: NDArray[np.uint8], config: ImageDataConfig) -> NDArray[np.float32]:
    """uint8 [img_h, img_w, 3] -> what the model takes, float32 [3, img_h, img_w]."""
    mean, std = np.array(config.image_mean, np.float32), np.array(config.image_std, np.float32)
    # mean, std [3] act on the last axis, before it becomes the first: [h, w, 3] -> [3, h, w].
    return np.ascontiguousarray(((image.astype(np.float32) / 255 - mean) / std).transpose(2, 0, 1))
