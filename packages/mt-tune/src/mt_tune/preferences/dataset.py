"""Pairs of answers as samples: each row holds several pairs, each answer a segment that sees itself alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.cache import IndexCache, combined, file_checksum
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.sft.chat_templates import ChatTemplate, NoChatTemplateError
from mt_data.datasets.sft.config import SFTDataConfig
from mt_data.datasets.sft.conversations import place
from mt_data.datasets.sft.encoding import BadLines, ExampleEncoder, read_template
from mt_data.datasets.sft.packing import Packing, pack_best_fit, pack_singly
from mt_data.datasets.sft.record_files import read_examples
from mt_data.datasets.splits import epoch_order
from mt_data.datasets.text_files import TextSource, build_from_text
from mt_data.preprocess.readers import expand_globs
from mt_tune.preferences.config import AnswerDataConfig, PreferenceDataConfig
from mt_tune.preferences.fitting import RecordSizes, fitting_records
from mt_tune.preferences.packed_rows import packed_row
from mt_tune.preferences.records import PairReader
from mt_tune.preferences.samples import MARGIN

FORMAT = 1
"""Raised when the same files give other arrays than before."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodedPairs:
    """Answers 2 k and 2 k + 1 are the chosen and the rejected one of pair k, each with its prompt.

    tokens int32 and answer bool [all tokens]; bounds int64 [answers + 1]; margin float32, file int32 and line int64
    [pairs].
    """

    tokens: NDArray[np.int32]
    answer: NDArray[np.bool_]
    bounds: NDArray[np.int64]
    margin: NDArray[np.float32]
    file: NDArray[np.int32]
    line: NDArray[np.int64]
    paths: list[Path]

    def __len__(self) -> int:
        return len(self.margin)

    @property
    def positions(self) -> NDArray[np.int64]:
        """Positions of both answers of each pair together; n tokens take n - 1."""
        return np.diff(self.bounds).reshape(-1, 2).sum(1) - 2

    def of_answer(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        part = slice(int(self.bounds[number]), int(self.bounds[number + 1]))
        return self.tokens[part], self.answer[part]

    def where(self, pair: int) -> str:
        return place(str(self.paths[self.file[pair]]), int(self.line[pair]))


class PairDataset:
    """Sample k holds the pairs of pack `order[k]`."""

    def __init__(
        self,
        pairs: EncodedPairs,
        numbers: NDArray[np.int64],
        packing: Packing,
        order: NDArray[np.int64],
        length: int,
        content: Mapping[str, Any],
    ) -> None:
        self.pairs, self.numbers, self.packing, self.order = pairs, numbers, packing, order
        self.length, self.content = length, content

    def __len__(self) -> int:
        return len(self.order)

    def members(self, index: int) -> list[int]:
        """Numbers of the pairs of a sample; IndexError outside of [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.numbers[self.packing.of(int(self.order[index]))].tolist()

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        members = self.members(index)
        answers = [self.pairs.of_answer(2 * pair + side) for pair in members for side in (0, 1)]
        sample, first_positions = packed_row(answers, self.length)
        sample |= {"loss_mask": np.zeros(self.length, np.float32), MARGIN: np.zeros(self.length, np.float32)}
        chosen = first_positions[0::2]
        sample["loss_mask"][chosen] = 1.0
        sample[MARGIN][chosen] = self.pairs.margin[members]
        return sample

    def fingerprint(self) -> str:
        return combined([self.content])

    def describe(self, index: int) -> str:
        return "; ".join(map(self.pairs.where, self.members(index)))


def build_preferences(config: PreferenceDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of PAIR_SAMPLE, in whole epochs over packed pairs; None for a split without data.

    Raises DataError for unusable records, and for a split in which no pair remains.
    """

    def make(source: TextSource, num_samples: int | None) -> PairDataset:
        pairs, key = load_pairs(source.name, config, tokenizer, source.cache)
        numbers = fitting_records(
            RecordSizes(pairs.positions, pairs.where, "pair", "both answers take"),
            source.elements(len(pairs), "pairs"),
            request.sequence_length,
            config.on_too_long,
            source.name,
        )
        lengths = pairs.positions[numbers]
        packing = pack_best_fit(lengths, request.sequence_length) if config.packing else pack_singly(len(numbers))
        order = epoch_order(len(packing), num_samples, request.seed)
        log.info("%s: %d pairs in %d samples", source.name, len(numbers), len(packing))
        return PairDataset(pairs, numbers, packing, order, request.sequence_length, key)

    return build_from_text(config, request, make)


# -- encoding ----------------------------------------------------------------------------------------


def load_pairs(
    pattern: str, config: AnswerDataConfig, tokenizer: Tokenizer, cache: IndexCache
) -> tuple[EncodedPairs, dict[str, Any]]:
    """The encoded pairs of the files that `pattern` names, and the cache key that stands for them."""
    paths = expand_globs([pattern])
    keys = SFTDataConfig(
        chat_template=config.chat_template,
        chat_template_file=config.chat_template_file,
        eod_after_answer=config.eod_after_answer,
        train_on="last_answer",
    )
    template = read_template(keys, tokenizer)
    key = {
        "preference_pairs": FORMAT,
        "files": [file_checksum(path) for path in paths],
        "tokenizer": tokenizer.fingerprint(),
        "template": None if isinstance(template, NoChatTemplateError) else template.fingerprint(),
        "on_error": config.on_error,
    }
    arrays = cache.get(key, lambda: _encode(paths, config, keys, template, tokenizer))
    return EncodedPairs(**arrays, paths=paths), key


def _encode(
    paths: list[Path],
    config: AnswerDataConfig,
    keys: SFTDataConfig,
    template: ChatTemplate | NoChatTemplateError,
    tokenizer: Tokenizer,
) -> dict[str, NDArray[Any]]:
    encoder, bad_lines = ExampleEncoder(keys, template, tokenizer), BadLines(config.on_error)
    tokens: list[NDArray[Any]] = []
    answers: list[NDArray[np.bool_]] = []
    places: list[tuple[float, int, int]] = []
    for file, path in enumerate(paths):
        for pair in read_examples(path, PairReader(), partial(bad_lines.add, file)):
            try:
                sides = [encoder.encoded(example)[0] for example in (pair.chosen, pair.rejected)]
                _require_answers([side.answer for side in sides], [side.tokens for side in sides], pair.where)
            except DataError as error:
                bad_lines.add(file, pair.line, error)
                continue
            tokens += [side.tokens.astype(np.int32) for side in sides]
            answers += [side.answer for side in sides]
            places.append((pair.margin, file, pair.line))
    if not places:
        raise DataError(f"{', '.join(map(str, paths))} holds no pair; each record must be one")
    margins, files, lines = zip(*places, strict=True)
    return {
        "tokens": np.concatenate(tokens),
        "answer": np.concatenate(answers),
        "bounds": np.concatenate([np.zeros(1, np.int64), np.cumsum([len(part) for part in tokens])]),
        "margin": np.array(margins, np.float32),
        "file": np.array(files, np.int32),
        "line": np.array(lines, np.int64),
    }


def _require_answers(answers: list[NDArray[np.bool_]], tokens: list[NDArray[Any]], where: str) -> None:
    for answer, side in zip(answers, ("chosen", "rejected"), strict=True):
        if not answer[1:].any():
            raise DataError(f"{where}: nothing of the {side} answer is predicted; remove the record")
    if len(tokens[0]) == len(tokens[1]) and (tokens[0] == tokens[1]).all():
        raise DataError(f"{where}: both answers have the same tokens; remove the record")
