"""Images with texts or conversations, from files of JSON lines and from shards."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from mt_core.config.fields import used_when
from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.cache import combined
from mt_data.datasets.images.config import ImageMarkers, ImageTextKeys, Resample, Resize
from mt_data.datasets.images.encoded import (
    ENCODED_IMAGE,
    EncodedRecords,
    SoundLimits,
    UnusableRecords,
    cache_key,
    cached_records,
    encode_files,
)
from mt_data.datasets.images.pixels import ImageFile
from mt_data.datasets.images.sample import SampleShape, padded_sounds
from mt_data.datasets.images.text import ImageTextEncoder, ImageTokens
from mt_data.datasets.images.tiles import DynamicResolution, Grid, LongestEdgeTiling, Tiling, padded_grids
from mt_data.datasets.images.video_rules import RULES
from mt_data.datasets.images.videos import VideoSampling, grid_of, read_view, tiling_of, views_of_frames
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.sft.chat_templates import load_chat_template
from mt_data.datasets.sft.packing import Packing, pack_best_fit, pack_singly
from mt_data.datasets.sounds.reading import read_sound
from mt_data.datasets.sounds.tokens import SoundTokens
from mt_data.datasets.splits import epoch_order
from mt_data.datasets.text_files import Encode, TextDataConfig, TextSource, bare_encoder, build_from_text
from mt_data.preprocess.readers import expand_globs

log = logging.getLogger(__name__)


class ImageTextDataConfig(TextDataConfig, ImageTextKeys):
    """Images with texts: JSON lines, {"image": path, "text": ...}, {"image": path, "question": ..., "answer": ...} or a
    conversation as in LLaVA's files, {"image": path, "conversations": [{"from": "human", "value": "<image>\\nWhat is
    it?"}, {"from": "gpt", ...}]}; or webdataset's shards (.tar), whose samples have such an object in the member json,
    or a text in txt. An image stands where "<image>" is, or else before the text. In JSON lines "video" is a video
    file, an animated one or a folder of frames, which stands where "<video>" is. With audio_token_index "audio" is a
    WAV file, in shards the member wav, which stands where "<audio>" is."""

    dataset_type: str = "image_text"
    image_folder: str | None = None
    """Folder at which the paths of images in JSON lines begin. Default: that of the file of JSON lines."""
    resize: Resize = used_when("crop", image_longest_edge=None, dynamic_resolution=False)
    """crop takes the middle of an image in the requested proportions; squash takes all of it and changes them."""
    resample: Resample = "bicubic"
    """The filter by which the sizes of images are changed."""
    max_num_tiles: PositiveInt = used_when(1, image_longest_edge=None, dynamic_resolution=False)
    """An image is cut into at most so many tiles of img_h by img_w, in a grid near its proportions."""
    use_thumbnail: bool = used_when(False, image_longest_edge=None, dynamic_resolution=False)
    """An image that is cut is also given as a whole, behind its tiles, which max_num_tiles does not count."""
    image_longest_edge: Annotated[int, Field(gt=0, le=4096)] | None = used_when(None, dynamic_resolution=False)
    """Cut an image as Idefics3 does: its longer side becomes so many pixels, both sides are stretched to whole tiles
    of img_h by img_w, and the whole image follows its tiles. Default: the grid of max_num_tiles."""
    image_markers: ImageMarkers = "none"
    """Texts around the views of an image: idefics3 has one before each tile with its row and column, internvl and
    qwen2_vl have one before the first and one behind the last."""
    packing: bool = False
    """Several records in a sample, which do not see one another; false puts one in each."""
    max_images: PositiveInt | None = used_when(None, packing=False)
    """Views (images, or tiles of them) of a sample, at most. Default: those of one image."""
    chat_template: str = "plain"
    """How a conversation becomes text: `tokenizer` (the one it brings along), chatml, llama3 or plain."""
    chat_template_file: str | None = None
    """A Jinja file in place of chat_template."""
    eod_after_answer: bool | None = None
    """Put the end-of-document id after each answer. Default: for the template plain."""
    on_too_long: Literal["truncate", "error"] = "truncate"
    """A text longer than seq_length is cut at its end, or is an error. An image is never cut."""
    max_unusable_records: NonNegativeInt = 0
    """Records that may be left out, with a warning, because they are malformed, their images do not fit, or an
    image is damaged; one more is an error. One whose image turns out damaged only when it is decoded stays in its
    sample without counting in the loss; each rank counts those of the samples that it reads."""

    @property
    def has_view_times(self) -> bool:
        """Whether grids come with a third number, of views of videos."""
        return self.frames_per_view > 1 and RULES[self.video_rule].HAS_TIMES

    @property
    def tiling(self) -> Tiling:
        if self.dynamic_resolution:
            return DynamicResolution.of(self, self.resample)
        size: Any = {"img_h": self.img_h, "img_w": self.img_w, "resample": self.resample}
        if self.image_longest_edge is not None:
            return LongestEdgeTiling(**size, longest_edge=self.image_longest_edge)
        return Tiling(**size, max_num_tiles=self.max_num_tiles, use_thumbnail=self.use_thumbnail, resize=self.resize)

    def image_tokens(self, encode: Encode) -> ImageTokens:
        """encode: of a text within another one."""
        sounds = None if self.audio_token_index is None else SoundTokens(self.audio_rule, encode)
        return ImageTokens(self.tiling, self.image_seq_length, self.image_markers, encode, sounds)

    @property
    def sound_limits(self) -> SoundLimits | None:
        """None where samples have no sound."""
        if self.audio_token_index is None:
            return None
        return SoundLimits(self.audio_rule, self.max_sounds, self.max_audio_samples)

    @model_validator(mode="after")
    def _check_packed_sounds(self) -> ImageTextDataConfig:
        if self.packing and self.audio_token_index is not None:
            raise ConfigError(
                "data.packing=true packs records by their positions, and data.audio_token_index gives samples a number "
                "of sounds and of seconds; set data.packing=false"
            )
        return self


@dataclass(frozen=True)
class Selection:
    """The records of a split that are trained on: numbers, and the input positions that each takes, int64 [kept].
    cut: how many lose the end of their text; without_label: left out, since nothing that counts is left of it."""

    numbers: NDArray[np.int64]
    positions: NDArray[np.int64]
    cut: int
    without_label: int


class ImageTextDataset:
    """Sample k holds the records of pack `order[k]`, one after the other, each a segment."""

    def __init__(
        self,
        records: EncodedRecords,
        selection: Selection,
        packing: Packing,
        order: NDArray[np.int64],
        shape: SampleShape,
        config: ImageTextDataConfig,
        image_tokens: ImageTokens,
        unusable: UnusableRecords,
    ) -> None:
        self.records, self.selection, self.packing, self.order = records, selection, packing, order
        self.shape, self.config, self.image_tokens = shape, config, image_tokens
        self.tiling = image_tokens.tiling
        self.max_images = max_images(config, shape)
        self.unusable = unusable

    def __len__(self) -> int:
        return len(self.order)

    def members(self, index: int) -> list[int]:
        """Numbers of the records in sample `index`; IndexError outside of [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of images with texts, of which there are {len(self)}")
        return self.selection.numbers[self.packing.of(int(self.order[index]))].tolist()

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        members = self.members(index)
        sample = self.shape.padding(segments=len(members) if self.config.packing else None)
        # [max_images, 3 (of each frame), img_h, img_w]: every sample has the same shape, so that they can be stacked.
        images = np.zeros((self.max_images, *self._view_shape), np.float32)
        start = view = 0
        for segment, record in enumerate(members):
            pixels, is_whole = self._views(record)
            if self.config.audio_token_index is not None:
                # Without packing a sample has one record.
                sounds, is_heard = self._sounds(record)
                sample, is_whole = {**sample, **sounds}, is_whole and is_heard
            tokens, counted = self.records.expanded(record, self.image_tokens)
            # A record with a damaged image keeps its tokens and positions but leaves the loss: the packing is fixed by
            # now.
            start = self.shape.write(sample, start, tokens, counted & is_whole, segment)
            images[view : view + len(pixels)] = pixels
            view += len(pixels)
        if self.config.dynamic_resolution:
            shown = [image for record in members for image in self.records.images(record)]
            times = [file.time for file, _ in shown] if self.config.has_view_times else None
            # As many rows as there can be images.
            most = max(self.max_images // self.tiling.min_views, 1)
            sample["image_grids"] = padded_grids([grid for _, grid in shown], most, times)
        return {**sample, "images": images}

    def fingerprint(self) -> str:
        """The content of the files, and how they become samples."""
        return combined([self.records.fingerprint(), repr(self.tiling), self.config.image_markers, repr(self.shape)])

    def describe(self, index: int) -> str:
        return "; ".join(map(self.records.where, self.members(index)))

    def _views(self, record: int) -> tuple[NDArray[np.float32], bool]:
        """The views of a record's images, float32 [views, 3, img_h, img_w], and whether all could be decoded; those
        of a damaged image are 0."""
        views, is_whole = [], True
        for image, grid in self.records.images(record):
            try:
                frames = self._read(image, grid)
                views += views_of_frames(frames, grid, tiling_of(image, self.tiling), self.config)
            except DataError as error:
                error = DataError(f"{self.records.where(record)}: {error}")
                self.unusable.add(int(self.records.file[record]), int(self.records.number[record]), error)
                views += [np.zeros(self._view_shape, np.float32)] * self.tiling.num_views(grid)
                is_whole = False
        return np.array(views, np.float32).reshape(-1, *self._view_shape), is_whole

    def _sounds(self, record: int) -> tuple[dict[str, np.ndarray], bool]:
        """audio fp32 [max_audio_samples], the sounds end to end, and audio_lengths int64 [max_sounds]; and whether all
        could be decoded. A damaged sound is silent."""
        sounds, is_whole = [], True
        for file, samples in self.records.sounds(record):
            try:
                sounds.append(self._heard(file, samples))
            except DataError as error:
                error = DataError(f"{self.records.where(record)}: {error}")
                self.unusable.add(int(self.records.file[record]), int(self.records.number[record]), error)
                sounds.append(np.zeros(samples, np.float32))
                is_whole = False
        return padded_sounds(sounds, self.config), is_whole

    def _heard(self, file: ImageFile, samples: int) -> NDArray[np.float32]:
        """Raises DataError for a sound that was replaced by one of another length since the records were encoded."""
        sound = read_sound(file)
        if len(sound) != samples:
            raise DataError(
                f"{file} has {len(sound)} samples at 16 kHz, and had {samples} when the index of the records was "
                "built; delete the index cache, so that it is built again"
            )
        return sound

    @property
    def _view_shape(self) -> tuple[int, int, int]:
        return 3 * self.config.frames_per_view, self.config.img_h, self.config.img_w

    def _read(self, file: ImageFile, grid: Grid) -> list[NDArray[np.uint8]]:
        """The frames of a view, one of an image. Raises DataError for an image that was replaced by one with another
        grid since the records were encoded."""
        frames = read_view(file)
        # The tokens of the sample were laid out for the recorded grid; other pixels would not match their number.
        if (actual := grid_of(file, self.tiling)) != grid:
            raise DataError(
                f"{file} has {actual.rows} x {actual.columns} views, and had {grid.rows} x {grid.columns} when the "
                "index of the records was built; delete the index cache, so that it is built again"
            )
        return frames


def build_image_text(config: ImageTextDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of IMAGE_TEXTS_SAMPLE, shuffled, in whole epochs; None for a split without data.

    Raises DataError, with file and line, for more unusable records than are allowed.
    """
    shape = SampleShape.of(config, tokenizer, request.sequence_length)
    template = load_chat_template(config.chat_template, config.chat_template_file, tokenizer, config.eod_after_answer)
    encoder = ImageTextEncoder(tokenizer, template, ENCODED_IMAGE)
    image_tokens = config.image_tokens(bare_encoder(tokenizer))

    def make(source: TextSource, num_samples: int | None) -> ImageTextDataset:
        records = _encoded_records(source, config, tokenizer, encoder, image_tokens)
        unusable = UnusableRecords(config.max_unusable_records, records.unusable)
        selection = select(records, source.elements(len(records), "records"), config, shape, unusable)
        if config.packing:
            packing = pack_best_fit(selection.positions, shape.length)
        else:
            packing = pack_singly(len(selection.numbers))
        order = epoch_order(len(packing), num_samples, request.seed)
        dataset = ImageTextDataset(records, selection, packing, order, shape, config, image_tokens, unusable)
        _report(dataset, source.name)
        return dataset

    return build_from_text(config, request, make)


def _encoded_records(
    source: TextSource,
    config: ImageTextDataConfig,
    tokenizer: Tokenizer,
    encoder: ImageTextEncoder,
    image_tokens: ImageTokens,
) -> EncodedRecords:
    """All records of the source's files, from the cache or encoded now."""
    paths = expand_globs([source.name])
    folders = [path.parent if config.image_folder is None else Path(config.image_folder) for path in paths]
    limit, sampling = config.max_unusable_records, VideoSampling.of(config)
    key = cache_key(
        paths,
        folders=[str(folder.resolve()) for folder in folders],
        tokenizer=tokenizer.fingerprint(),
        template=encoder.template.fingerprint(),
        # The repr of a frozen dataclass has the class and all fields, hence everything that decides grids and views.
        tiling=repr(config.tiling),
        image_seq_length=config.image_seq_length,
        image_markers=config.image_markers,
        limit=limit,
        **({} if sampling is None else {"videos": repr(sampling)}),
        **({} if config.sound_limits is None else {"sounds": repr(config.sound_limits)}),
    )
    arrays = cached_records(
        source.cache,
        key,
        partial(encode_files, paths, folders, encoder, image_tokens, limit, sampling, config.sound_limits),
    )
    return EncodedRecords(**arrays, paths=paths, folders=folders)


def max_images(config: ImageTextDataConfig, shape: SampleShape) -> int:
    """Views of a sample, at most."""
    if config.packing or (config.frames_per_view > 1 and config.max_images is None):
        # As many views as there is space for in a sample of images alone.
        return shape.length // shape.image_length
    return config.max_images or min(config.tiling.max_views, shape.length // shape.image_length)


def select(
    records: EncodedRecords,
    within: range,
    config: ImageTextDataConfig,
    shape: SampleShape,
    unusable: UnusableRecords,
) -> Selection:
    """The records `within` whose images fit, and that leave something to learn after the cut to seq_length.

    Raises DataError for more records whose images do not fit than data.max_unusable_records allows, for one that is
    too long when on_too_long is "error", and when nothing is left.
    """
    numbers = np.arange(within.start, within.stop, dtype=np.int64)
    positions = records.positions[numbers]
    too_long = positions > shape.length
    if config.on_too_long == "error" and too_long.any():
        first = int(too_long.argmax())
        raise DataError(
            f"{records.where(int(numbers[first]))} has {int(positions[first])} positions, more than data.seq_length="
            f'{shape.length}; make data.seq_length larger, or cut such texts with data.on_too_long="truncate"'
        )
    fits = _with_fitting_images(records, numbers, max_images(config, shape), shape, unusable)
    learnt = fits & (records.first_label[numbers] <= np.minimum(positions, shape.length))
    if not learnt.any():
        raise DataError(
            f"{', '.join(map(str, records.paths))}: none of {len(numbers)} records has anything to learn within "
            f"data.seq_length={shape.length} positions; make it larger"
        )
    kept = np.minimum(positions, shape.length)[learnt]
    return Selection(numbers[learnt], kept, int((too_long & learnt).sum()), int((fits & ~learnt).sum()))


def _with_fitting_images(
    records: EncodedRecords, numbers: NDArray[np.int64], most: int, shape: SampleShape, unusable: UnusableRecords
) -> NDArray[np.bool_]:
    """Which records have images that fit into a sample; the others are unusable."""
    ends, views = records.images_end[numbers], records.views[numbers]
    # int64 [records]: ends, the position behind the last image; an image that is cut would have views without tokens.
    fits = (ends <= shape.length) & (views <= most)
    for place in np.flatnonzero(~fits).tolist():
        if ends[place] > shape.length:
            reason = (
                f"the images end at position {ends[place]}, behind data.seq_length={shape.length}; an image is never "
                "cut (nor is a sound), make it larger"
            )
        else:
            reason = (
                f"the images have {views[place]} views, more than the {most} of a sample; set data.max_images to at "
                f"least {views[place]}"
            )
        record = int(numbers[place])
        error = DataError(f"{records.where(record)}: {reason}")
        unusable.add(int(records.file[record]), int(records.number[record]), error)
    return fits


def _report(dataset: ImageTextDataset, name: str) -> None:
    selection, packs = dataset.selection, len(dataset.packing)
    kept, left_out = len(selection.numbers), len(dataset.unusable.found)
    is_incomplete = left_out or selection.cut or selection.without_label
    log.log(
        logging.WARNING if is_incomplete else logging.INFO,
        "%s: %d records in %d samples, %.1f%% full; %d cut at the end, %d left out because nothing to learn remained, "
        "%d unusable",
        name,
        kept,
        packs,
        100 * int(selection.positions.sum()) / (packs * dataset.shape.length),
        selection.cut,
        selection.without_label,
        left_out,
    )
