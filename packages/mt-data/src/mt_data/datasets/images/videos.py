"""Videos as frames with their times: folders of image files, animated files that Pillow reads, and video files.

A video becomes views of two frames each, behind texts with the seconds at which they are shown, as Qwen3-VL has them:
"<0.3 seconds>" and the view, "<0.8 seconds>" and the view, ... (Bai et al., *Qwen3-VL Technical Report*, 2025).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.datasets.images.config import ImageTextKeys, VideoRule
from mt_data.datasets.images.pixels import (
    SUFFIXES,
    ImageFile,
    animation_frames,
    as_input,
    image_size,
    read_image,
)
from mt_data.datasets.images.tiles import DynamicResolution, Grid, Tiling
from mt_data.datasets.images.video_files import container_of, read_frames, video_file

VIDEO = "<video>"
"""Where a video stands in a text."""
DEFAULT_FPS = 24.0
"""Frames of a second of a video that does not say it, as in transformers."""
TOGETHER = 2
"""Frames of a view."""


@dataclass(frozen=True)
class VideoSampling:
    """Which frames are taken. fps: of a second. min_frames, max_frames: of a video. rule: see data.video_rule."""

    fps: float
    min_frames: int
    max_frames: int
    rule: VideoRule = "qwen3_vl"

    @classmethod
    def of(cls, config: ImageTextKeys) -> VideoSampling | None:
        """None for a data set without videos."""
        if config.frames_per_view != TOGETHER:
            return None
        return cls(config.video_fps, config.min_video_frames, config.max_video_frames, config.video_rule)

    def frames(self, count: int, fps: float) -> list[int]:
        """Numbers of the frames taken of `count`, spread evenly."""
        if self.rule == "qwen2_vl":
            # transformers: Qwen2VLVideoProcessor.sample_frames, which takes whole views.
            wanted = min(max(count / fps * self.fps, self.min_frames), self.max_frames, count)
            even = int(wanted // TOGETHER) * TOGETHER
            return np.arange(0, count, count / even).astype(int).tolist() if even else [0]
        # transformers: Qwen3VLVideoProcessor.sample_frames.
        wanted = min(max(int(count / fps * self.fps), self.min_frames), self.max_frames, count)
        numbers: list[int] = np.linspace(0, count - 1, wanted).round().astype(int).tolist()
        return numbers


@dataclass(frozen=True)
class VideoViews:
    """files: of each view its two frames. seconds: at which they are shown, the mean of the two; of none where the
    views are one image."""

    files: tuple[ImageFile, ...]
    seconds: tuple[float, ...]

    def text(self, mark: str) -> str:
        """With a mark for each view, behind its time."""
        if not self.seconds:
            return mark * len(self.files)
        return "".join(f"<{seconds:.1f} seconds>{mark}" for seconds in self.seconds)


def open_video(path: Path, sampling: VideoSampling, fps: float | None = None) -> VideoViews:
    """fps: frames of a second of the video; None: as the file says, else DEFAULT_FPS.

    Raises DataError for what is no video.
    """
    if path.is_dir():
        count, known = len(frame_files(path)), None
    elif container_of(path) is not None:
        video = video_file(path)
        count, known = len(video.times), video.fps
    else:
        count, known = animation_frames(ImageFile(path))
    rate = fps or known or DEFAULT_FPS
    numbers = sampling.frames(count, rate)
    # Decides the size of the frames, before the last one is repeated.
    taken = len(numbers)
    numbers += numbers[-1:] * (taken % TOGETHER)
    pairs = [numbers[start : start + TOGETHER] for start in range(0, len(numbers), TOGETHER)]
    files = tuple(ImageFile(path, frames=(*pair, taken)) for pair in pairs)
    if sampling.rule == "qwen2_vl":
        # transformers: `second_per_grid_ts`, by the mean rate of the frames that are taken.
        each = TOGETHER / (taken / count * rate)
        later = (replace(file, microseconds=round(place * each * 1e6)) for place, file in enumerate(files))
        return VideoViews(tuple(later), ())
    return VideoViews(files, tuple((pair[0] / rate + pair[-1] / rate) / 2 for pair in pairs))


def is_video(file: ImageFile) -> bool:
    """Whether it is a folder, a video file or an animated one. Raises DataError for a file that cannot be read."""
    if file.frames or file.suffix == ".npy":
        return False
    return file.path.is_dir() or container_of(file.path) is not None or animation_frames(file)[0] > 1


def frame_files(folder: Path) -> list[Path]:
    """The image files of a folder by their names. Raises DataError for a folder without any."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not files:
        raise DataError(f"{folder} has no frames; a video is a folder of image files, or a file")
    return files


# -- the pixels of a view ------------------------------------------------------------------------------


def grid_of(file: ImageFile, tiling: Tiling) -> Grid:
    """The grid of an image, or of a view of a video, from the head of the file."""
    if not file.frames:
        return tiling.grid(*image_size(file))
    assert isinstance(tiling, DynamicResolution)
    return tiling.video_grid(file.frames[-1], *frame_size(file.path))


def frame_size(path: Path) -> tuple[int, int]:
    """Height and width in pixels of the frames of a video. Raises DataError for what cannot be read."""
    if path.is_dir():
        return image_size(ImageFile(frame_files(path)[0]))
    if container_of(path) is not None:
        video = video_file(path)
        return video.height, video.width
    return image_size(ImageFile(path))


def read_view(file: ImageFile) -> list[NDArray[np.uint8]]:
    """The frames uint8 [height, width, 3] of a view: one of an image. Raises DataError for what cannot be read."""
    if not file.frames:
        return [read_image(file)]
    numbers = file.frames[:-1]
    if file.path.is_dir():
        files = frame_files(file.path)
        return [read_image(ImageFile(files[number])) for number in numbers]
    if container_of(file.path) is not None:
        return read_frames(file.path, numbers)
    return [read_image(replace(file, frames=(number,))) for number in numbers]


def views_of_frames(
    frames: Sequence[NDArray[np.uint8]], grid: Grid, tiling: Tiling, config: ImageTextKeys
) -> list[NDArray[np.float32]]:
    """What the model takes of a view's frames uint8 [height, width, 3], each float32 [3, img_h, img_w]; of several
    frames in a view those of each, [3 frames, img_h, img_w], of which the last is repeated for a still."""
    cells = [[as_input(cell, config) for cell in tiling.views(frame, grid)] for frame in frames]
    if config.frames_per_view == 1:
        return cells[0]
    cells += cells[-1:] * (config.frames_per_view - len(cells))
    return [np.concatenate(of_cell) for of_cell in zip(*cells, strict=True)]


# -- records -------------------------------------------------------------------------------------------


def video_names(value: Mapping[str, Any], where: str) -> list[str]:
    """The paths under `video` or `videos`: a text or a list of texts."""
    key = "videos" if "videos" in value else "video"
    names = value.get(key, [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise DataError(f'{where}: expected a path or a list of paths under "{key}", found {value[key]!r:.200}')
    return names


def opened_videos(
    value: Mapping[str, Any], folder: Path, sampling: VideoSampling | None, where: str
) -> list[VideoViews]:
    """Raises DataError for videos that cannot be read, and for any where the data set has none."""
    names = video_names(value, where)
    if names and sampling is None:
        raise DataError(
            f"{where} has a video; set data.dynamic_resolution=true and data.frames_per_view={TOGETHER}, for a model "
            "that takes some"
        )
    fps = value.get("fps")
    if fps is not None and (not isinstance(fps, int | float) or isinstance(fps, bool) or fps <= 0):
        raise DataError(f'{where}: expected a number of frames of a second above 0 under "fps", found {fps!r:.200}')
    return [open_video(folder / name, sampling, fps) for name in names if sampling is not None]
