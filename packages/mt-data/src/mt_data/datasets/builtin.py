"""The text that every Python carries, as a corpus: `pydoc_data.topics` and the standard library's sources.

It needs no download and no preprocessing, so that training can be tried on any machine at once. The text
depends on the Python version, as does everything computed from it.
"""

from __future__ import annotations

import importlib
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from hashlib import sha256
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from mt_core.config.schema import DataConfig
from mt_core.errors import DataError
from mt_core.interfaces import Split, SplitRequest, Tokenizer
from mt_data.datasets.gpt import GPTDataset, plan_index
from mt_data.datasets.gpt_index import build_gpt_index
from mt_data.datasets.samples import SampleRules
from mt_data.indexed.reader import MemoryIndexedDataset

NAME = "the built-in corpus"
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    # Tables of characters are no text; pydoc_data holds the topics, which are taken one by one.
    | {"encodings", "pydoc_data"}
)
HELD_OUT_EVERY = 20
"""One document in so many is for validation, and one for test."""


class BuiltinDataConfig(DataConfig):
    """The text that every Python carries; the documents of each split are fixed by their names."""

    dataset_type: str = "builtin"
    corpus_bytes: PositiveInt = 8_000_000
    """About how much text to take, in bytes, over all splits, each of which gets a document at least. There are about
    10 MB."""


class BuiltinDataset(GPTDataset):
    """The samples of one split, with a yardstick for models trained on them."""

    def reference_losses(self, valid: GPTDataset, samples: Iterable[int]) -> dict[str, float]:
        """Loss on samples of another split of a bigram model counted on this one; nothing for large vocabularies."""
        if self.rules.vocab_size > LARGEST_VOCABULARY:
            return {}
        tokens = np.concatenate([self.source.read(i) for i in range(len(self.source.sequence_lengths))])
        windows = (valid.window(index) for index in samples)
        return {"bigram": bigram_loss(tokens, windows, self.rules.vocab_size)}


def build_builtin(config: BuiltinDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> BuiltinDataset:
    """Samples of CAUSAL_LM_SAMPLE over the documents of `request.split`, in the order of the GPT data set.

    Raises DataError when this Python carries no text, or too little for one sample.
    """
    chosen = [source for source in corpus(config.corpus_bytes) if split_of(source.name) == request.split]
    texts = [(source.name, text) for source in chosen if (text := source.read())]
    if not texts:
        raise DataError(
            f"the {request.split} split of {NAME} has no text with data.corpus_bytes={config.corpus_bytes}; "
            "raise data.corpus_bytes or choose another data.dataset_type"
        )
    documents = [_encode(tokenizer, text) for _, text in texts]
    tokens = MemoryIndexedDataset.from_sequences(documents, prefix=NAME)
    plan = plan_index(
        tokens.sequence_lengths,
        name=NAME,
        split=request.split,
        sequence_length=request.sequence_length,
        num_samples=request.num_samples,
        seed=request.seed,
    )
    # Not cached: it takes a fraction of a second, and there is no file beside which a cache would lie.
    index = build_gpt_index(range(len(tokens)), tokens.sequence_lengths, plan)
    rules = SampleRules.of(config, tokenizer)
    return BuiltinDataset(tokens, index, plan, rules, NAME, document_name=[name for name, _ in texts].__getitem__)


def split_of(name: str) -> Split:
    """The split that a document of this name belongs to, on every machine."""
    place = _hash(name) % HELD_OUT_EVERY
    return {0: "valid", 1: "test"}.get(place, "train")  # type: ignore[return-value]


class Document:
    """A text of the corpus: its name, its size in bytes, and how to read it."""

    def __init__(self, name: str, size: int, read: Callable[[], str]) -> None:
        self.name = name
        self.size = size
        self.read = read


def corpus(limit: int) -> list[Document]:
    """Documents of at most about `limit` bytes, by name, and at least one of each split; which ones are taken depends
    on their names only.

    Raises DataError when there are none.
    """
    total, taken, absent = 0, [], set(get_args(Split))
    for document in _all_documents():
        split = split_of(document.name)
        # Documents come in the order of a hash, so a larger limit adds documents and removes none.
        if total < limit or split in absent:
            total += document.size
            taken.append(document)
            absent.discard(split)
    if not taken:
        raise DataError(
            "this Python has neither pydoc_data.topics nor the sources of its standard library, of which "
            "data.dataset_type=builtin consists; choose another data.dataset_type"
        )
    return sorted(taken, key=lambda document: document.name)


@cache
def _all_documents() -> list[Document]:
    """In the order of a hash of their names. Each split of a data set takes its own of them."""
    return sorted([*_topics(), *_sources()], key=lambda document: _hash(document.name))


def _topics() -> Iterator[Document]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions leave the documentation out
        return
    for name, text in topics.items():
        yield Document(f"pydoc_data.topics/{name}", len(text), partial(str, text))


def _sources() -> Iterator[Document]:
    root = sysconfig.get_paths()["stdlib"]
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        for file in files:
            # _sysconfigdata* names the folders of the machine that built this Python.
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                path = os.path.join(folder, file)  # thousands of Path objects would take longer than all the rest
                name = path[len(root) + 1 :].replace(os.sep, "/")
                yield Document(name, os.stat(path).st_size, partial(_read_source, path))


def _read_source(path: str) -> str:
    """The text in the encoding that the file declares (PEP 263); nothing when it does not keep to it."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (UnicodeDecodeError, SyntaxError, OSError):
        return ""


def _hash(name: str) -> int:
    return int.from_bytes(sha256(name.encode()).digest()[:8], "little")


def _encode(tokenizer: Tokenizer, text: str) -> NDArray[np.integer]:
    """Ids of a document, the end-of-document id last when the tokenizer has one."""
    encode = getattr(tokenizer, "encode_array", tokenizer.encode)
    ids = np.asarray(encode(text))
    eod = tokenizer.special.eod
    return ids if eod is None else np.append(ids, np.asarray([eod], ids.dtype))


# -- loss of a bigram model on the same text, for comparison -----------------------------------------

LARGEST_VOCABULARY = 1024
"""Pairs are counted in a dense table; larger vocabularies get no yardstick."""


def bigram_probabilities(tokens: NDArray[np.integer], vocab_size: int) -> NDArray[np.float64]:
    """[vocab, vocab] P(next | current) from counts of neighbours, one added to each count (Laplace)."""
    # A pair as one number, so that bincount makes the table [vocab * vocab] in one pass.
    pairs = tokens[:-1].astype(np.int64) * vocab_size + tokens[1:]
    counts = np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size) + 1.0
    return counts / counts.sum(axis=1, keepdims=True)


def bigram_loss(tokens: NDArray[np.integer], windows: Iterable[NDArray[np.integer]], vocab_size: int) -> float:
    """Mean -log P over the transitions inside `windows`, of a model counted on `tokens`, in nats."""
    log_probabilities = np.log(bigram_probabilities(tokens, vocab_size))
    losses = [-log_probabilities[window[:-1], window[1:]] for window in windows]
    return float(np.concatenate(losses).mean())
