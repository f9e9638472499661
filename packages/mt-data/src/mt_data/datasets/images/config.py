"""Keys that all data sets with images share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from mt_core.config.fields import PositiveFloat, used_when
from mt_core.config.schema import DataConfig
from mt_core.errors import ConfigError
from mt_data.datasets.sounds.rules import SAMPLING_RATE, AudioRule
from mt_data.datasets.text_files import STREAM_KEYS, refuse_unused

Colours = Annotated[list[float], Field(min_length=3, max_length=3)]
Resize = Literal["crop", "squash"]
Resample = Literal["bicubic", "lanczos"]
ImageMarkers = Literal["none", "idefics3", "internvl", "qwen2_vl", "gemma4", "pixtral", "kimi", "minimax_m3"]
VideoRule = Literal["qwen3_vl", "qwen2_vl", "kimi_k25", "minimax_m3"]
FRAMES_OF_RULES: dict[VideoRule, int] = {"qwen3_vl": 2, "qwen2_vl": 2, "kimi_k25": 4, "minimax_m3": 2}
"""Frames of a view of a video."""
SizeRule = Literal["nearest", "fill", "longest_edge", "padded"]


class ImageDataConfig(DataConfig):
    """Images of one size, red, green and blue, each colour (value / 255 - mean) / std."""

    img_h: PositiveInt = 224
    """Height of the images in pixels; the model's."""
    img_w: PositiveInt = 224
    """Width of the images in pixels; the model's."""
    image_mean: Colours = Field(default_factory=lambda: [0.5, 0.5, 0.5])
    """Subtracted from red, green and blue between 0 and 1. CLIP's are [0.48145466, 0.4578275, 0.40821073]."""
    image_std: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=3, max_length=3)] = Field(
        default_factory=lambda: [0.5, 0.5, 0.5]
    )
    """What they are divided by then. CLIP's are [0.26862954, 0.26130258, 0.27577711]."""

    @model_validator(mode="after")
    def _check_unused_stream_keys(self) -> ImageDataConfig:
        refuse_unused(self, STREAM_KEYS, "which cuts no samples from a stream of documents")
        return self

    @property
    def num_channels(self) -> int:
        return 3


class ImageTextKeys(ImageDataConfig):
    """Images within texts."""

    image_token_index: NonNegativeInt
    """The id that stands for an image in the text; the model's."""
    image_seq_length: PositiveInt
    """How many times it stands there: once for each feature that the model makes of an image."""
    dynamic_resolution: bool = False
    """Images keep their proportions: each is resized to whole cells of img_h by img_w pixels, which are its views."""
    min_pixels: PositiveInt = used_when(56 * 56, dynamic_resolution=True)
    """An image with fewer pixels is made larger."""
    max_pixels: PositiveInt = used_when(1280 * 28 * 28, dynamic_resolution=True)
    """An image with more pixels is made smaller."""
    size_rule: SizeRule = used_when("nearest", dynamic_resolution=True)
    """The cells that an image is resized to. nearest: those nearest to its size, within min_pixels and max_pixels
    (Qwen2-VL). fill: as many as max_pixels hold, however small the image is (Gemma 4). longest_edge: those that hold
    its size, after an image whose side is longer than the root of max_pixels was made smaller (Pixtral). padded: those
    that hold its size, black where it ends, after an image with more pixels was made smaller (Kimi K2.5)."""

    video_rule: VideoRule = used_when("qwen3_vl", dynamic_resolution=True)
    """How a video is sampled, sized and put into a text. qwen3_vl: an image for each view, behind its time. qwen2_vl:
    one image of all views, whose times the model gets (Qwen2.5-VL). kimi_k25: an image for each view of up to four
    frames, behind the time of the first (Kimi K2.5). minimax_m3: an image for each view, behind the time of its first
    frame, up to four of which see one another (MiniMax-M3)."""
    frames_per_view: Literal[1, 2, 4] = used_when(1, dynamic_resolution=True)
    """Frames of a view, where records have videos: 4 for video_rule=kimi_k25, else 2; those of a still are equal."""
    video_fps: PositiveFloat = used_when(2.0, dynamic_resolution=True)
    """Frames taken of a second of a video."""
    min_video_frames: PositiveInt = used_when(4, dynamic_resolution=True)
    """Frames taken of a video at least, if it has as many."""
    max_video_frames: PositiveInt = used_when(768, dynamic_resolution=True)
    """Frames taken of a video at most."""
    min_video_pixels: PositiveInt = used_when(128 * 32 * 32, dynamic_resolution=True)
    """A video whose taken frames have fewer pixels together (qwen2_vl, minimax_m3: each of them) is made larger; of
    kimi_k25 none is."""
    max_video_pixels: PositiveInt = used_when(768 * 32 * 32, dynamic_resolution=True)
    """A video whose taken frames have more pixels together (qwen2_vl, minimax_m3, kimi_k25: each of them) is made
    smaller."""

    audio_token_index: NonNegativeInt | None = None
    """The id that stands for sound in the text; the model's. Default: samples have no sound."""
    audio_rule: AudioRule = "qwen3_omni"
    """How many positions a sound has in the text, and the texts around it; the model's."""
    max_audio_seconds: PositiveFloat = 30.0
    """Seconds of all sounds of a sample together, at most."""
    max_sounds: PositiveInt = 1
    """Sounds of a sample, at most."""

    @property
    def max_audio_samples(self) -> int:
        """Samples at 16 kHz of all sounds of a sample together, at most."""
        return int(self.max_audio_seconds * SAMPLING_RATE)

    @model_validator(mode="after")
    def _check_token_of_sound(self) -> ImageTextKeys:
        if self.audio_token_index == self.image_token_index:
            raise ConfigError(
                f"data.audio_token_index={self.audio_token_index} is data.image_token_index too; sound and images need "
                "an id each"
            )
        return self

    @model_validator(mode="after")
    def _check_frames(self) -> ImageTextKeys:
        if self.frames_per_view not in (1, wanted := FRAMES_OF_RULES[self.video_rule]):
            raise ConfigError(
                f"data.frames_per_view={self.frames_per_view} does not fit data.video_rule={self.video_rule}; it can "
                f"be {wanted}, or 1 for images alone"
            )
        return self

    @model_validator(mode="after")
    def _check_pixels(self) -> ImageTextKeys:
        cell = self.img_h * self.img_w
        if self.dynamic_resolution and self.fewest_cells * cell > self.max_pixels:
            raise ValueError(
                f"data.max_pixels={self.max_pixels} has to be at least data.min_pixels={self.min_pixels} rounded up to "
                f"whole cells of {cell} pixels, which is {self.fewest_cells * cell}"
            )
        return self

    @property
    def most_cells(self) -> int:
        """Largest number of cells of an image in dynamic resolution that fits into a sample."""
        return min(self.max_pixels // (self.img_h * self.img_w), self.seq_length)

    @property
    def fewest_cells(self) -> int:
        """That data.min_pixels fill."""
        return max(-(-self.min_pixels // (self.img_h * self.img_w)), 1)
