"""Single answers as samples: each row holds several, and a second row has them to other prompts."""

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
from mt_data.datasets.sft.chat_templates import NoChatTemplateError
from mt_data.datasets.sft.config import SFTDataConfig
from mt_data.datasets.sft.conversations import place
from mt_data.datasets.sft.encoding import BadLines, ExampleEncoder, Template, read_template
from mt_data.datasets.sft.packing import Packing, pack_best_fit, pack_singly
from mt_data.datasets.sft.record_files import read_examples
from mt_data.datasets.splits import epoch_order
from mt_data.datasets.text_files import TextSource, build_from_text
from mt_data.preprocess.readers import expand_globs
from mt_tune.preferences.config import UnpairedDataConfig
from mt_tune.preferences.fitting import RecordSizes, fitting_records
from mt_tune.preferences.packed_rows import EncodedAnswer, packed_row
from mt_tune.preferences.samples import DESIRABLE, OTHER_PROMPT
from mt_tune.preferences.unpaired_records import UnpairedReader

FORMAT = 1
"""Raised when the same files give other arrays than before."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LabelledAnswers:
    """tokens int32 and answer bool [all tokens]; bounds int64 [answers + 1]; desirable bool, file int32 and line int64
    [answers]."""

    tokens: NDArray[np.int32]
    answer: NDArray[np.bool_]
    bounds: NDArray[np.int64]
    desirable: NDArray[np.bool_]
    file: NDArray[np.int32]
    line: NDArray[np.int64]
    paths: list[Path]

    def __len__(self) -> int:
        return len(self.desirable)

    @property
    def positions(self) -> NDArray[np.int64]:
        """Positions of each answer with its prompt; n tokens take n - 1."""
        return np.diff(self.bounds) - 1

    def of(self, number: int) -> EncodedAnswer:
        part = slice(int(self.bounds[number]), int(self.bounds[number + 1]))
        return self.tokens[part], self.answer[part]

    def to_other_prompt(self, prompt: int, answer: int, limit: int) -> EncodedAnswer:
        """The prompt of one record and the answer of another, the first `limit` tokens of both together."""
        tokens, marks = self.of(prompt)
        other_tokens, other_marks = self.of(answer)
        end, start = int(marks.argmax()), int(other_marks.argmax())
        whole = np.concatenate([tokens[:end], other_tokens[start:]])[:limit]
        return whole, np.concatenate([marks[:end], other_marks[start:]])[:limit]

    def where(self, number: int) -> str:
        return place(str(self.paths[self.file[number]]), int(self.line[number]))


class UnpairedDataset:
    """Sample k holds the answers of pack `order[k]`. The answer to another prompt is that of the record before, of the
    first record that of the last one."""

    def __init__(
        self,
        answers: LabelledAnswers,
        numbers: NDArray[np.int64],
        order: NDArray[np.int64],
        packing: Packing,
        length: int,
        content: Mapping[str, Any],
    ) -> None:
        """numbers: of the answers of the split, whose places are what packs hold."""
        self.answers, self.numbers, self.order, self.packing = answers, numbers, order, packing
        self.length, self.content = length, content

    def __len__(self) -> int:
        return len(self.order)

    def _places(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.packing.of(int(self.order[index]))

    def members(self, index: int) -> list[int]:
        """Numbers of the answers of a sample; IndexError outside of [0, len)."""
        return self.numbers[self._places(index)].tolist()

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        members = self.members(index)
        sample, first_positions = packed_row([self.answers.of(member) for member in members], self.length)
        sample |= {"loss_mask": np.zeros(self.length, np.float32), DESIRABLE: np.zeros(self.length, np.float32)}
        sample["loss_mask"][first_positions] = 1.0
        sample[DESIRABLE][first_positions] = np.where(self.answers.desirable[members], 1.0, -1.0)
        others, _ = packed_row([self._to_other_prompt(place) for place in self._places(index)], self.length)
        return {**sample, **{f"{OTHER_PROMPT}{name}": field for name, field in others.items()}}

    def _to_other_prompt(self, number: int) -> EncodedAnswer:
        prompt, before = int(self.numbers[number]), int(self.numbers[number - 1])
        return self.answers.to_other_prompt(prompt, before, self.length + 1)

    def fingerprint(self) -> str:
        return combined([self.content])

    def describe(self, index: int) -> str:
        return "; ".join(map(self.answers.where, self.members(index)))


def build_unpaired(config: UnpairedDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of UNPAIRED_SAMPLE, in whole epochs over packed answers; None for a split without data.

    Raises DataError for unusable records, and for a split in which no answer remains.
    """

    def make(source: TextSource, num_samples: int | None) -> UnpairedDataset:
        answers, key = load_answers(source.name, config, tokenizer, source.cache)
        within, length = source.elements(len(answers), "answers"), request.sequence_length
        numbers = fitting_records(
            RecordSizes(answers.positions, answers.where), within, length, config.on_too_long, source.name
        )
        needed = _needed_positions(answers, numbers, length)
        packing = pack_best_fit(needed, length) if config.packing else pack_singly(len(numbers))
        order = epoch_order(len(packing), num_samples, request.seed)
        desirable = int(answers.desirable[numbers].sum())
        log.info("%s: %d answers in %d samples, %d desirable", source.name, len(numbers), len(packing), desirable)
        if request.split == "train" and desirable in (0, len(numbers)):
            log.warning(
                "%s: all %d answers are %s; losses of single answers learn from both kinds",
                source.name,
                len(numbers),
                "desirable" if desirable else "undesirable",
            )
        return UnpairedDataset(answers, numbers, order, packing, length, key)

    return build_from_text(config, request, make)


def _needed_positions(answers: LabelledAnswers, numbers: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Positions of each answer, so that the answers to other prompts fit into the second row, too."""
    prompts = np.array([int(answers.of(number)[1].argmax()) for number in numbers.tolist()], np.int64)
    positions = answers.positions[numbers]
    to_other = prompts + np.roll(positions - prompts, 1)
    return np.maximum(positions, np.minimum(to_other, length))


# -- encoding ----------------------------------------------------------------------------------------


def load_answers(
    pattern: str, config: UnpairedDataConfig, tokenizer: Tokenizer, cache: IndexCache
) -> tuple[LabelledAnswers, dict[str, Any]]:
    """The encoded answers of the files that `pattern` names, and the cache key that stands for them."""
    paths = expand_globs([pattern])
    keys = SFTDataConfig(
        chat_template=config.chat_template,
        chat_template_file=config.chat_template_file,
        eod_after_answer=config.eod_after_answer,
        train_on="last_answer",
    )
    template = read_template(keys, tokenizer)
    key = {
        "unpaired_answers": FORMAT,
        "files": [file_checksum(path) for path in paths],
        "tokenizer": tokenizer.fingerprint(),
        "template": None if isinstance(template, NoChatTemplateError) else template.fingerprint(),
        "on_error": config.on_error,
    }
    arrays = cache.get(key, lambda: _encode(paths, config, keys, template, tokenizer))
    return LabelledAnswers(**arrays, paths=paths), key


def _encode(
    paths: list[Path], config: UnpairedDataConfig, keys: SFTDataConfig, template: Template, tokenizer: Tokenizer
) -> dict[str, NDArray[Any]]:
    encoder, bad_lines = ExampleEncoder(keys, template, tokenizer), BadLines(config.on_error)
    encoded: list[EncodedAnswer] = []
    places: list[tuple[bool, int, int]] = []
    for file, path in enumerate(paths):
        for example in read_examples(path, UnpairedReader(), partial(bad_lines.add, file)):
            try:
                (answer,) = encoder.encoded(example.answer)
                if not answer.answer[1:].any():
                    raise DataError(f"{example.where}: nothing of the completion is predicted; remove the record")
            except DataError as error:
                bad_lines.add(file, example.line, error)
                continue
            encoded.append((answer.tokens.astype(np.int32), answer.answer))
            places.append((example.desirable, file, example.line))
    if not places:
        raise DataError(f"{', '.join(map(str, paths))} holds no answer; each record must be one")
    desirable, files, lines = zip(*places, strict=True)
    return {
        "tokens": np.concatenate([tokens for tokens, _ in encoded]),
        "answer": np.concatenate([marks for _, marks in encoded]),
        "bounds": np.concatenate([np.zeros(1, np.int64), np.cumsum([len(tokens) for tokens, _ in encoded])]),
        "desirable": np.array(desirable, np.bool_),
        "file": np.array(files, np.int32),
        "line": np.array(lines, np.int64),
    }
