"""Answers to questions about images, and captions: generated, and compared with those of the data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Tokenizer
from mt_data.datasets.images.encoded import ENCODED_IMAGE
from mt_data.datasets.images.image_text import ImageTextDataConfig
from mt_data.datasets.images.records import ImageText, read_image_texts
from mt_data.datasets.images.text import IMAGE, ImageTextEncoder
from mt_data.datasets.images.videos import VideoSampling
from mt_data.datasets.sft.chat_templates import load_chat_template
from mt_data.datasets.text_files import bare_encoder
from mt_data.preprocess.readers import expand_globs
from mt_eval.tasks import Sample, weighted_mean
from mt_infer.prompts import PromptEncoder, has_image_token, image_data, read_images, takes_no_images
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator

# -- comparison of answers, as in VQAv2's evaluation (Antol et al. 2015, Goyal et al. 2017) ----------
#
# Apostrophes are left out, where the reference has a list of contractions without them that it completes.

PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
BETWEEN_DIGITS = re.compile(r"\d,\d")
LONE_PERIOD = re.compile(r"\.(?!\d)")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGITS = {"none": "0", **{word: str(number) for number, word in enumerate(NUMBERS)}}
ARTICLES = frozenset({"a", "an", "the"})
ENOUGH = 3
"""People who gave an answer, for it to be fully right."""


def normalized(answer: str) -> str:
    """Lower case, without punctuation and articles, numbers as digits."""
    original = answer.replace("\n", " ").replace("\t", " ").strip()
    text = original
    for mark in PUNCTUATION:
        # A mark beside a space, or any mark in a text with a number such as 1,000, is dropped; others separate words.
        # In the original text: other marks have become spaces since.
        is_apart = f"{mark} " in original or f" {mark}" in original or BETWEEN_DIGITS.search(original)
        text = text.replace(mark, "" if is_apart else " ")
    # A period is kept within a number.
    text = LONE_PERIOD.sub("", text).replace("'", "").lower()
    words = (DIGITS.get(word, word) for word in text.split())
    return " ".join(word for word in words if word not in ARTICLES)


def vqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """The mean over people of min(1, others who gave this answer / 3); with one person's answer, whether it is that."""
    wanted = normalized(answer)
    matches = [normalized(other) == wanted for other in references]
    if len(matches) == 1:
        return float(matches[0])
    total = sum(matches)
    # The answer is compared with all people but one, in turn: VQAv2 averages over the subsets of nine of ten.
    return sum(min(1.0, (total - match) / ENOUGH) for match in matches) / len(matches)


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Whether it is one of them, white space around it aside."""
    return float(answer.strip() in {other.strip() for other in references})


METRICS = {"exact_match": exact_match, "vqa_accuracy": vqa_accuracy}
BATCH = 64
"""Samples whose images are held at a time."""


class VisualQuestions:
    """A task (mt_eval.tasks.Task) whose samples are records of the data set image_text: questions with answers,
    conversations, of which the last answer is generated, or captions.

    patterns: files of JSON lines or shards. keys: of the data set, in place of those of the model's training (see
    mt_infer.prompts.image_data), such as chat_template. Raises DataError for files without records, and for a record
    that cannot be used, and ConfigError for a model that takes no images.
    """

    name = "vqa"

    def __init__(
        self,
        patterns: Sequence[str],
        tokenizer: Tokenizer,
        config: Config,
        *,
        keys: Mapping[str, Any],
        sampling: SamplingParameters,
        limit: int | None = None,
    ) -> None:
        if not has_image_token(type(config.model)):
            raise ConfigError(takes_no_images(config.model.family))
        self.patterns, self.sampling, self.limit = list(patterns), sampling, limit
        self.data = ImageTextDataConfig.model_validate(image_data(config).model_dump() | dict(keys))
        self.records = list(islice(self._read(), limit))
        if not self.records:
            raise DataError(f"{', '.join(patterns)} has no record")
        template = load_chat_template(
            self.data.chat_template, self.data.chat_template_file, tokenizer, self.data.eod_after_answer
        )
        self.encoder = ImageTextEncoder(tokenizer, template, ENCODED_IMAGE)
        self.image_tokens = self.data.image_tokens(bare_encoder(tokenizer))
        self.template_hash = template.fingerprint()

    @property
    def settings(self) -> Mapping[str, Any]:
        content = [(str(record.text), record.references, list(map(str, record.images))) for record in self.records]
        return {
            "task": self.name,
            "data": self.patterns,
            "data_hash": sha256(repr(content).encode()).hexdigest(),
            "template_hash": self.template_hash,
            "tiling": repr(self.data.tiling),
            "image_markers": self.data.image_markers,
            "max_tokens": self.sampling.max_tokens,
            "stop": list(self.sampling.stop),
            "limit": self.limit,
        }

    def __len__(self) -> int:
        return len(self.records)

    def samples(self, generator: TextGenerator, skip: int) -> Iterator[Sample]:
        """exact_match and vqa_accuracy of each generated answer. A record whose images cannot be decoded, or that is
        too long for the model, is a sample with an error."""
        # In batches, since decoded images of all records would not fit in memory.
        for start in range(skip, len(self.records), BATCH):
            requests = [self._request(record, generator) for record in self.records[start : start + BATCH]]
            usable = [request for request in requests if request.error is None]
            prompts, inputs = [request.tokens for request in usable], [request.inputs for request in usable]
            answers = (
                completions[0].require_complete() for completions in generator.generate(prompts, self.sampling, inputs)
            )
            for request in requests:
                yield request.failed if request.error is not None else request.answered(next(answers).text)

    def metrics(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        return {metric: weighted_mean(samples, metric) for metric in METRICS}

    def _read(self) -> Iterator[ImageText]:
        def refuse(number: int, error: DataError) -> None:
            raise error

        for path in expand_globs(self.patterns):
            folder = path.parent if self.data.image_folder is None else Path(self.data.image_folder)
            yield from read_image_texts(path, folder, refuse, VideoSampling.of(self.data))

    def _request(self, record: ImageText, generator: TextGenerator) -> Request:
        try:
            tokens, inputs = self._prompt(record, generator.prompts)
        except DataError as error:
            return Request(record, error=str(error))
        if (needed := len(tokens) + (self.sampling.max_tokens or 0)) > generator.longest:
            return Request(record, error=f"{needed} positions, and the model has {generator.longest}")
        return Request(record, tokens, inputs)

    def _prompt(self, record: ImageText, prompts: PromptEncoder) -> tuple[list[int], Mapping[str, Tensor]]:
        """The tokens before the answer, with the image token once for each feature, and the images' views."""
        text = self.encoder.prompt(record)
        images = read_images(record.images, self.data)
        # An image has as many features as its tiling gives: the image token is repeated for each.
        grids = [image.grid for image in images]
        times = [time for image in images for time in image.times]
        encoded = np.array(text.tokens, np.int32), np.array(text.counted, np.bool_)
        tokens, _ = self.image_tokens.expand(*encoded, grids, times)
        # IMAGE marks features within the expanded tokens; the model's vocabulary has its own id for them.
        ids = np.where(tokens == IMAGE, self.data.image_token_index, tokens).tolist()
        return ids, prompts.image_inputs(images)


@dataclass(frozen=True)
class Request:
    """A record as a prompt; or why it cannot be one."""

    record: ImageText
    tokens: list[int] = field(default_factory=list)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    error: str | None = None

    @property
    def failed(self) -> Sample:
        return Sample(self.record.where, error=self.error)

    def answered(self, text: str) -> Sample:
        references = self.record.references
        values = {metric: compare(text, references) for metric, compare in METRICS.items()}
        return Sample(self.record.where, values, details={"answer": text, "references": references})
