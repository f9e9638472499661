"""Rules by which videos of published families become views: frames that are taken, frames of a view, the text before
each view, and the third number of its grid."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mt_data.datasets.images.config import FRAMES_OF_RULES, VideoRule


@dataclass(frozen=True)
class TakenFrames:
    """numbers: of the frames taken of `count`. rate: frames of a second of the video."""

    numbers: tuple[int, ...]
    count: int
    rate: float

    def seconds(self, frame: int) -> float:
        """At which a frame of this number is shown."""
        return frame / self.rate


@dataclass(frozen=True)
class SamplingLimits:
    """fps: frames to take of a second. min_frames, max_frames: of a video."""

    fps: float
    min_frames: int
    max_frames: int

    def wanted(self, count: int, rate: float) -> float:
        """Frames to take of a video of `count`, `rate` of them in a second."""
        return min(max(count / rate * self.fps, self.min_frames), self.max_frames, count)


class ViewRule(ABC):
    """What is done with the videos of a family."""

    NAME: ClassVar[VideoRule]
    HAS_TIMES: ClassVar[bool] = True
    """Whether grids have a third number."""
    IS_WHOLE: ClassVar[bool] = True
    """Whether the last frame is repeated until the last view has all of its frames."""

    @property
    def frames_per_view(self) -> int:
        return FRAMES_OF_RULES[self.NAME]

    @abstractmethod
    def sample(self, count: int, rate: float, limits: SamplingLimits) -> list[int]:
        """Numbers of the frames taken of `count`, spread evenly."""

    def groups(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """The frames of each view."""
        size = self.frames_per_view
        padded = [*numbers, *[numbers[-1]] * (-len(numbers) % size)] if self.IS_WHOLE else numbers
        return [tuple(padded[start : start + size]) for start in range(0, len(padded), size)]

    @abstractmethod
    def label(self, group: tuple[int, ...], taken: TakenFrames) -> str:
        """The text before the view of these frames."""

    def time(self, place: int, group: tuple[int, ...], taken: TakenFrames) -> int:
        """The third number of the grid of view `place`, counted from 0."""
        return 0


class Qwen3VLRule(ViewRule):
    """An image for each view, behind the mean of its times."""

    NAME = "qwen3_vl"
    HAS_TIMES = False

    def sample(self, count: int, rate: float, limits: SamplingLimits) -> list[int]:
        # transformers: Qwen3VLVideoProcessor.sample_frames.
        wanted = min(max(int(count / rate * limits.fps), limits.min_frames), limits.max_frames, count)
        numbers: list[int] = np.linspace(0, count - 1, wanted).round().astype(int).tolist()
        return numbers

    def label(self, group: tuple[int, ...], taken: TakenFrames) -> str:
        return f"<{(taken.seconds(group[0]) + taken.seconds(group[-1])) / 2:.1f} seconds>"


class Qwen2VLRule(ViewRule):
    """One image of all views, whose times in microseconds the model gets."""

    NAME = "qwen2_vl"

    def sample(self, count: int, rate: float, limits: SamplingLimits) -> list[int]:
        # transformers: Qwen2VLVideoProcessor.sample_frames, which takes whole views.
        even = int(limits.wanted(count, rate) // self.frames_per_view) * self.frames_per_view
        return np.arange(0, count, count / even).astype(int).tolist() if even else [0]

    def label(self, group: tuple[int, ...], taken: TakenFrames) -> str:
        return ""

    def time(self, place: int, group: tuple[int, ...], taken: TakenFrames) -> int:
        # transformers: `second_per_grid_ts`, by the mean rate of the frames that are taken.
        each = self.frames_per_view / (len(taken.numbers) / taken.count * taken.rate)
        return round(place * each * 1e6)


class EvenRule(ViewRule):
    """Frames by default_sample_indices_fn of transformers, and the time of the first frame of a view."""

    def sample(self, count: int, rate: float, limits: SamplingLimits) -> list[int]:
        wanted = max(int(limits.wanted(count, rate)), 1)
        return [place * count // wanted for place in range(wanted)]


class KimiK25Rule(EvenRule):
    """An image for each view of up to four frames, behind the time of the first; the third number of a grid is the
    number of frames."""

    NAME = "kimi_k25"
    IS_WHOLE = False

    def label(self, group: tuple[int, ...], taken: TakenFrames) -> str:
        # transformers: Kimi_K25Processor.replace_video_token, whose clock begins again after a day.
        seconds = taken.seconds(group[0])
        minutes, rest = divmod(int(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours % 24:02}:{minutes:02}:{rest:02}.{int(seconds % 1 * 1000):03}"

    def time(self, place: int, group: tuple[int, ...], taken: TakenFrames) -> int:
        return len(group)


SEGMENT = 4
"""Views whose patches see one another in MiniMax-M3: vision_segment_max_frames of its processor."""


class MiniMaxM3Rule(EvenRule):
    """An image for each view of two frames, behind the time of the first; the third number of a grid is the place of
    the view in its segment, 0 beginning one."""

    NAME = "minimax_m3"

    def label(self, group: tuple[int, ...], taken: TakenFrames) -> str:
        return f"]<]{taken.seconds(group[0]):.1f} seconds[>["

    def time(self, place: int, group: tuple[int, ...], taken: TakenFrames) -> int:
        return place % SEGMENT


RULES: dict[VideoRule, ViewRule] = {
    rule.NAME: rule for rule in (Qwen3VLRule(), Qwen2VLRule(), KimiK25Rule(), MiniMaxM3Rule())
}
