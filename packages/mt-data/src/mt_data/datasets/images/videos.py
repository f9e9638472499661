"""Videos as frames with their times: folders of image files, animated files that Pillow reads, and video files.

A video becomes views of a few frames each. What stands before each view in the text is the family's: "<0.3 seconds>"
and the view, "<0.8 seconds>" and the view, ... of Qwen3-VL (Bai et al., *Qwen3-VL Technical Report*, 2025).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_data.datasets.images.config import FRAMES_OF_RULES, ImageTextKeys, VideoRule
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
from mt_data.datasets.images.video_rules import RULES, SamplingLimits, TakenFrames

VIDEO = "<video>"
"""Where a video stands in a text."""
DEFAULT_FPS = 24.0
"""Frames of a second of a video that does not say it, as in transformers."""


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
        if config.frames_per_view == 1:
            return None
        return cls(config.video_fps, config.min_video_frames, config.max_video_frames, config.video_rule)

    def taken(self, count: int, rate: float) -> TakenFrames:
        """Those of a video of `count` frames, `rate` of which are shown in a second."""
        limits = SamplingLimits(self.fps, self.min_frames, self.max_frames)
        return TakenFrames(tuple(RULES[self.rule].sample(count, rate, limits)), count, rate)


@dataclass(frozen=True)
class VideoViews:
    """files: of each view its frames. labels: the text before each view."""

    files: tuple[ImageFile, ...]
    labels: tuple[str, ...]

    def text(self, mark: str) -> str:
        """With a mark for each view, behind its label."""
        return "".join(f"{label}{mark}" for label in self.labels)


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
    rule, taken = RULES[sampling.rule], sampling.taken(count, fps or known or DEFAULT_FPS)
    groups = rule.groups(taken.numbers)
    # The number of frames that are taken decides their size, before the last one is repeated.
    files = (
        ImageFile(path, frames=(*group, len(taken.numbers)), time=rule.time(place, group, taken))
        for place, group in enumerate(groups)
    )
    return VideoViews(tuple(files), tuple(rule.label(group, taken) for group in groups))


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


def tiling_of(file: ImageFile, tiling: Tiling) -> Tiling:
    """By which an image, or a view of a video, is cut."""
    return tiling.of_videos if file.frames and isinstance(tiling, DynamicResolution) else tiling


def views_of_frames(
    frames: Sequence[NDArray[np.uint8]], grid: Grid, tiling: Tiling, config: ImageTextKeys
) -> list[NDArray[np.float32]]:
    """What the model takes of a view's frames uint8 [height, width, 3], each float32 [3, img_h, img_w]; of several
    frames in a view those of each, [3 frames, img_h, img_w], of which the last is repeated where there are fewer."""
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
            f"{where} has a video; set data.dynamic_resolution=true and data.frames_per_view, for a model that takes "
            f"some ({', '.join(f'{frames} for data.video_rule={rule}' for rule, frames in FRAMES_OF_RULES.items())})"
        )
    fps = value.get("fps")
    if fps is not None and (not isinstance(fps, int | float) or isinstance(fps, bool) or fps <= 0):
        raise DataError(f'{where}: expected a number of frames of a second above 0 under "fps", found {fps!r:.200}')
    return [open_video(folder / name, sampling, fps) for name in names if sampling is not None]
