"""From an image file to the array that a model takes.

Images are decoded by Pillow (the extra `images`), or read from `.npy` files of uint8 [height, width, 3]. All else is
NumPy: the sizes are changed by a filter that is stretched over the pixels that fall together, which is what Pillow and
torchvision call bicubic (the cubic filter, a = -0.5) and Lanczos with antialiasing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.datasets.images.config import ImageDataConfig, Resample, Resize
from mt_data.datasets.images.image_file import ImageFile

if TYPE_CHECKING:
    from PIL.Image import Image

ORIENTATION = 0x0112
"""Exif's tag."""
QUARTER_TURNS = (5, 6, 7, 8)
"""Orientations that exchange height and width."""
Filter = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def read_image(file: ImageFile) -> NDArray[np.uint8]:
    """uint8 [height, width, 3]. Raises DataError for a file that is no image, or one that needs Pillow without it."""
    if file.suffix == ".npy":
        return _array_of(file)
    with _opened(file) as image:
        return _upright(image)


def image_size(file: ImageFile) -> tuple[int, int]:
    """Height and width in pixels, from the head of the file. Raises as `read_image` does, where the head is damaged."""
    if file.suffix == ".npy":
        height, width, _ = _array_of(file).shape
        return height, width
    with _opened(file) as image:
        is_turned = image.getexif().get(ORIENTATION, 1) in QUARTER_TURNS
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
    return array


def decode_image(
    source: Path | BinaryIO, name: str, formats: tuple[str, ...] | None = None, max_pixels: int | None = None
) -> NDArray[np.uint8]:
    """uint8 [height, width, 3]. name: of the source, for errors. formats: those of Pillow that are read; None: all.

    Raises DataError for what is no image of these formats or has more pixels, and without Pillow.
    """
    with _decoded(source, name, formats) as image:
        if max_pixels is not None and image.width * image.height > max_pixels:
            raise DataError(f"{name} has {image.width} x {image.height} pixels, more than the {max_pixels} allowed")
        return _upright(image)


def _upright(image: Image) -> NDArray[np.uint8]:
    """Pixels in the orientation in which the image is shown: cameras and phones note it beside the pixels (Exif)."""
    from PIL import ImageOps

    return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


@contextmanager
def _opened(file: ImageFile) -> Iterator[Image]:
    _require_pillow(str(file))
    with file.open() as whole:
        part = _member(whole, file) if file.member else whole
        with _decoded(part, str(file)) as image:
            yield image


def _member(archive: BinaryIO, file: ImageFile) -> Any:
    from PIL.ContainerIO import ContainerIO

    return ContainerIO(archive, file.offset, file.size)


@contextmanager
def _decoded(source: Any, name: str, formats: tuple[str, ...] | None = None) -> Iterator[Image]:
    """A Pillow image of a path or an open file. Raises DataError for what is no image, also while it is used."""
    _require_pillow(name)
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(source, formats=formats) as image:
            yield image
    except UnidentifiedImageError:
        raise DataError(f"{name} cannot be read as an image: {', '.join(formats or ['no format'])} fits it") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{name} cannot be read as an image: {error}") from error


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
    """An image of any size in the wanted one, uint8 [height, width, 3].

    crop: the largest part in the middle with the wanted proportions is taken. squash: all of it, proportions change.
    """
    if how == "crop":
        scale = max(height / image.shape[0], width / image.shape[1])
        larger = (max(height, round(image.shape[0] * scale)), max(width, round(image.shape[1] * scale)))
        image = resize(image, *larger, resample)
        top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
        return image[top : top + height, left : left + width]
    return resize(image, height, width, resample)


def resize(image: NDArray[np.uint8], height: int, width: int, resample: Resample = "bicubic") -> NDArray[np.uint8]:
    """uint8 [h, w, 3] -> uint8 [height, width, 3]. Whole values after each of width and height, as in Pillow."""
    if image.shape[:2] == (height, width):
        return image
    across, down = weights(image.shape[1], width, resample), weights(image.shape[0], height, resample)
    wide = as_bytes(np.einsum("xw,hwc->hxc", across, image.astype(np.float32), optimize=True))
    return as_bytes(np.einsum("yh,hxc->yxc", down, wide.astype(np.float32), optimize=True))


def as_bytes(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.rint(values).clip(0, 255).astype(np.uint8)


@lru_cache(maxsize=64)
def weights(old: int, new: int, resample: Resample) -> NDArray[np.float32]:
    """[new, old]: how much of each old pixel is in each new one; rows sum to 1."""
    radius, kernel = FILTERS[resample]
    scale = old / new
    stretch = max(scale, 1.0)
    centres = (np.arange(new) + 0.5) * scale
    distance = (np.arange(old)[None] + 0.5 - centres[:, None]) / stretch
    # Pillow's filter ends at whole pixels.
    first = np.maximum(np.trunc(centres - radius * stretch + 0.5), 0)[:, None]
    last = np.minimum(np.trunc(centres + radius * stretch + 0.5), old)[:, None]
    within = (np.arange(old)[None] >= first) & (np.arange(old)[None] < last)
    table = np.where(within, kernel(distance), 0.0)
    return (table / table.sum(1, keepdims=True)).astype(np.float32)


def cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The cubic convolution filter with a = -0.5 (Keys, 1981)."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = -0.5 * (((x - 5) * x + 8) * x - 4)
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def lanczos(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The windowed sinc with three lobes on each side (Lanczos, 1956; Duchon, 1979)."""
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


FILTERS: dict[Resample, tuple[float, Filter]] = {"bicubic": (2.0, cubic), "lanczos": (3.0, lanczos)}
"""Radius in pixels, and the weight of a pixel at a distance."""


def as_input(image: NDArray[np.uint8], config: ImageDataConfig) -> NDArray[np.float32]:
    """uint8 [img_h, img_w, 3] -> what the model takes, float32 [3, img_h, img_w]."""
    mean, std = np.array(config.image_mean, np.float32), np.array(config.image_std, np.float32)
    return np.ascontiguousarray(((image.astype(np.float32) / 255 - mean) / std).transpose(2, 0, 1))
