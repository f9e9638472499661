"""From a prompt, with images or without, to what a model takes: token ids, and tensors beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.interfaces import Tokenizer
from mt_core.plugins import load_plugins
from mt_core.specs import MODELS
from mt_data.datasets.images.config import FRAMES_OF_RULES, ImageDataConfig, ImageTextKeys
from mt_data.datasets.images.image_text import ImageTextDataConfig
from mt_data.datasets.images.pixels import ImageFile, as_input, read_image
from mt_data.datasets.images.records import MARK
from mt_data.datasets.images.text import IMAGE, ImageTokens
from mt_data.datasets.images.tiles import Grid
from mt_data.datasets.images.videos import (
    VIDEO,
    VideoSampling,
    grid_of,
    is_video,
    open_video,
    read_view,
    tiling_of,
    views_of_frames,
)
from mt_data.datasets.sounds.reading import read_sound, require_length
from mt_data.datasets.sounds.rules import MARK as SOUND_MARK
from mt_data.datasets.sounds.rules import SOUND
from mt_data.datasets.sounds.tokens import SoundTokens
from mt_data.datasets.text_files import Encode, bare_encoder

Sound = NDArray[np.float32]
"""[samples] of one channel at 16 kHz."""
Prompt = str | Sequence[int]
"""A text, or token ids."""
ENCODER_TOKENS, IMAGES, IMAGE_GRIDS = "encoder_tokens", "images", "image_grids"
AUDIO, AUDIO_LENGTHS = "audio", "audio_lengths"
"""Names in a model's `conditioned_by`."""
COLOURS = ("image_mean", "image_std")
WHOLE = Grid(1, 1)
"""The grid of an image that is not cut."""


class ImageViews(NamedTuple):
    """pixels [V, 3 (of each frame), img_h, img_w]: the tiles of an image, or the image as one view. grid: that it was
    cut by. text: what stands for it in a text, of a video marks of as many parts of the same grid, and their times.
    view_times: of each part of a video the third number of its grid, for families that take one."""

    pixels: Tensor
    grid: Grid
    text: str = MARK
    view_times: tuple[int, ...] = ()

    @property
    def times(self) -> tuple[int, ...]:
        """The third number of the grid of each part, 0 of an image."""
        return self.view_times or (0,) * self.text.count(MARK)

    @property
    def grids(self) -> list[Grid]:
        """Grids of the parts, of which a video has several."""
        return [self.grid] * self.text.count(MARK)


class PromptEncoder:
    """Encodes prompts for one model. conditioned_by: what it takes beside tokens."""

    def __init__(self, tokenizer: Tokenizer, config: Config, conditioned_by: Sequence[str]) -> None:
        self.tokenizer, self.config, self.conditioned_by = tokenizer, config, conditioned_by
        self.model: Any = config.model

    @property
    def has_encoder(self) -> bool:
        return ENCODER_TOKENS in self.conditioned_by

    @property
    def takes_images(self) -> bool:
        return IMAGES in self.conditioned_by

    @property
    def takes_sounds(self) -> bool:
        return AUDIO in self.conditioned_by

    @property
    def takes_videos(self) -> bool:
        """Whether a folder of frames or an animated file can be given in place of an image."""
        return bool(getattr(self.model, "TAKES_VIDEOS", False))

    def encode(self, prompt: Prompt, inputs: Mapping[str, Tensor]) -> tuple[list[int], Mapping[str, Tensor]]:
        """Ids that are continued, and the inputs. Of a model with an encoder the prompt is the encoder's text, unless
        that is among the inputs; in a text each "<image>" stands for one of the images, which else come first, and each
        "<audio>" for one of the sounds.

        Raises ConfigError for ids that the model lacks.
        """
        if self.has_encoder and ENCODER_TOKENS not in inputs:
            # The decoder continues from its start token; the prompt is what the encoder reads, [1, S].
            return [self._decoder_start()], {**inputs, ENCODER_TOKENS: torch.tensor([self.tokens(prompt)])}
        if isinstance(prompt, str) and (IMAGES in inputs or AUDIO in inputs):
            samples = inputs[AUDIO_LENGTHS].tolist() if AUDIO_LENGTHS in inputs else []
            # [images, 2]: rows and columns of tiles; models of one view for each image have no grids.
            grids: list[Sequence[int]] = [WHOLE] * len(inputs.get(IMAGES, ()))
            if IMAGE_GRIDS in inputs:
                grids = inputs[IMAGE_GRIDS].tolist()
            times = [grid[2] for grid in grids if len(grid) > 2]
            sizes = [Grid(*grid[:2]) for grid in grids]
            return self.with_images(prompt, sizes, times=times, samples=samples), inputs
        return self.tokens(prompt), inputs

    def tokens(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt; an empty text starts a document. Raises ConfigError for ids that the model lacks."""
        if isinstance(prompt, str):
            special = self.tokenizer.special
            start = special.bos if special.bos is not None else special.eod
            ids = list(self.tokenizer.encode(prompt))
            # A position is needed to sample from.
            return ids if ids or start is None else [start]
        size = self.model.vocab_size or self.tokenizer.vocab_size
        # The tokens of images and sounds may lie behind the vocabulary.
        media = [getattr(self.model, f"{kind}_token_index", None) for kind in ("image", "audio")]
        wrong = [token for token in prompt if not 0 <= token < size and token not in media]
        if wrong:
            raise ConfigError(f"the prompt has the token {wrong[0]}; ids go from 0 to {size - 1}")
        return list(prompt)

    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end what a decoder with an encoder writes, beside the end of a document."""
        end = self.tokenizer.special.eos
        return (end,) if self.has_encoder and end is not None else ()

    def _decoder_start(self) -> int:
        """The first token of a decoder: the model's, else that of training, the start of a text, and padding where a
        tokenizer has none (T5's)."""
        if (first := getattr(self.model, "decoder_start_token_id", None)) is not None:
            return int(first)
        special = self.tokenizer.special
        start = special.bos if special.bos is not None else special.pad
        if start is None:
            raise ConfigError("the tokenizer has neither bos nor pad, with one of which a decoder's text begins")
        return start

    @cached_property
    def image_tokens(self) -> ImageTokens:
        """Tokens that stand for images, of a model that takes some."""
        return image_data(self.config).image_tokens(bare_encoder(self.tokenizer))

    @cached_property
    def sound_tokens(self) -> SoundTokens:
        """Tokens that stand for sounds, of a model that takes some."""
        return SoundTokens(self.model.AUDIO_RULE, bare_encoder(self.tokenizer))

    def with_images(
        self,
        prompt: str,
        grids: Sequence[Grid],
        encode: Encode | None = None,
        times: Sequence[int] = (),
        samples: Sequence[int] = (),
    ) -> list[int]:
        """Ids of a text with images, which were cut by these grids (`views_of`). Each "<image>" stands for one of the
        images, which else come first. encode: of a text that has its first ids, such as BOS; None: the tokenizer adds
        them, once. times: the third numbers of grids with videos. samples: of sounds, each "<audio>" being one.
        Raises ConfigError for another number of marks."""
        if self.image_tokens.in_templates is not None:
            # Chat templates of some families write a placeholder of their own.
            prompt = prompt.replace(self.image_tokens.in_templates, MARK)
        prompt = marked(prompt, MARK, len(grids))
        if samples:
            prompt = marked(prompt.replace(self.sound_tokens.in_templates, SOUND_MARK), SOUND_MARK, len(samples))
        # Example: "a<image>b" -> "a", "<image>", "b".
        pieces = re.split(f"({MARK}|{SOUND_MARK})" if samples else f"({MARK})", prompt)
        images = iter(self.image_tokens.of_all(grids, times))
        sounds = iter(self.sound_tokens.of_all(samples) if samples else ())
        within = encode or bare_encoder(self.tokenizer)
        # The first piece may get BOS from the tokenizer; later ones must not.
        ids = list((encode or self.tokenizer.encode)(pieces[0]))
        for mark, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            ids += self._ids(next(images if mark == MARK else sounds))
            ids += within(piece)
        return ids

    def _ids(self, tokens: NDArray[np.int32]) -> list[int]:
        """Tokens of an image or a sound, with the model's id in place of each feature."""
        ids = np.where(tokens == IMAGE, self.model.image_token_index, tokens)
        if self.takes_sounds:
            ids = np.where(tokens == SOUND, self.model.audio_token_index, ids)
        listed: list[int] = ids.tolist()
        return listed

    def with_pictures(
        self,
        prompt: str,
        images: Sequence[ImageViews],
        encode: Encode | None = None,
        sounds: Sequence[Sound] = (),
    ) -> list[int]:
        """Same as `with_images`, of images and videos: each "<image>" or "<video>" stands for one of them, in order."""
        grids, samples = [grid for image in images for grid in image.grids], list(map(len, sounds))
        if not self.takes_videos or not images:
            return self.with_images(prompt, grids, encode, samples=samples)
        for placeholder in (self.image_tokens.in_templates, self.image_tokens.video_in_templates, VIDEO):
            prompt = prompt if placeholder is None else prompt.replace(placeholder, MARK)
        marks = prompt.count(MARK)
        if marks not in (0, len(images)):
            raise ConfigError(
                f"the prompt has {MARK} or {VIDEO} {marks} times, and there are {len(images)} of them; they go in order"
            )
        pieces = prompt.split(MARK) if marks else [""] * len(images) + [prompt]
        texts = [image.text for image in images]
        text = "".join(chain(*zip(pieces, texts, strict=False), pieces[-1:]))
        return self.with_images(text, grids, encode, [time for image in images for time in image.times], samples)

    def sound_inputs(self, sounds: Sequence[Sound]) -> Mapping[str, Tensor]:
        """What the model takes of a prompt's sounds; nothing without sounds."""
        if not sounds:
            return {}
        lengths = torch.tensor([len(sound) for sound in sounds])
        return {AUDIO: torch.from_numpy(np.concatenate(sounds)), AUDIO_LENGTHS: lengths}

    def image_inputs(self, images: Sequence[ImageViews]) -> Mapping[str, Tensor]:
        """What the model takes of a prompt's images; nothing without images."""
        if not images:
            return {}
        views = {IMAGES: all_views(images)}
        if IMAGE_GRIDS not in self.conditioned_by:
            return views
        grids = torch.tensor([grid for image in images for grid in image.grids])
        if any(image.view_times for image in images):
            # [parts, 3], with the time of each.
            grids = torch.cat([grids, torch.tensor([time for image in images for time in image.times])[:, None]], 1)
        return {**views, IMAGE_GRIDS: grids}


def takes_no_images(family: str) -> str:
    """An error message for images given to a model of this family, with the families that take some."""
    with_images = [spec.name for spec in load_plugins()[MODELS] if has_image_token(spec.config_type.load())]
    return f"model.family={family} takes no images; models of these families do: {', '.join(sorted(with_images))}"


def has_image_token(model: type[Any]) -> bool:
    """model: a type of configurations."""
    return "image_token_index" in model.model_fields


def marked(prompt: str, mark: str, count: int) -> str:
    """A prompt without marks with `count` of them before it. Raises ConfigError for another number of marks."""
    marks = prompt.count(mark)
    if marks not in (0, count):
        kind = f"{mark[1:-1]}s"
        raise ConfigError(f"the prompt has {mark} {marks} times, and the number of {kind} is {count}; they go in order")
    return prompt if marks else mark * count + prompt


def takes_no_sounds(family: str) -> str:
    """An error message for sounds given to a model of this family, with the families that take some."""
    with_sounds = [spec.name for spec in load_plugins()[MODELS] if has_audio_token(spec.config_type.load())]
    return f"model.family={family} takes no sounds; models of these families do: {', '.join(sorted(with_sounds))}"


def has_audio_token(model: type[Any]) -> bool:
    """model: a type of configurations."""
    return "audio_token_index" in model.model_fields


def read_sounds(files: Sequence[Path], tokens: SoundTokens) -> list[Sound]:
    """Raises DataError for files that are no sounds, and for those that are too short."""
    sounds = [read_sound(ImageFile(path)) for path in files]
    for path, sound in zip(files, sounds, strict=True):
        require_length(len(sound), tokens.rule, None, str(path))
    return sounds


def deal_sounds(texts: Sequence[str], sounds: Sequence[Path]) -> list[list[Path]]:
    """The sounds of each text: see `deal_images`."""
    if len(texts) == 1:
        return [list(sounds)]
    counts = [text.count(SOUND_MARK) for text in texts]
    if sum(counts) != len(sounds):
        raise ConfigError(
            f"the prompts have {SOUND_MARK} {sum(counts)} times, and the number of sounds is {len(sounds)}"
        )
    rest = iter(sounds)
    return [[next(rest) for _ in range(count)] for count in counts]


def deal_images(texts: Sequence[str], images: Sequence[Path]) -> list[list[Path]]:
    """The images of each text: as many as it has marks, in order; all of them for a text that is the only one.

    Raises ConfigError when marks and images are not as many.
    """
    # Without marks images come first; `with_images` compares the numbers.
    if len(texts) == 1:
        return [list(images)]
    counts = [text.count(MARK) + text.count(VIDEO) for text in texts]
    if sum(counts) != len(images):
        raise ConfigError(f"the prompts have {MARK} {sum(counts)} times, and the number of images is {len(images)}")
    rest = iter(images)
    return [[next(rest) for _ in range(count)] for count in counts]


def image_data(config: Config) -> ImageTextDataConfig:
    """How a model's images are read: as in training, where that was on images with texts; with the sizes and colours of
    another data set of images, each as one view; as the processor of a Hugging Face folder does; of a checkpoint
    without any of these, as published models of its family do."""
    model: Any = config.model
    data = config.data
    if isinstance(data, ImageTextDataConfig):
        return data.model_copy(update=_video_keys(model, data))
    # Text data: an imported checkpoint, or one trained on text alone.
    if not isinstance(data, ImageDataConfig):
        return ImageTextDataConfig.model_validate(model.image_data_keys)
    sizes = {key: model.image_data_keys[key] for key in ImageTextKeys.model_fields if key in model.image_data_keys}
    data_keys = {key: getattr(data, key) for key in (*sizes, *COLOURS) if hasattr(data, key)}
    return ImageTextDataConfig.model_validate(sizes | data_keys)


VIDEO_KEYS = ("video_fps", "min_video_frames", "max_video_frames", "min_video_pixels", "max_video_pixels")


def _video_keys(model: Any, data: ImageTextDataConfig) -> dict[str, Any]:
    """The family's keys for videos, where the data set has none and does not say them."""
    if data.frames_per_view > 1 or not getattr(model, "TAKES_VIDEOS", False):
        return {}
    published = model.image_data_keys
    keys = [key for key in VIDEO_KEYS if key in published and key not in data.model_fields_set]
    return {"video_rule": model.VIDEO_RULE, **{key: published[key] for key in keys}}


def read_images(files: Sequence[ImageFile], data: ImageTextDataConfig, *, videos: bool = False) -> list[ImageViews]:
    """videos: a folder of frames and an animated file are videos, else an animated file is its first frame. Raises
    DataError for files that are no images."""
    return [read_video(file.path, data) if videos and is_video(file) else _read(file, data) for file in files]


def _read(file: ImageFile, data: ImageTextDataConfig) -> ImageViews:
    """An image, or a part of a video that a record of a data set has."""
    if not file.frames:
        return views_of([read_image(file)], data)[0]
    grid = grid_of(file, data.tiling)
    cells = views_of_frames(read_view(file), grid, tiling_of(file, data.tiling), data)
    times = (file.time,) if data.has_view_times else ()
    return ImageViews(torch.from_numpy(np.stack(cells)), grid, view_times=times)


def read_video(path: Path, data: ImageTextDataConfig) -> ImageViews:
    """Raises DataError for what is no video."""
    data = data.model_copy(update={"frames_per_view": FRAMES_OF_RULES[data.video_rule]})
    sampling = VideoSampling.of(data)
    assert sampling is not None
    video = open_video(path, sampling)
    parts = [_read(file, data) for file in video.files]
    times = tuple(file.time for file in video.files) if data.has_view_times else ()
    return ImageViews(torch.cat([part.pixels for part in parts]), parts[0].grid, video.text(MARK), times)


def views_of(images: Iterable[NDArray[np.uint8]], data: ImageTextDataConfig) -> list[ImageViews]:
    """Views of images uint8 [height, width, 3]."""
    tiling, image_views = data.tiling, []
    for image in images:
        grid = tiling.grid(*image.shape[:2])
        views = [torch.from_numpy(as_input(view, data)) for view in tiling.views(image, grid)]
        image_views.append(ImageViews(torch.stack(views), grid))
    return image_views


def all_views(images: Sequence[ImageViews]) -> Tensor:
    """The views of several images, one after the other. Beside videos all frames of a still are equal."""
    channels = max(image.pixels.shape[1] for image in images)
    return torch.cat([image.pixels.repeat(1, channels // image.pixels.shape[1], 1, 1) for image in images])
