"""From an image file to the array that a model takes.

Images are decoded by Pillow (the extra `images`), or read from `.npy` files of uint8 [height, width, 3]. All else is
NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.datasets.images.config import ImageDataConfig, Resample, Resize

if TYPE_CHECKING:
    from PIL.Image import Image


# -- image files: a file, or a member of a tar archive -----------------------------------------------

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".npy"})


@dataclass(frozen=True)
class ImageFile:
    """path: the file. member: name within the archive `path`, whose bytes begin at `offset`; empty for a file. frames:
    of a view of the video `path`, the numbers of its frames, and then how many are taken of the whole video.
    time: of a view, the third number of its grid, which means what data.video_rule says."""

    path: Path
    member: str = ""
    offset: int = 0
    size: int = -1
    frames: tuple[int, ...] = ()
    time: int = 0

    @property
    def suffix(self) -> str:
        """Lower case, with its dot."""
        return Path(self.member or self.path.name).suffix.lower()

    def __str__(self) -> str:
        if self.frames:
            return f"{self.path}, frames {', '.join(map(str, self.frames[:-1]))}"
        return f"{self.path}, member {self.member}" if self.member else str(self.path)

    def open(self) -> BinaryIO:
        """The whole of `path`. Raises DataError for a file that is missing or cannot be opened, and for a path that no
        file can have."""
        try:
            return self.path.open("rb")
        except OSError as error:
            raise DataError(f"{self} cannot be read: {error.strerror or error}") from error
        except ValueError as error:  # a null character, or a surrogate that no byte stands for
            raise DataError(f"{str(self)!a} cannot be the path of a file: {error}") from error

    def read(self) -> bytes:
        """Raises DataError for a file that cannot be read, or ends before the member does."""
        with self.open() as file:
            try:
                file.seek(self.offset)
                data = file.read(self.size)
            except OSError as error:
                raise DataError(f"{self} cannot be read: {error.strerror or error}") from error
        if self.member and len(data) != self.size:
            raise DataError(f"{self} has {len(data)} of its {self.size} bytes; the archive is cut short")
        return data


ORIENTATION = 0x0112
"""Exif's tag."""
BITS_PER_SAMPLE, PHOTOMETRIC, SAMPLE_FORMAT = 258, 262, 339
"""TIFF's tags."""
WHITE_IS_ZERO, SIGNED = 0, 2
"""Values of TIFF's photometric interpretation, and of its sample format for signed whole numbers."""
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
"""Largest ratio of the longer side of an image to the shorter one."""


def read_image(file: ImageFile) -> NDArray[np.uint8]:
    """uint8 [height, width, 3]. Raises DataError for a file that is no image, or one that needs Pillow without it."""
    if file.suffix == ".npy":
        return _array_of(file)
    with _opened(file) as image:
        if file.frames:
            image.seek(file.frames[0])
        return _upright(image, str(file))


def animation_frames(file: ImageFile) -> tuple[int, float | None]:
    """The number of frames of an animated file, and how many are shown in a second if it says so. Raises DataError for
    a file that cannot be read."""
    with _opened(file) as image:
        count = int(getattr(image, "n_frames", 1))
        # Milliseconds of the first frame, which WebP says when it is decoded.
        if count > 1:
            image.load()
        duration = image.info.get("duration")
        return count, 1000 / duration if duration else None


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
        array = np.lib.format.read_array(BytesIO(file.read()), allow_pickle=False)
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
    """Map integers of 16 or 32 bits, and those with a sign, from the range of their type to 0 to 255; Pillow would clip
    them at 255.

    Raises DataError for floating-point values, whose range nothing states, and for negative ones.
    """
    from PIL.Image import fromarray

    if image.mode == "F":
        raise DataError(
            f"{name}: an image of floating-point values (Pillow's mode F) has no fixed range; save it in 8 bits"
        )
    bits, is_signed = _sample_type(image)
    is_signed_byte = bits == 8 and is_signed
    if image.mode != "I" and not image.mode.startswith("I;") and not is_signed_byte:
        return image
    values = np.asarray(image)
    if is_signed_byte:
        values = values.view(np.int8)  # Pillow takes the bits for unsigned ones
    if bits == 32 and not is_signed:
        values = values.astype(np.int32).view(np.uint32)  # Pillow keeps the bits in a signed type
    if values.min() < 0:
        raise DataError(f"{name}: an image of whole numbers below 0 (the least is {values.min()}); save it in 8 bits")
    largest = 2 ** (bits - is_signed) - 1
    eight = (values.astype(np.int64) * 255 + largest // 2) // largest
    # Pillow turns values of up to 8 bits around itself.
    is_negative = bits > 8 and _tag(image, PHOTOMETRIC, 1) == WHITE_IS_ZERO
    return fromarray((255 - eight if is_negative else eight).astype(np.uint8))


def _sample_type(image: Image) -> tuple[int, bool]:
    """Bits of a value, and whether it has a sign."""
    if image.format != "TIFF":  # PNG and PPM: Pillow scales those of more than 8 bits to 16
        return 16, False
    return _tag(image, BITS_PER_SAMPLE, 1), _tag(image, SAMPLE_FORMAT, 1) == SIGNED


def _tag(image: Image, tag: int, default: int) -> int:
    """A TIFF's number, or the first of several; the default where it is absent, and for other formats."""
    value = getattr(image, "tag_v2", {}).get(tag, default)
    return int(value[0] if isinstance(value, tuple) else value)


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


# -- resize filters and their weights, equal to Pillow's to the last bit -----------------------------
#
# A filter is stretched over the pixels that become one (antialiasing). Time and memory are linear in the pixels.

Filter = Callable[[NDArray[np.float64]], NDArray[np.float64]]
BLOCK = 16
"""New rows that are computed by one product of matrices."""
UNIT = 2.0**-22
"""Pillow's weights are whole multiples of it. Sums of products of those and bytes are exact in float64."""


@dataclass(frozen=True)
class Taps:
    """The old pixels within the radius of each new one. first, end int64 [new]: they are old[first:end]. weights
    float64 [new, most taps]: how much of each, 0 behind the end; rows sum to 1."""

    first: NDArray[np.int64]
    end: NDArray[np.int64]
    weights: NDArray[np.float64]

    @classmethod
    def of(cls, old: int, new: int, within: range, resample: Resample) -> Taps:
        """Taps of the new pixels `within`, when `old` pixels become `new`."""
        radius, kernel = FILTERS[resample]
        scale = old / new
        stretch = max(scale, 1.0)
        # Where the centre of each new pixel lies among the old ones, [new].
        centres = (np.arange(within.start, within.stop) + 0.5) * scale
        # Pillow: xmin = (int)(center - support + 0.5), xmax = (int)(center + support + 0.5), cut to the image.
        first = np.maximum(np.trunc(centres - radius * stretch + 0.5), 0).astype(np.int64)
        end = np.minimum(np.trunc(centres + radius * stretch + 0.5), old).astype(np.int64)
        # [new, most taps]
        places = first[:, None] + np.arange((end - first).max())
        # A product with the reciprocal, as in Pillow: a division rounds differently in the last bit.
        distance = (places + 0.5 - centres[:, None]) * (1 / stretch)
        weights = np.where(places < end[:, None], kernel(distance), 0.0)
        weights /= weights.sum(1, keepdims=True)
        # Rounded half away from zero, as (int)(0.5 + w * (1 << PRECISION_BITS)) for positive weights in Pillow.
        return cls(first, end, np.trunc(weights / UNIT + np.copysign(0.5, weights)) * UNIT)

    @property
    def used(self) -> slice:
        """The old pixels that have a weight."""
        return slice(int(self.first[0]), int(self.end[-1]))

    def apply(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The rows `used` of an image [used, w, 3] -> its new rows [new, w, 3], rounded."""
        # [used, w * 3]: all columns and colours are resampled alike.
        rows = image.reshape(len(image), -1)
        resampled = np.empty((len(self.first), rows.shape[1]), np.uint8)
        for start in range(0, len(resampled), BLOCK):
            first, table = self._table(slice(start, start + BLOCK))
            # [block, taps] @ [taps, w * 3]; a block of neighbouring rows shares most of its taps.
            values = table @ rows[first : first + table.shape[1]].astype(np.float64)
            # clip, then the assignment to uint8 cuts off the fraction: together a rounding.
            values += 0.5
            resampled[start : start + BLOCK] = values.clip(0, 255, out=values)
        return resampled.reshape(-1, *image.shape[1:])

    def _table(self, block: slice) -> tuple[int, NDArray[np.float64]]:
        """The first of the rows `used` that a block of new ones takes, and the weights [block, rows from there on]."""
        first, end, weights = self.first[block], self.end[block], self.weights[block]
        table = np.zeros((len(first), int(end[-1] - first[0])))
        # Weights start at each row's own first tap; in the table all rows count from the block's first tap.
        places = first[:, None] - first[0] + np.arange(weights.shape[1])
        rows, taps = np.nonzero(places < (end - first[0])[:, None])
        table[rows, places[rows, taps]] = weights[rows, taps]
        return int(first[0] - self.first[0]), table


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
