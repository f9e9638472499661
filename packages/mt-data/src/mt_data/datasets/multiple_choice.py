"""Multiple choice from the folders of RACE: text files with JSON objects of an article and its questions.

An object holds `article`, `questions` [n], `options` [n][4] and `answers` [n], letters from A. Each option
makes a sequence of its own, CLS question-with-option SEP article SEP; a blank "_" in the question is filled
with the option, which otherwise follows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from mt_core.errors import DataError
from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.cache import combined
from mt_data.datasets.opening import BuiltSplit
from mt_data.datasets.pair_encoding import PairRules, SequenceFormat, clean_text, encode_pair
from mt_data.datasets.splits import epoch_order
from mt_data.datasets.text_files import Encode, TextDataConfig, TextSource, bare_encoder, build_from_text

LETTERS = "ABCD"
_NOT_BLANK = re.compile(r"\S")


class MultipleChoiceDataConfig(TextDataConfig):
    """Folders of RACE, such as RACE/train/middle; each prefix is a folder with `.txt` files."""

    dataset_type: str = "race"
    max_qa_length: PositiveInt = 128
    """Tokens of a question with its option; what is beyond is cut. The rest of seq_length is the article's."""
    sequence_format: SequenceFormat = "cls_sep"
    """What stands around the texts: CLS question SEP article SEP, as BERT takes them, or BOS question EOD article EOD
    (BOS where the tokenizer has one), for decoders."""

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("accuracy",)


@dataclass(frozen=True)
class Question:
    """One question. texts: the question with each option; answer: number of the right one."""

    article: str
    texts: tuple[str, ...]
    answer: int
    where: str


class MultipleChoiceDataset:
    """Sample k is question `order[k]`; its number in the folder is first + order[k]."""

    def __init__(
        self,
        questions: list[Question],
        order: NDArray[np.int64],
        encode: Encode,
        rules: PairRules,
        *,
        max_qa_length: int,
        first: int,
        name: str,
    ) -> None:
        self.questions = questions
        self.order = order
        self.encode = encode
        self.rules = rules
        self.max_qa_length = max_qa_length
        self.first = first
        self.name = name

    def __len__(self) -> int:
        return len(self.order)

    def _number(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.name}, which has {len(self)} samples")
        return int(self.order[index])

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        number = self._number(index)
        question = self.questions[number]
        # Encoded once for the four options.
        article = self.encode(question.article)
        texts = [self.encode(text)[: self.max_qa_length] for text in question.texts]
        rows = [encode_pair(text, article, self.rules) for text in texts]
        return {
            # [4, s] each; `truncated` is overwritten by one value for the question.
            **{name: np.stack([row[name] for row in rows]) for name in rows[0]},
            "truncated": np.array(max(int(row["truncated"]) for row in rows), np.int64),
            "labels": np.array(question.answer, np.int64),
            "loss_mask": np.array(1, np.float32),
            "uid": np.array(self.first + number, np.int64),
        }

    def fingerprint(self) -> str:
        """The articles, questions, options and answers."""
        return combined([[question.article, *question.texts, question.answer] for question in self.questions])

    def describe(self, index: int) -> str:
        return self.questions[self._number(index)].where


def build_multiple_choice(config: MultipleChoiceDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltSplit:
    """Samples of MULTIPLE_CHOICE_SAMPLE, shuffled, in whole epochs; None for a split without data.

    Raises DataError for a folder without `.txt` files and for a file that does not hold what it should.
    """
    rules = PairRules.of(tokenizer, request.sequence_length, "right", config.dataset_type, config.sequence_format)
    encode = bare_encoder(tokenizer)

    def make(source: TextSource, num_samples: int | None) -> MultipleChoiceDataset:
        questions = list(read_folder(Path(source.name)))
        within = source.elements(len(questions), "questions")
        return MultipleChoiceDataset(
            questions[within.start : within.stop],
            epoch_order(len(within), num_samples, request.seed),
            encode,
            rules,
            max_qa_length=config.max_qa_length,
            first=within.start,
            name=source.name,
        )

    return build_from_text(config, request, make)


def read_folder(folder: Path) -> Iterator[Question]:
    """The questions of all `.txt` files of a folder, files in the order of their names."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        inside = ", ".join(sorted(str(path) for path in folder.glob("*/") if any(path.glob("*.txt"))))
        raise DataError(
            f"{folder} is no folder with .txt files" + (f"; name those within it: {inside}" if inside else "")
        )
    for file in files:
        for value, where in _objects(file):
            yield from _questions(value, where)


def _objects(file: Path) -> Iterator[tuple[Any, str]]:
    """The JSON values of a file, one a line or spread over lines, each with the line it begins on."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    decoder, end, line = json.JSONDecoder(), 0, 1
    # raw_decode does not skip white space: each value begins at the next character that is none.
    while (begin := _NOT_BLANK.search(text, end)) is not None:
        line += text.count("\n", end, begin.start())
        try:
            value, following = decoder.raw_decode(text, begin.start())
        except json.JSONDecodeError as error:
            raise DataError(f"{file}, line {error.lineno}, column {error.colno}: no JSON ({error.msg})") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}, line {line}: {error}") from error
        yield value, f"{file}, line {line}"
        line += text.count("\n", begin.start(), following)
        end = following


def _questions(value: Any, where: str) -> Iterator[Question]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: must be an object with article, questions, options and answers")
    missing = [key for key in ("article", "questions", "options", "answers") if key not in value]
    if missing:
        raise DataError(f"{where} has no {', '.join(missing)}; its keys are {', '.join(value)}")
    if not isinstance(value["article"], str):
        raise DataError(f"{where}: article must be a text")
    if wrong := [key for key in ("questions", "options", "answers") if not isinstance(value[key], list)]:
        raise DataError(f"{where}: {', '.join(wrong)} must be a list")
    counts = {key: len(value[key]) for key in ("questions", "options", "answers")}
    if len(set(counts.values())) > 1:
        raise DataError(f"{where} has {', '.join(f'{n} {key}' for key, n in counts.items())}; they must be as many")
    article = clean_text(value["article"])
    for number in range(counts["questions"]):
        yield _question(article, value, number, f"{where}, question {number + 1}")


def _question(article: str, value: Mapping[str, Any], number: int, where: str) -> Question:
    question, options, answer = (value[key][number] for key in ("questions", "options", "answers"))
    if not isinstance(options, list) or not all(isinstance(text, str) for text in (question, *options)):
        raise DataError(f"{where}: question and options must be texts")
    if len(options) != len(LETTERS):
        raise DataError(f"{where} has {len(options)} options, must have {len(LETTERS)}")
    if answer not in tuple(LETTERS):
        raise DataError(f"{where}: the answer is {answer!r}, must be one of {', '.join(LETTERS)}")
    return Question(article, tuple(_with_option(question, option) for option in options), LETTERS.index(answer), where)


def _with_option(question: str, option: str) -> str:
    return clean_text(question.replace("_", option) if "_" in question else f"{question} {option}")
