"""The records of some files as arrays: tokens, and where their images are. Built once and kept in the index cache."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.datasets.cache import Arrays, IndexCache, combined, file_checksum, index_progress
from mt_data.datasets.images.config import FRAMES_OF_RULES
from mt_data.datasets.images.pixels import ImageFile
from mt_data.datasets.images.records import ImageText, is_shard, place, read_image_texts
from mt_data.datasets.images.sample import EncodedText
from mt_data.datasets.images.text import IMAGE, ImageTextEncoder, ImageTokens
from mt_data.datasets.images.tiles import Grid
from mt_data.datasets.images.videos import VideoSampling, grid_of
from mt_data.datasets.sounds.reading import require_length, sound_length
from mt_data.datasets.sounds.rules import RULES, AudioRule

FORMAT = 7
"""Raised when the same files give other arrays than before."""
# One placeholder for each image: an image has hundreds of features, which would make the cache many times as large.
ENCODED_IMAGE = EncodedText([IMAGE], [False])
MOST_FRAMES = max(FRAMES_OF_RULES.values())
SHOWN = 10
"""Unusable records that are reported one by one."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodedRecords:
    """All usable records of some files, in order.

    positions, images_end, first_label, views int64 [records]: with each image as its features, the input positions of
    a record (its tokens but the last one), where its last image ends, the place of the first token that counts apart
    from the very first (the length of the record when there is none), and the views of its images.
    tokens int32 (IMAGE once for each image), counted bool [all tokens]; bounds int64 [records + 1]; number int64, file
    int32 [records]: the place of each. grid uint16 [images, 2]: rows and columns of tiles; image_bounds int64
    [records + 1]. An image is a file below its record's folder, or a member of its record's shard: name_bounds int64
    [images + 1] into names uint8 (as the file system has them); offset, size int64 [images], of members (size -1: a
    file). Sounds are kept as images are, in sound_bounds, sound_names, sound_name_bounds, sound_offset, sound_size;
    samples int64 [sounds], at 16 kHz.
    frames int32 [images, most frames of a view + 1], of views of videos, with -1 for what is absent (all: an image);
    times int64 [images], see ImageFile.
    unusable int64 [records left out, 2]: file, number. paths: the files; folders: where the images of each begin.
    """

    tokens: NDArray[np.int32]
    counted: NDArray[np.bool_]
    bounds: NDArray[np.int64]
    file: NDArray[np.int32]
    number: NDArray[np.int64]
    image_bounds: NDArray[np.int64]
    grid: NDArray[np.uint16]
    names: NDArray[np.uint8]
    name_bounds: NDArray[np.int64]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    frames: NDArray[np.int32]
    times: NDArray[np.int64]
    sound_bounds: NDArray[np.int64]
    sound_names: NDArray[np.uint8]
    sound_name_bounds: NDArray[np.int64]
    sound_offset: NDArray[np.int64]
    sound_size: NDArray[np.int64]
    samples: NDArray[np.int64]
    positions: NDArray[np.int64]
    images_end: NDArray[np.int64]
    first_label: NDArray[np.int64]
    views: NDArray[np.int64]
    unusable: NDArray[np.int64]
    paths: Sequence[Path]
    folders: Sequence[Path]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def where(self, record: int) -> str:
        return place(self.paths[self.file[record]], int(self.number[record]))

    def text(self, record: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Tokens, and which of them count in the loss."""
        part = slice(self.bounds[record], self.bounds[record + 1])
        return self.tokens[part], self.counted[part]

    def images(self, record: int) -> list[tuple[ImageFile, Grid]]:
        """The images of a record, with the grids that they are cut by."""
        numbers = range(self.image_bounds[record], self.image_bounds[record + 1])
        return [(self._image(number, int(self.file[record])), Grid(*self.grid[number].tolist())) for number in numbers]

    def _image(self, image: int, file: int) -> ImageFile:
        name = self.names[self.name_bounds[image] : self.name_bounds[image + 1]].tobytes()
        if (size := int(self.size[image])) < 0:
            frames = tuple(frame for frame in self.frames[image].tolist() if frame >= 0)
            return ImageFile(self.folders[file] / os.fsdecode(name), frames=frames, time=int(self.times[image]))
        return ImageFile(self.paths[file], os.fsdecode(name), int(self.offset[image]), size)

    def sounds(self, record: int) -> list[tuple[ImageFile, int]]:
        """The sounds of a record, with their samples at 16 kHz."""
        file, numbers = int(self.file[record]), range(self.sound_bounds[record], self.sound_bounds[record + 1])
        return [(self._sound(number, file), int(self.samples[number])) for number in numbers]

    def _sound(self, sound: int, file: int) -> ImageFile:
        part = slice(self.sound_name_bounds[sound], self.sound_name_bounds[sound + 1])
        name = os.fsdecode(self.sound_names[part].tobytes())
        if (size := int(self.sound_size[sound])) < 0:
            return ImageFile(self.folders[file] / name)
        return ImageFile(self.paths[file], name, int(self.sound_offset[sound]), size)

    def expanded(self, record: int, image_tokens: ImageTokens) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The text of a record with the tokens of each image and sound."""
        images = self.images(record)
        times = [file.time for file, _ in images]
        samples = [count for _, count in self.sounds(record)]
        return image_tokens.expand(*self.text(record), [grid for _, grid in images], times, samples)

    def fingerprint(self) -> str:
        """Fingerprint of texts and of the names and places of images, whose pixels are not read for it."""
        digest = sha256()
        # positions, images_end, first_label and views follow from these and the tiling.
        for name in (
            "tokens",
            "counted",
            "bounds",
            "grid",
            "image_bounds",
            "names",
            "name_bounds",
            "offset",
            "size",
            "frames",
            "times",
            "sound_bounds",
            "sound_names",
            "sound_name_bounds",
            "sound_offset",
            "sound_size",
            "samples",
        ):
            digest.update(np.ascontiguousarray(getattr(self, name)).data)
        return combined([digest.hexdigest()])


class UnusableRecords:
    """Records that cannot be used: reported and counted, and at most `limit` of them. found: int64 [n, 2], file and
    number of those that were found before."""

    def __init__(self, limit: int, records: NDArray[np.int64] | None = None) -> None:
        self.limit = limit
        self._lock = Lock()
        # A set: a record that is met again in a later epoch counts once.
        self.found: set[tuple[int, int]] = set()
        if records is not None:
            self.found.update((file, number) for file, number in records.tolist())

    def add(self, file: int, number: int, error: DataError) -> None:
        """Raises DataError when there are more than the limit. The loader's threads may call it at the same time."""
        with self._lock:
            if (file, number) in self.found:
                return
            self.found.add((file, number))
            count = len(self.found)
        if count > self.limit:
            raise DataError(
                f"{error}; correct it, or leave such records out with data.max_unusable_records, which is {self.limit} "
                f"(this is number {count})"
            ) from error
        if count <= SHOWN:
            log.warning("unusable record %d of at most %d: %s", count, self.limit, error)


@dataclass(frozen=True)
class SoundLimits:
    """What a sample can have: sounds, and samples at 16 kHz of all of them."""

    rule: AudioRule
    most_sounds: int
    most_samples: int

    def lengths(self, record: ImageText) -> list[int]:
        """Samples of the sounds of a record. Raises DataError for what is no sound, and for too many or too long
        ones."""
        if len(record.sounds) > self.most_sounds:
            raise DataError(
                f"{record.where} has {len(record.sounds)} sounds, more than the {self.most_sounds} of a sample; set "
                f"data.max_sounds to at least {len(record.sounds)}"
            )
        lengths = [sound_length(file) for file in record.sounds]
        for file, samples in zip(record.sounds, lengths, strict=True):
            require_length(samples, RULES[self.rule], self.most_samples, f"{record.where}: {file}")
        if sum(lengths) > self.most_samples:
            require_length(sum(lengths), RULES[self.rule], self.most_samples, record.where)
        return lengths


def encode_files(
    paths: Sequence[Path],
    folders: Sequence[Path],
    encoder: ImageTextEncoder,
    image_tokens: ImageTokens,
    limit: int,
    sampling: VideoSampling | None = None,
    limits: SoundLimits | None = None,
) -> dict[str, NDArray[Any]]:
    """The arrays of EncodedRecords, and `refused`: JSON, `image_states` of the images of unusable records.

    Raises DataError for more than `limit` unusable records, or no usable one.
    """
    gathered, unusable = _Gathered(image_tokens), UnusableRecords(limit)
    refused: list[str] = []
    with index_progress("records of images and texts", len(paths)) as update:
        for file, (path, folder) in enumerate(zip(paths, folders, strict=True)):
            report = partial(unusable.add, file)
            for record in read_image_texts(path, folder, report, sampling, with_sounds=limits is not None):
                try:
                    # From the head of each file: the grid decides how many tokens an image takes, and no pixels are
                    # decoded here.
                    grids = [grid_of(image, image_tokens.tiling) for image in record.images]
                    samples = [] if limits is None else limits.lengths(record)
                    gathered.add(file, folder, record, encoder(record), grids, samples)
                except DataError as error:
                    unusable.add(file, record.number, error)
                    # JSON lines are hashed, but not the image files: their state is kept, so that a repaired image is
                    # noticed.
                    refused += [os.path.abspath(image.path) for image in (*record.images, *record.sounds)]
            update(file + 1, len(paths))
    if not gathered.places:
        raise DataError(f"{', '.join(map(str, paths))} has no usable record; each must have a text, and its images")
    return gathered.arrays() | {
        "unusable": np.array(sorted(unusable.found), np.int64).reshape(-1, 2),
        "refused": np.frombuffer(json.dumps(image_states(refused)).encode(), np.uint8),
    }


def cached_records(cache: IndexCache, key: Mapping[str, Any], build: Callable[[], Arrays]) -> dict[str, NDArray[Any]]:
    """The arrays of `encode_files` by their `cache_key`; built again when the image of an unusable record changed."""
    # Each round reads the cache under another key, made longer by the states that were found wrong; it ends with an
    # entry whose unusable images are as they were when it was built.
    while True:
        arrays = cache.get(key, build)
        refused = json.loads(arrays.pop("refused").tobytes())
        states = image_states([path for path, *_ in refused])
        if states == refused:
            return arrays
        key = {**key, "refused": [*key.get("refused", []), states]}


def image_states(paths: Sequence[str]) -> list[list[Any]]:
    """[path, size, time of its last change] of each; [path] of one that is missing."""
    return [[path, *_size_and_time(path)] for path in paths]


def _size_and_time(path: str) -> tuple[int, ...]:
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return ()
    return state.st_size, state.st_mtime_ns


def cache_key(paths: Sequence[Path], **content: Any) -> Mapping[str, Any]:
    """Cache key of `encode_files`: content is what else decides the arrays."""
    return {"image_text": FORMAT, "files": [_identity(path) for path in paths], **content}


def _identity(path: Path) -> Any:
    """Name, size and time of a shard: a checksum would read the images."""
    # JSON lines by content, since they are small; images are not part of it.
    if not is_shard(path):
        return [str(path.resolve()), file_checksum(path)]
    state = path.stat()
    return [str(path.resolve()), state.st_size, state.st_mtime_ns]


class _Gathered:
    """Records on their way into flat arrays."""

    def __init__(self, image_tokens: ImageTokens) -> None:
        self.image_tokens = image_tokens
        self.tokens: list[NDArray[np.int32]] = []
        self.counted: list[NDArray[np.bool_]] = []
        self.places: list[tuple[int, int]] = []
        self.images_of: list[int] = []
        self.grids: list[Grid] = []
        self.names: list[bytes] = []
        self.parts: list[tuple[int, int]] = []
        self.frames: list[tuple[int, ...]] = []
        self.times: list[int] = []
        self.sizes: list[tuple[int, int, int, int]] = []
        self.sounds_of: list[int] = []
        self.samples: list[int] = []
        self.sound_names: list[bytes] = []
        self.sound_parts: list[tuple[int, int]] = []

    def add(
        self,
        file: int,
        folder: Path,
        record: ImageText,
        text: EncodedText,
        grids: Sequence[Grid],
        samples: Sequence[int] = (),
    ) -> None:
        """samples: of the record's sounds."""
        self.tokens.append(np.array(text.tokens, np.int32))
        self.counted.append(np.array(text.counted, np.bool_))
        self.places.append((file, record.number))
        self.images_of.append(len(record.images))
        # Computed with the images expanded, and stored, so that `select` needs no expansion of all records.
        times = [image.time for image in record.images]
        self.sizes.append(self._sizes(self.tokens[-1], self.counted[-1], grids, times, samples))
        self.times += times
        self.grids += grids
        for image in record.images:
            self.names.append(_name(image, folder))
            self.parts.append((image.offset, image.size))
            self.frames.append((*image.frames, *[-1] * (MOST_FRAMES + 1 - len(image.frames))))
        self.sounds_of.append(len(samples))
        self.samples += samples
        self.sound_names += [_name(sound, folder) for sound in record.sounds]
        self.sound_parts += [(sound.offset, sound.size) for sound in record.sounds]

    def _sizes(
        self,
        tokens: NDArray[np.int32],
        counted: NDArray[np.bool_],
        grids: Sequence[Grid],
        times: Sequence[int],
        samples: Sequence[int],
    ) -> tuple[int, int, int, int]:
        """positions, images_end, first_label, views"""
        tokens, counted = self.image_tokens.expand(tokens, counted, grids, times, samples)
        # Of images and of sounds.
        images, labels = np.flatnonzero(tokens < 0), np.flatnonzero(counted[1:])
        return (
            len(tokens) - 1,
            int(images[-1]) + 1 if len(images) else 0,
            int(labels[0]) + 1 if len(labels) else len(tokens),
            sum(map(self.image_tokens.tiling.num_views, grids)),
        )

    def arrays(self) -> dict[str, NDArray[Any]]:
        positions, images_end, first_label, views = np.array(self.sizes, np.int64).T
        file, number = np.array(self.places, np.int64).T
        offset, size = np.array(self.parts, np.int64).reshape(-1, 2).T
        sound_offset, sound_size = np.array(self.sound_parts, np.int64).reshape(-1, 2).T
        return {
            "sound_bounds": bounds_of(self.sounds_of),
            "sound_names": np.frombuffer(b"".join(self.sound_names), np.uint8),
            "sound_name_bounds": bounds_of(map(len, self.sound_names)),
            "sound_offset": sound_offset.copy(),
            "sound_size": sound_size.copy(),
            "samples": np.array(self.samples, np.int64),
            "tokens": np.concatenate(self.tokens),
            "counted": np.concatenate(self.counted),
            "bounds": bounds_of(map(len, self.tokens)),
            "file": file.astype(np.int32),
            "number": number.copy(),
            "image_bounds": bounds_of(self.images_of),
            "grid": np.array(self.grids, np.uint16).reshape(-1, 2),
            "names": np.frombuffer(b"".join(self.names), np.uint8),
            "name_bounds": bounds_of(map(len, self.names)),
            "positions": positions.copy(),
            "images_end": images_end.copy(),
            "first_label": first_label.copy(),
            "views": views.copy(),
            "offset": offset.copy(),
            "size": size.copy(),
            "frames": np.array(self.frames, np.int32).reshape(-1, MOST_FRAMES + 1),
            "times": np.array(self.times, np.int64),
        }


def _name(file: ImageFile, folder: Path) -> bytes:
    """Name of a member of a shard, or path from the folder."""
    return os.fsencode(file.member or os.path.relpath(file.path, folder))


def bounds_of(lengths: Iterable[int]) -> NDArray[np.int64]:
    """[n] -> [n + 1]: where each part begins, and the end."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.fromiter(lengths, np.int64))])
