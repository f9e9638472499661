"""Image files with texts or conversations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_core.specs import SplitRequest, Tokenizer
from mt_data.datasets.epochs import epoch_order
from mt_data.datasets.images.config import ImageTextKeys, Resize
from mt_data.datasets.images.pixels import as_input, fit, read_image
from mt_data.datasets.images.records import ImageText, read_pairs
from mt_data.datasets.images.sample import EncodedText, SampleShape
from mt_data.datasets.images.text_encoding import ImageTextEncoder
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.sft.chat_templates import load_chat_template
from mt_data.datasets.text_files import TextDataConfig, TextSource, build_from_text
from mt_data.preprocess.readers import expand_globs


class ImageTextDataConfig(TextDataConfig, ImageTextKeys):
    """JSON lines with an image and a text, {"image": path, "text": ...}, or a conversation as in LLaVA's files,
    {"image": path, "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, {"from": "gpt", ...}]}.
    The image stands where "<image>" is, or else before the text."""

    dataset_type: str = "image_text"
    image_folder: str | None = None
    """Folder at which the paths of images begin. Default: that of the file of JSON lines."""
    resize: Resize = "crop"
    """crop takes the middle of an image in the wanted proportions; squash takes all of it and changes them."""
    chat_template: str = "plain"
    """How a conversation becomes text: `tokenizer` (the one it brings along), chatml, llama3 or plain."""
    chat_template_file: str | None = None
    """A Jinja file in place of chat_template."""
    eod_after_answer: bool | None = None
    """Put the end-of-document id after each answer. Default: for the template plain."""
    on_too_long: Literal["truncate", "error"] = "truncate"
    """A text longer than seq_length is cut at its end, or is an error. The image is never cut."""


class ImageTextDataset:
    """Sample k is line `order[k]`."""

    def __init__(
        self,
        pairs: list[ImageText],
        order: NDArray[np.int64],
        encoder: ImageTextEncoder,
        shape: SampleShape,
        config: ImageTextDataConfig,
    ) -> None:
        self.pairs, self.order = pairs, order
        self.encoder, self.shape, self.config = encoder, shape, config

    def __len__(self) -> int:
        return len(self.order)

    def pair(self, index: int) -> ImageText:
        """The line of sample `index`; IndexError outside of [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of images with texts, of which there are {len(self)}")
        return self.pairs[int(self.order[index])]

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        pair, config = self.pair(index), self.config
        text = self.encoder(pair)
        self._require_room(text, pair)
        image = fit(read_image(pair.image), config.img_h, config.img_w, config.resize)
        return {**self.shape.arrays(text), "images": as_input(image, config)}

    def describe(self, index: int) -> str:
        return self.pair(index).where

    def _require_room(self, text: EncodedText, pair: ImageText) -> None:
        positions, room = len(text.tokens) - 1, self.shape.length
        end_of_image = text.tokens.index(self.shape.image_token) + self.shape.image_length
        if positions > room and self.config.on_too_long == "error":
            raise DataError(
                f"{pair.where} has {positions} positions, more than data.seq_length={room}; make data.seq_length "
                'larger, or cut such texts with data.on_too_long="truncate"'
            )
        if end_of_image > room:
            raise DataError(
                f"{pair.where}: the image ends at position {end_of_image}, behind data.seq_length={room}; an image is "
                "never cut, make data.seq_length larger"
            )


def build_image_text(config: ImageTextDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of IMAGE_TEXT_SAMPLE, shuffled, in whole epochs; None for a split without data.

    Raises DataError, with file and line, for lines that are no image with a text.
    """
    shape = SampleShape.of(config, tokenizer, request.sequence_length)
    template = load_chat_template(config.chat_template, config.chat_template_file, tokenizer, config.eod_after_answer)
    encoder = ImageTextEncoder(tokenizer, template, shape.image)
    return build_from_text(config, request, partial(_make, config, encoder, shape, request))


def _make(
    config: ImageTextDataConfig,
    encoder: ImageTextEncoder,
    shape: SampleShape,
    request: SplitRequest,
    source: TextSource,
    num_samples: int | None,
) -> ImageTextDataset:
    pairs = [pair for path in expand_globs([source.name]) for pair in read_pairs(path, config.image_folder)]
    within = source.elements(len(pairs), "lines")
    chosen = pairs[within.start : within.stop]
    return ImageTextDataset(chosen, epoch_order(len(chosen), num_samples, request.seed), encoder, shape, config)
