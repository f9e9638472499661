"""Answers in steps as samples of process reward models: each step is judged at the last token of its separator."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.cache import IndexCache, combined, file_checksum
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.sft.conversations import place
from mt_data.datasets.sft.encoding import BadLines
from mt_data.datasets.sft.packing import Packing, pack_best_fit, pack_singly
from mt_data.datasets.sft.record_files import read_examples
from mt_data.datasets.splits import epoch_order
from mt_data.datasets.text_files import Encode, TextSource, bare_encoder, build_from_text
from mt_data.preprocess.readers import Record, expand_globs
from mt_tune.preferences.fitting import RecordSizes, fitting_records
from mt_tune.reward_models.config import ProcessRewardDataConfig
from mt_tune.reward_models.rows import row_of_texts

FORMAT = 1
"""Raised when the same files give other arrays than before."""
UNJUDGED = -100
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SteppedTexts:
    """tokens int32 and labels int8 [all tokens], UNJUDGED where no step ends; bounds int64 [texts + 1]; file int32 and
    line int64 [texts]."""

    tokens: NDArray[np.int32]
    labels: NDArray[np.int8]
    bounds: NDArray[np.int64]
    file: NDArray[np.int32]
    line: NDArray[np.int64]
    paths: list[Path]

    def __len__(self) -> int:
        return len(self.line)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.bounds)

    def of(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
        part = slice(int(self.bounds[number]), int(self.bounds[number + 1]))
        return self.tokens[part], self.labels[part]

    def where(self, number: int) -> str:
        return place(str(self.paths[self.file[number]]), int(self.line[number]))


class ProcessDataset:
    """Sample k holds the texts of pack `order[k]`."""

    def __init__(
        self,
        texts: SteppedTexts,
        numbers: NDArray[np.int64],
        packing: Packing,
        order: NDArray[np.int64],
        length: int,
        content: Mapping[str, Any],
    ) -> None:
        self.texts, self.numbers, self.packing, self.order = texts, numbers, packing, order
        self.length, self.content = length, content

    def __len__(self) -> int:
        return len(self.order)

    def members(self, index: int) -> list[int]:
        """Numbers of the texts of a sample; IndexError outside of [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.numbers[self.packing.of(int(self.order[index]))].tolist()

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        texts = [self.texts.of(member) for member in self.members(index)]
        sample, _ = row_of_texts([tokens for tokens, _ in texts], self.length)
        labels = np.concatenate([labels for _, labels in texts]).astype(np.int64)
        sample["labels"] = np.zeros(self.length, np.int64)
        sample["labels"][: len(labels)] = labels.clip(min=0)
        sample["loss_mask"][: len(labels)] = labels != UNJUDGED
        return sample

    def fingerprint(self) -> str:
        return combined([self.content])

    def describe(self, index: int) -> str:
        return "; ".join(map(self.texts.where, self.members(index)))


def build_process_rewards(config: ProcessRewardDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of PROCESS_SAMPLE, in whole epochs over packed texts; None for a split without data.

    Raises DataError for unusable records, and for a split in which no text remains.
    """

    def make(source: TextSource, num_samples: int | None) -> ProcessDataset:
        texts, key = load_texts(source.name, config, tokenizer, source.cache)
        length = request.sequence_length
        numbers = fitting_records(
            RecordSizes(texts.lengths, texts.where),
            source.elements(len(texts), "answers"),
            length,
            config.on_too_long,
            source.name,
        )
        packing = pack_best_fit(texts.lengths[numbers], length) if config.packing else pack_singly(len(numbers))
        order = epoch_order(len(packing), num_samples, request.seed)
        log.info("%s: %d answers in %d samples", source.name, len(numbers), len(packing))
        return ProcessDataset(texts, numbers, packing, order, length, key)

    return build_from_text(config, request, make)


# -- encoding ----------------------------------------------------------------------------------------


def encoded_steps(
    answer: SteppedAnswer, encode: Encode, bos: int | None, config: ProcessRewardDataConfig
) -> tuple[list[int], list[int]]:
    """(tokens, label of each or UNJUDGED). Prompt, steps and separators are encoded apart, as TRL does."""
    separator = encode(config.step_separator)
    if not separator:
        raise ConfigError(f"data.step_separator={config.step_separator!r} has no token; name a text that has one")
    prompt = [*([] if bos is None else [bos]), *encode(answer.prompt)]
    steps = [[*encode(step), *separator] for step in answer.steps]
    judged = [int(label) for label in answer.labels]
    if config.last_step_only:
        judged[:-1] = [UNJUDGED] * (len(judged) - 1)
    labels = [[UNJUDGED] * (len(step) - 1) + [label] for step, label in zip(steps, judged, strict=True)]
    return [*prompt, *chain(*steps)], [*[UNJUDGED] * len(prompt), *chain(*labels)]


def load_texts(
    pattern: str, config: ProcessRewardDataConfig, tokenizer: Tokenizer, cache: IndexCache
) -> tuple[SteppedTexts, dict[str, Any]]:
    """The encoded answers of the files that `pattern` names, and the cache key that stands for them."""
    paths = expand_globs([pattern])
    key = {
        "process_rewards": FORMAT,
        "files": [file_checksum(path) for path in paths],
        "tokenizer": tokenizer.fingerprint(),
        "on_error": config.on_error,
        "step_separator": config.step_separator,
        "last_step_only": config.last_step_only,
    }
    arrays = cache.get(key, lambda: _encode(paths, config, tokenizer))
    return SteppedTexts(**arrays, paths=paths), key


def _encode(paths: list[Path], config: ProcessRewardDataConfig, tokenizer: Tokenizer) -> dict[str, NDArray[Any]]:
    encode, bos, bad_lines = bare_encoder(tokenizer), tokenizer.special.bos, BadLines(config.on_error)
    texts: list[tuple[list[int], list[int]]] = []
    places: list[tuple[int, int]] = []
    for file, path in enumerate(paths):
        for answer in read_examples(path, ProcessReader(), partial(bad_lines.add, file)):
            texts.append(encoded_steps(answer, encode, bos, config))
            places.append((file, answer.line))
    if not texts:
        raise DataError(f"{', '.join(map(str, paths))} holds no answer in steps; each record must be one")
    files, lines = zip(*places, strict=True)
    return {
        "tokens": np.array(list(chain(*(tokens for tokens, _ in texts))), np.int32),
        "labels": np.array(list(chain(*(labels for _, labels in texts))), np.int8),
        "bounds": np.concatenate([np.zeros(1, np.int64), np.cumsum([len(tokens) for tokens, _ in texts])]),
        "file": np.array(files, np.int32),
        "line": np.array(lines, np.int64),
    }


PROMPT, STEPS, LABELS = "prompt", "completions", "labels"


@dataclass(frozen=True)
class SteppedAnswer:
    """labels: of each step, whether it is right."""

    prompt: str
    steps: list[str]
    labels: list[bool]
    file: str
    line: int

    @property
    def where(self) -> str:
        return place(self.file, self.line)


class ProcessReader:
    """Turns the records of one file into answers in steps (the interface of RecordReader)."""

    format = "process_reward"

    def example(self, record: Record) -> SteppedAnswer:
        """Raises DataError, naming the record, for one without the three keys, and for one of them that cannot be."""
        where, fields = place(record.file, record.line), record.value
        if missing := [key for key in (PROMPT, STEPS, LABELS) if key not in fields]:
            raise DataError(
                f'{where} has no key "{missing[0]}"; its keys are {", ".join(fields)}. A record has prompt, '
                "completions (a list of steps) and labels (true or false of each step)"
            )
        prompt, steps, labels = fields[PROMPT], fields[STEPS], fields[LABELS]
        if not isinstance(prompt, str) or not prompt:
            raise DataError(f'{where}: "prompt" must be a text that is not empty; it is {prompt!r:.60}')
        _require_list(steps, STEPS, str, "texts that are not empty", where)
        _require_list(labels, LABELS, bool, "true or false", where)
        if len(steps) != len(labels):
            raise DataError(
                f'{where}: "completions" has {len(steps)} steps and "labels" {len(labels)}; they are as many'
            )
        return SteppedAnswer(prompt, steps, labels, record.file, record.line)


def _require_list(values: Any, key: str, kind: type, what: str, where: str) -> None:
    if not isinstance(values, list) or not values:
        raise DataError(f'{where}: "{key}" must be a list with an entry for each step; it is {values!r:.60}')
    wrong = [value for value in values if not isinstance(value, kind) or value == ""]
    if wrong:
        raise DataError(f'{where}: "{key}" has {wrong[0]!r:.60}; its entries must be {what}')
