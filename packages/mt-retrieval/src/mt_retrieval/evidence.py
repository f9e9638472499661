"""Passages to embed and search, numbered: from files or indexed data sets; and their sequences for the towers."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from mt_core.config.schema import DataConfig
from mt_core.errors import DataError
from mt_core.interfaces import SplitRequest, Tokenizer
from mt_data.datasets.cache import combined
from mt_data.datasets.ict import ICTDataConfig, ICTDataset, build_ict
from mt_data.datasets.pair_encoding import special_ids
from mt_data.datasets.text_classification import INT64_DIGITS
from mt_data.datasets.text_files import bare_encoder
from mt_data.preprocess.formats import COMPRESSIONS


@dataclass(frozen=True)
class Passage:
    """id: as the file has it, unique within the evidence."""

    id: int
    text: str
    title: str


class Evidence(Protocol):
    """Passages by row, 0 to len - 1."""

    name: str
    """The path that the user gave."""

    def __len__(self) -> int: ...

    def fingerprint(self) -> str:
        """SHA-256 of the content; where it lies does not count."""
        ...

    def passage(self, row: int) -> Passage: ...

    def tokens(self, row: int) -> tuple[list[int], list[int]]:
        """Ids of the title and of the text, without special ones."""
        ...


# -- passages from a tab-separated file: DPR's psgs_w100.tsv -----------------------------------------
#
# The first line names the columns. Fields may be in double quotes, as Python's csv module writes them. Only the offsets
# of the rows are kept in memory (8 bytes each).

COLUMNS = ("id", "text", "title")


class TSVEvidence:
    """Raises DataError for a file that is not readable, has other columns, or has no passages."""

    def __init__(self, path: Path, tokenizer: Tokenizer | None = None) -> None:
        self.name = str(path)
        self._encode = None if tokenizer is None else bare_encoder(tokenizer)
        self._file = _opened(path)
        self._offsets = array("q")
        self._digest = sha256()
        try:
            self._columns = self._read_offsets()
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path}, row {len(self._offsets) + 1}: {error}") from error
        if not self._offsets:
            raise DataError(f"{path} has no passages behind its first line")

    def __len__(self) -> int:
        return len(self._offsets)

    def fingerprint(self) -> str:
        return self._digest.hexdigest()

    def passage(self, row: int) -> Passage:
        """Raises DataError for a row without its fields, or whose id is no number of int64."""
        # One open file and one position: not for several threads at a time.
        self._file.seek(self._offsets[row])
        fields = next(_records(_lines(self._file)))
        where = f"{self.name}, passage {row + 1}"
        if len(fields) < len(self._columns):
            raise DataError(f"{where} has {len(fields)} fields, must have {', '.join(self._columns)}")
        # strict=False: a line may have more columns than are named.
        values = dict(zip(self._columns, fields, strict=False))
        if not values["id"].isdecimal() or len(values["id"]) > INT64_DIGITS:
            raise DataError(f"{where} has the id {values['id']!r}, which is no number of at most {INT64_DIGITS} digits")
        return Passage(int(values["id"]), values["text"], values["title"])

    def tokens(self, row: int) -> tuple[list[int], list[int]]:
        assert self._encode is not None
        passage = self.passage(row)
        return self._encode(passage.title), self._encode(passage.text)

    def _read_offsets(self) -> list[str]:
        """Fills offsets and digest; returns the names of the columns."""
        place = 0

        def counted() -> Iterator[bytes]:
            nonlocal place
            # place counts what the csv reader has consumed: it takes lines one at a time, so that `place` is the end of
            # the record that it returned.
            for line in self._file:
                place += len(line)
                self._digest.update(line)
                yield line

        records = _records(counted())
        columns = _checked_columns(next(records, []), self.name)
        start = place
        for record in records:
            if record:  # a blank line gives an empty record
                self._offsets.append(start)
            start = place
        return columns


def _checked_columns(columns: list[str], name: str) -> list[str]:
    missing = [column for column in COLUMNS if column not in columns]
    if missing:
        raise DataError(
            f"{name}, line 1: there is no column {', '.join(missing)}; the first line must name id, text and title, "
            f"separated by tabs. It names {', '.join(columns) or 'nothing'}"
        )
    return columns


def _opened(path: Path) -> BinaryIO:
    if path.suffix in COMPRESSIONS:
        raise DataError(f"{path} is compressed, and passages are read at random places; decompress it first")
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"the evidence {path} cannot be read: {error.strerror}") from error


def _lines(file: BinaryIO) -> Iterator[bytes]:
    yield from iter(file.readline, b"")


def _records(lines: Iterator[bytes]) -> Iterator[list[str]]:
    """A record may go over several lines, inside of quotes."""
    return csv.reader((line.decode("utf-8") for line in lines), delimiter="\t")


# -- blocks of the inverse cloze task: passages from an indexed data set of sentences, with titles ---

SEED = 1234
"""Orders the index of blocks; ids are sorted here, so that it has no effect."""


class BlockEvidence:
    """The blocks of one epoch over all documents of a data set; the id is Megatron's number of the block.

    trained_on: the data section of the encoder, whose rules for blocks are taken over where it is of the inverse cloze
    task. Raises as `build_ict`.
    """

    def __init__(self, prefix: str, tokenizer: Tokenizer, seq_length: int, trained_on: DataConfig) -> None:
        self.name = prefix
        self._tokenizer = tokenizer
        rules = trained_on if isinstance(trained_on, ICTDataConfig) else ICTDataConfig(seq_length=seq_length)
        config = ICTDataConfig.model_validate(
            {
                "seq_length": seq_length,
                "data_path": [prefix],
                # All documents, whatever split the encoder was trained with.
                "split": "1,0,0",
                "use_one_sent_docs": rules.use_one_sent_docs,
                "titles_data_path": rules.titles_data_path,
            }
        )
        # num_samples=None: one epoch, in which each block occurs once.
        built = build_ict(config, tokenizer, SplitRequest("train", None, seq_length, SEED))
        assert isinstance(built, ICTDataset)
        self._blocks = built
        self._rules = [seq_length, rules.use_one_sent_docs]
        # Column 3 is the number of the block, column 2 its document.
        self._order = np.argsort(built.samples.index[:, 3], kind="stable")
        if not len(self._order):
            raise DataError(f"{prefix} has no blocks: each of its documents has fewer than two sentences")

    def __len__(self) -> int:
        return len(self._order)

    def fingerprint(self) -> str:
        return combined([self._blocks.fingerprint(), self._rules])

    def passage(self, row: int) -> Passage:
        title, text = self.tokens(row)
        block = self._blocks.samples.row(int(self._order[row]))[3]
        return Passage(block, self._tokenizer.decode(text), self._tokenizer.decode(title))

    def tokens(self, row: int) -> tuple[list[int], list[int]]:
        sample = int(self._order[row])
        document = self._blocks.samples.row(sample)[2]
        text = np.concatenate(self._blocks.samples.sentences(sample))
        return self._blocks.titles[document].tolist(), text.tolist()


# -- opening by path ---------------------------------------------------------------------------------


def open_evidence(path: str, tokenizer: Tokenizer, seq_length: int, trained_on: DataConfig) -> Evidence:
    """A TSV file of passages, or the prefix of an indexed data set of sentences.

    trained_on: the data section of the encoder. Raises DataError for what is neither.
    """
    if Path(path).is_file():
        return TSVEvidence(Path(path), tokenizer)
    if Path(f"{path}.idx").is_file():
        return BlockEvidence(path, tokenizer, seq_length, trained_on)
    raise DataError(
        f"the evidence {path} is neither a TSV file with the columns id, text and title nor the prefix of an indexed "
        f"data set ({path}.idx does not exist)"
    )


# -- sequences of the towers: CLS question SEP, and CLS title SEP text SEP ---------------------------


@dataclass(frozen=True)
class TextPairs:
    """length: of the longest sequence. What is longer is cut before the last SEP, as Megatron does."""

    length: int
    cls: int
    sep: int
    pad: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, length: int) -> TextPairs:
        """Raises ConfigError for a tokenizer without CLS, SEP or PAD."""
        return cls(length, **special_ids(tokenizer, ("cls", "sep", "pad"), "dpr"))

    def question(self, text: Sequence[int]) -> list[int]:
        return self._cut([self.cls, *text])

    def passage(self, title: Sequence[int], text: Sequence[int]) -> list[int]:
        return self._cut([self.cls, *title, self.sep, *text])

    def _cut(self, tokens: list[int]) -> list[int]:
        # SEP is always there, also behind a text that was cut.
        return [*tokens[: self.length - 1], self.sep]


def bare_question(text: str) -> str:
    """Without one question mark at the end, which DPR's files have and Natural Questions' do not."""
    return text.removesuffix("?")
