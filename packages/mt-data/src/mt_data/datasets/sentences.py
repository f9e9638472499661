"""Data sets over indexed token files whose sequences are the sentences of documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_core.specs import Dataset, SplitRequest, Tokenizer
from mt_data.datasets.config import IndexedDataConfig
from mt_data.datasets.opening import BuiltSplit, OpenedTokens, build_from_files
from mt_data.datasets.progress import index_progress
from mt_data.datasets.sentence_index import SentenceIndexPlan, build_sentence_index


class SentenceSource(Protocol):
    """What is read of an indexed dataset (mt_data.indexed): a sequence is a sentence.

    document_indices int64 [documents + 1]: number of the first sentence of each document, and of all.
    """

    @property
    def sequence_lengths(self) -> NDArray[np.int32]: ...

    @property
    def document_indices(self) -> NDArray[np.int64]: ...

    def read(self, index: int) -> np.ndarray: ...

    def fingerprint(self) -> str: ...


class SentenceSamples:
    """Rows of a sentence index (mt_data.datasets.sentence_index), with the sentences behind them."""

    def __init__(self, source: SentenceSource, index: NDArray[np.unsignedinteger], vocab_size: int, name: str) -> None:
        self.source = source
        self.index = index
        self.vocab_size = vocab_size
        self.name = name

    def __len__(self) -> int:
        return len(self.index)

    def fingerprint(self) -> str:
        """The content of the token file."""
        return self.source.fingerprint()

    def row(self, index: int) -> list[int]:
        """The numbers of row `index`; IndexError outside of [0, len)."""
        if not 0 <= index < len(self.index):
            raise IndexError(f"sample {index} of {self.name}, which has {len(self.index)} samples")
        return self.index[index].tolist()

    def sentences(self, index: int) -> list[NDArray[np.int64]]:
        """The tokens of each sentence of a sample. Raises DataError for an id that the tokenizer does not have."""
        first, end = self.row(index)[:2]
        sentences = [self.source.read(number).astype(np.int64) for number in range(first, end)]
        for number, tokens in enumerate(sentences, first):
            # As unsigned numbers negative ids are the largest.
            if len(tokens) and tokens.view(np.uint64).max() >= self.vocab_size:
                raise DataError(
                    f"{self.name}, sentence {number} has ids from {tokens.min()} to {tokens.max()}, and the tokenizer "
                    f"has {self.vocab_size} ids; configure the tokenizer that the data was made with, or "
                    "preprocess the text again"
                )
        return sentences

    def describe(self, index: int) -> str:
        first, end = self.row(index)[:2]
        bounds = self.source.document_indices
        document = int(np.searchsorted(bounds, first, side="right")) - 1
        start = int(bounds[document])
        return f"{self.name}: document {document}, sentences {first - start}..{end - 1 - start}"


class SentenceDataset:
    """Base of data sets whose sample k is made of row k of a sentence index."""

    def __init__(self, samples: SentenceSamples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def fingerprint(self) -> str:
        """The content of the token file."""
        return self.samples.fingerprint()

    def describe(self, index: int) -> str:
        return self.samples.describe(index)


def build_sentence_datasets(
    config: IndexedDataConfig,
    tokenizer: Tokenizer,
    request: SplitRequest,
    plan: SentenceIndexPlan,
    make: Callable[[SentenceSamples], Dataset],
) -> BuiltSplit:
    """`make` of the samples of each token file by `plan`, blended; None for a split without data."""

    def make_one(tokens: OpenedTokens, num_samples: int | None) -> Dataset:
        own = replace(plan, num_samples=num_samples)
        return make(SentenceSamples(tokens.reader, _index(tokens, own), tokenizer.vocab_size, tokens.name))

    return build_from_files(config, tokenizer, request, make_one)


def _index(tokens: OpenedTokens, plan: SentenceIndexPlan) -> NDArray[np.unsignedinteger]:
    reader = tokens.reader
    elements = tokens.elements(reader.num_documents, "documents")
    # [documents of the split + 1]: one boundary more than documents, the end of the last one. Splits are cut between
    # documents here, between sequences in GPT data sets, as in Megatron.
    bounds = reader.document_indices[elements.start : elements.stop + 1]

    def build() -> dict[str, NDArray[np.unsignedinteger]]:
        title = f"sentence index of {tokens.name}, {tokens.split}"
        with index_progress(title, plan.num_samples or len(elements)) as progress:
            return {"samples": build_sentence_index(bounds, reader.sequence_lengths, plan, progress)}

    try:
        return tokens.cache.get(tokens.cache_key("sentences", elements, **asdict(plan)), build)["samples"]
    except DataError as error:
        raise DataError(f"{tokens.name}, {tokens.split} split: {error}") from error
