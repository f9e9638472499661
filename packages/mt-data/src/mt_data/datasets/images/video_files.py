"""Video files (MP4, MOV, WebM, MKV), decoded by PyAV (the extra `video`): their frames by number, rate and size.

Frames are numbered in the order in which they are shown. The container is chosen by the first bytes of the file and
never guessed by FFmpeg, some of whose formats are lists of further files or addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

MATROSKA = bytes.fromhex("1a45dfa3")
QUARTER_TURN = 90


@dataclass(frozen=True)
class VideoFile:
    """times: of each frame, in units of the stream, in order. fps: frames of a second, None if the file does not say
    it. height, width: of a frame as it is shown."""

    times: tuple[int, ...]
    fps: float | None
    height: int
    width: int


def container_of(path: Path) -> str | None:
    """FFmpeg's name of the container; None for a file of another kind, or none."""
    try:
        with path.open("rb") as file:
            head = file.read(12)
    except (OSError, ValueError):
        return None
    if head[4:8] == b"ftyp":
        return "mov"
    return "matroska" if head.startswith(MATROSKA) else None


def video_file(path: Path) -> VideoFile:
    """From the packets of the file, of which the first frame alone is decoded. Raises DataError for a file that cannot
    be read, and without PyAV."""
    state = path.stat()
    # Several views are read of each video: its packets are listed once.
    return _video_file(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=64)
def _video_file(path: Path, size: int, changed: int) -> VideoFile:
    with _opened(path) as (container, stream):
        packets = list(container.demux(stream))
        times = sorted(packet.pts for packet in packets if packet.pts is not None and not packet.is_discard)
        if not times:
            raise DataError(f"{path} has no frames")
        rate = stream.average_rate
    with _opened(path) as (container, stream):
        first = _upright(next(iter(container.decode(stream))))
    return VideoFile(tuple(times), None if rate is None else float(rate), *first.shape[:2])


def read_frames(path: Path, numbers: Sequence[int]) -> list[NDArray[np.uint8]]:
    """uint8 [height, width, 3] of these frames, whose numbers do not fall. Raises DataError for a file that cannot be
    read, and without PyAV."""
    times = [video_file(path).times[number] for number in numbers]
    with _opened(path) as (container, stream):
        # To the last frame at or before it that needs no others.
        container.seek(times[0], stream=stream)
        frames = dict.fromkeys(times)
        for frame in container.decode(stream):
            if frame.pts in frames:
                frames[frame.pts] = _upright(frame)
            if all(array is not None for array in frames.values()):
                break
    if missing := [number for number, time in zip(numbers, times, strict=True) if frames[time] is None]:
        raise DataError(f"{path} cannot be decoded at frame {missing[0]}")
    return [array for time in times if (array := frames[time]) is not None]


def _upright(frame: Any) -> NDArray[np.uint8]:
    """Pixels as the frame is shown: phones note beside it how it is turned."""
    pixels: NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
    # Degrees against the clock.
    return np.ascontiguousarray(np.rot90(pixels, frame.rotation // QUARTER_TURN)) if frame.rotation else pixels


@contextmanager
def _opened(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The container, and its first video stream. Raises DataError for what cannot be read, also while it is used."""
    try:
        import av
    except ImportError as error:
        raise DataError(
            f"{path}: video files are decoded by PyAV, which is not installed (pip install 'mt-data[video]'); folders "
            "of frames and animated images need Pillow alone"
        ) from error
    try:
        with av.open(str(path), format=container_of(path), options={"protocol_whitelist": "file"}) as container:
            if not container.streams.video:
                raise DataError(f"{path} has no video stream")
            yield container, container.streams.video[0]
    except (av.error.FFmpegError, StopIteration, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a video: {error}") from error
