"""Texts whose perplexity is measured, as documents of token ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Tokenizer
from mt_data.indexed.dataset import IndexedDataset
from mt_data.preprocess.formats import detect_format
from mt_data.preprocess.readers import expand_globs, iter_records

INDEXED = (".bin", ".idx")
KEYED = ("jsonl", "parquet")


@dataclass(frozen=True)
class TextSet:
    """A named text: .bin/.idx (or their prefix), JSON lines, Parquet, or a plain text file, which is one document.

    input_format: jsonl, text, text-lines or parquet; auto: by the ending. text_key: of JSON lines and Parquet.
    detokenizer: a name of DETOKENIZERS, applied before the tokenizer. prefix: each document follows the token that
    starts a document, so that its first token is predicted as well; default: yes, but for a plain text, of which
    Megatron-LM's tasks predict all tokens but the first.
    """

    name: str
    path: str
    text_key: str = "text"
    detokenizer: str = "none"
    prefix: bool | None = None
    input_format: str = "auto"

    def __post_init__(self) -> None:
        if self.detokenizer not in DETOKENIZERS:
            raise ConfigError(f"detokenizer={self.detokenizer!r}; it can be {', '.join(DETOKENIZERS)}")
        if self.is_indexed and self.detokenizer != "none":
            raise ConfigError(f"{self.path} has tokens; detokenizer={self.detokenizer} is for texts")

    @property
    def is_indexed(self) -> bool:
        return self.path.endswith(INDEXED) or Path(f"{self.path}.idx").exists()

    def require_file(self) -> None:
        """Raises DataError unless there is such a file."""
        if self.is_indexed:
            _open_indexed(self.path)
        else:
            expand_globs([self.path])

    @property
    def has_prefix(self) -> bool:
        if self.prefix is not None:
            return self.prefix
        return self.is_indexed or not self.is_plain

    @property
    def is_plain(self) -> bool:
        """Whether the file is one document."""
        return detect_format(Path(self.path), self.input_format).kind == "text"


@dataclass(frozen=True)
class Document:
    """tokens: int32 [T], the prefix included. num_bytes (of UTF-8), num_words (between white space, or single spaces in
    a plain text): of what is predicted."""

    tokens: np.ndarray
    num_bytes: int
    num_words: int


def read_documents(texts: TextSet, tokenizer: Tokenizer) -> tuple[list[Document], str]:
    """With at least one token to predict each, and a hash of all tokens.

    Raises DataError for files that cannot be read or have no such document, ConfigError for a tokenizer without a token
    that starts a document where one is needed.
    """
    start = [_document_start(texts, tokenizer)] if texts.has_prefix else []
    candidates = _indexed(texts, tokenizer, start) if texts.is_indexed else _texts(texts, tokenizer, start)
    documents = [document for document in candidates if len(document.tokens) > 1]
    if not documents:
        raise DataError(f"{texts.path}: no document has a token to predict")
    digest = sha256()
    for document in documents:
        # With the length: tokens moved from one document to the next give another hash.
        digest.update(len(document.tokens).to_bytes(8, "little") + document.tokens.tobytes())
    return documents, digest.hexdigest()


def _document_start(texts: TextSet, tokenizer: Tokenizer) -> int:
    special = tokenizer.special
    start = special.bos if special.bos is not None else special.eod
    if start is None:
        raise ConfigError(f"{texts.path}: the tokenizer has no bos or eod to start a document with; use no prefix")
    return start


def _indexed(texts: TextSet, tokenizer: Tokenizer, start: list[int]) -> Iterator[Document]:
    dataset = _open_indexed(texts.path)
    boundaries = dataset.document_indices
    for first, end in pairwise(boundaries.tolist()):
        # A document may consist of several sequences.
        sequences = [np.asarray(dataset[number], dtype=np.int32) for number in range(first, end)]
        ids = np.concatenate([np.array(start, dtype=np.int32), *sequences])
        # eod ends a document in such files; it is predicted, but is no text.
        predicted = [int(token) for token in ids[1:] if token != tokenizer.special.eod]
        text = tokenizer.decode(predicted)
        yield Document(ids, len(text.encode()), len(text.split()))


def _open_indexed(path: str) -> IndexedDataset:
    return IndexedDataset(path.removesuffix(".bin").removesuffix(".idx"))


def _texts(texts: TextSet, tokenizer: Tokenizer, start: list[int]) -> Iterator[Document]:
    key = texts.text_key if detect_format(Path(texts.path), texts.input_format).kind in KEYED else "text"
    for record in iter_records(texts.path, input_format=texts.input_format):
        text = record.value.get(key)
        if not isinstance(text, str):
            raise DataError(
                f"{record.file}, line {record.line}: no text under {key!r}; its keys are "
                f"{', '.join(record.value)} (--text-key)"
            )
        yield _document(text, texts, tokenizer, start)


def _document(text: str, texts: TextSet, tokenizer: Tokenizer, start: list[int]) -> Document:
    # Words as Megatron-LM counts them: before detokenization, newlines do not separate.
    words = len(text.strip().split(" ")) if texts.is_plain else len(text.split())
    detokenized = DETOKENIZERS[texts.detokenizer](text)
    ids = [*start, *tokenizer.encode(detokenized)]
    num_bytes = len(detokenized.encode())
    if start or not ids:
        return Document(np.array(ids, dtype=np.int32), num_bytes, words)
    # Without a prefix the first token is not predicted: its bytes, and one word, are not counted.
    return Document(np.array(ids, dtype=np.int32), num_bytes - len(tokenizer.decode(ids[:1]).encode()), words - 1)


# -- detokenization of WikiText and Penn Treebank, as in Megatron-LM's zero-shot tasks ---------------
#
# The rules are applied in order to the whole file, each from left to right once.

Detokenize = Callable[[str], str]

_PAIRS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(\()\s*([^)]*?)\s*(\))",
        r"(\[)\s*([^\]]*?)\s*(\])",
        r"(\{)\s*([^}]*?)\s*(\})",
        r'(")\s*([^"]*?)\s*(")',
        r"(')\s*([^']*?)\s*(')",
    )
)
"""Brackets, then quotes: without the white space next to them on the inside."""
_WIKITEXT_BEFORE = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
_WIKITEXT_AFTER = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
_PTB = (
    (" '", "'"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" n't", "n't"),
    (" N ", "1 "),
    ("$ 1", "$1"),
    ("# 1", "#1"),
)


def wikitext(text: str) -> str:
    """Undo the tokenization of the WikiText files; quotes are paired across lines."""
    text = _replaced(text, _WIKITEXT_BEFORE)
    for pair in _PAIRS:
        text = pair.sub(r"\1\2\3", text)
    return _replaced(text, _WIKITEXT_AFTER)


def ptb(text: str) -> str:
    """Undo the tokenization of the Penn Treebank files."""
    return _replaced(text, _PTB)


def unchanged(text: str) -> str:
    return text


DETOKENIZERS: dict[str, Detokenize] = {"none": unchanged, "wikitext": wikitext, "ptb": ptb}


def _replaced(text: str, rules: tuple[tuple[str, str], ...]) -> str:
    for old, replacement in rules:
        text = text.replace(old, replacement)
    return text
