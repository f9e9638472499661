"""WAV files (RIFF): their rate and length from the head, their samples as fp32 between -1 and 1.

Samples are whole numbers of 8, 16, 24 or 32 bits, or floating-point numbers of 32 or 64 bits. The head is read here and
not by the standard library's `wave`, which knows whole numbers alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError

SUFFIXES = frozenset({".wav", ".wave"})
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
"""Formats of samples. An extensible one says its format in a longer head."""
OTHER_FORMATS = {2: "ADPCM", 6: "A-law", 7: "mu-law", 17: "IMA ADPCM", 85: "MP3"}
UNKNOWN_SIZE = (0, 0xFFFFFFFF)
"""Sizes of samples that programs write which do not know it yet."""
ENCODINGS = {
    (PCM, 8): ("u1", 128.0),
    (PCM, 16): ("<i2", 2.0**15),
    (PCM, 24): ("u1", 2.0**31),
    (PCM, 32): ("<i4", 2.0**31),
    (FLOAT, 32): ("<f4", 1.0),
    (FLOAT, 64): ("<f8", 1.0),
}
"""NumPy's type of a number, or of its bytes, and the number that is 1."""
MAX_CHANNELS, LOWEST_RATE, HIGHEST_RATE = 64, 1000, 768_000


class StoredFile(Protocol):
    """A file, or a member of an archive whose bytes begin at `offset` and are `size`; str() names it in messages."""

    @property
    def member(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def size(self) -> int: ...
    def open(self) -> BinaryIO: ...


@dataclass(frozen=True)
class WavHead:
    """rate: samples a second. frames: samples of each channel. encoding: a key of ENCODINGS. begin: where the samples
    begin, in bytes from the beginning of the sound."""

    rate: int
    channels: int
    frames: int
    encoding: tuple[int, int]
    begin: int

    @property
    def frame_bytes(self) -> int:
        return self.channels * self.encoding[1] // 8


def wav_head(file: StoredFile) -> WavHead:
    """Raises DataError for what is no WAV file, has a format that is not read, no sample, or ends too early."""
    with _opened(file) as (stream, size):
        return _head_of(stream, size, str(file))


def read_wav(file: StoredFile) -> tuple[NDArray[np.float32], int]:
    """The mean of the channels, fp32 [samples], and samples a second. Raises DataError as `wav_head` does, and for
    samples that are no numbers."""
    with _opened(file) as (stream, size):
        return decode_wav(stream, size, str(file))


def decode_wav(stream: BinaryIO, size: int, name: str) -> tuple[NDArray[np.float32], int]:
    """Same as `read_wav`, of the next `size` bytes of a stream. name: for messages."""
    start = stream.tell()
    head = _head_of(stream, size, name)
    stream.seek(start + head.begin)
    data = stream.read(head.frames * head.frame_bytes)
    samples = _decoded(data, head).reshape(-1, head.channels).mean(1, dtype=np.float64).astype(np.float32)
    if not np.isfinite(samples).all():
        raise DataError(f"{name} has samples that are no numbers (NaN or infinite)")
    return samples, head.rate


@contextmanager
def _opened(file: StoredFile) -> Iterator[tuple[BinaryIO, int]]:
    """A stream at the beginning of the sound, and its bytes."""
    with file.open() as stream:
        size = file.size if file.member else stream.seek(0, 2)
        stream.seek(file.offset)
        yield stream, size


def _decoded(data: bytes, head: WavHead) -> NDArray[np.floating]:
    kind, full_scale = ENCODINGS[head.encoding]
    numbers = np.frombuffer(data, kind)
    if head.encoding == (PCM, 8):
        return (numbers.astype(np.float32) - 128.0) / np.float32(full_scale)
    if head.encoding == (PCM, 24):
        # Three bytes behind a zero: the number times 256.
        words = np.zeros((len(numbers) // 3, 4), np.uint8)
        words[:, 1:] = numbers.reshape(-1, 3)
        numbers = words.reshape(-1).view("<i4")
    return numbers.astype(np.float64) / full_scale


def _head_of(stream: BinaryIO, size: int, name: str) -> WavHead:
    begin = stream.read(12)
    if begin[:4] != b"RIFF" or begin[8:12] != b"WAVE":
        raise DataError(f"{name} is no WAV file; sound is read from WAV files (RIFF) alone, convert it to one")
    encoding = None
    for kind, length, place in _chunks(stream, size):
        if kind == b"fmt ":
            encoding = _encoding(stream.read(min(length, 40)), name)
        elif kind == b"data":
            if encoding is None:
                raise DataError(f"{name} has samples before their format; it is damaged")
            return _checked(*encoding, length, place, size, name)
    raise DataError(f"{name} has no samples (no chunk data); it is damaged or cut short")


def _chunks(stream: BinaryIO, size: int) -> Iterator[tuple[bytes, int, int]]:
    """Name, length and place of each, in bytes from the beginning of the sound."""
    start, place = stream.tell() - 12, 12
    while place + 8 <= size:
        stream.seek(start + place)
        kind, length = struct.unpack("<4sI", stream.read(8))
        yield kind, length, place + 8
        # Chunks begin at even places.
        place += 8 + length + length % 2


def _encoding(head: bytes, name: str) -> tuple[tuple[int, int], int, int]:
    """Encoding, channels and rate."""
    if len(head) < 16:
        raise DataError(f"{name} has a format of {len(head)} bytes; it is damaged")
    kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", head[:16])
    if kind == EXTENSIBLE and len(head) >= 26:
        (kind,) = struct.unpack("<H", head[24:26])
    if (kind, bits) not in ENCODINGS:
        raise DataError(
            f"{name} has samples of the format {OTHER_FORMATS.get(kind, kind)} with {bits} bits; whole numbers of 8, "
            "16, 24 or 32 bits and floating-point numbers of 32 or 64 bits are read"
        )
    if not 1 <= channels <= MAX_CHANNELS or not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise DataError(
            f"{name} has {channels} channels and {rate} samples a second; 1 to {MAX_CHANNELS} channels and "
            f"{LOWEST_RATE} to {HIGHEST_RATE} samples a second are read"
        )
    return (kind, bits), channels, rate


def _checked(
    encoding: tuple[int, int], channels: int, rate: int, length: int, place: int, size: int, name: str
) -> WavHead:
    rest = size - place
    length = rest if length in UNKNOWN_SIZE else length
    if length > rest:
        raise DataError(f"{name} has {rest} of its {length} bytes of samples; it is cut short")
    frames = length // (channels * encoding[1] // 8)
    if not frames:
        raise DataError(f"{name} has no sample; it is empty")
    return WavHead(rate, channels, frames, encoding, place)
