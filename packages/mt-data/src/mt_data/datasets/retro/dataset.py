"""Samples of a token stream, with the neighbours of their chunks (RETRO_SAMPLE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import DataError
from mt_core.interfaces import Split, SplitRequest
from mt_data.datasets.cache import combined
from mt_data.datasets.retro.config import NeighborKeys
from mt_data.datasets.retro.database import Database, Rows, TokenStream
from mt_data.datasets.samples import SampleRules, causal_sample
from mt_data.datasets.splits import epoch_order


@dataclass(frozen=True)
class Retrieval:
    """The neighbours of chunks of a text. numbers: [chunks of the text, K], of chunks of the database, -1 for none.

    chunk_length: m. retrieved_length: r, tokens of a neighbour, from the beginning of its chunk on. vocab_size: one
    more than the largest id of the tokenizer. fingerprint: of neighbours and database, None where it is not known.
    """

    numbers: Rows
    database: Database
    chunk_length: int
    retrieved_length: int
    vocab_size: int
    fingerprint: str | None = None

    def neighbors(self, first: int, count: int) -> dict[str, NDArray[np.int64]]:
        """neighbor_tokens and neighbor_mask [count, K, r] of chunks first, first + 1, ...; 0 for padding."""
        # [count, K]
        numbers = np.asarray(self.numbers[first : first + count], np.int64)
        tokens = np.zeros((*numbers.shape, self.retrieved_length), np.int64)
        mask = np.zeros_like(tokens)
        for chunk, rank in zip(*np.nonzero(numbers >= 0), strict=True):
            number = int(numbers[chunk, rank])
            if number >= len(self.database):
                raise DataError(
                    f"chunk {first + chunk} has the neighbour {number}, and the database {self.database.name} has "
                    f"{len(self.database)} chunks of data.retro_chunk_length={self.chunk_length}; the neighbours were "
                    "found in another database, or with chunks of another length"
                )
            ids = self.database.neighbor(number, self.retrieved_length)
            require_ids(ids, self.vocab_size, f"chunk {number} of the database {self.database.name}")
            tokens[chunk, rank, : len(ids)] = ids
            mask[chunk, rank, : len(ids)] = 1
        return {"neighbor_tokens": tokens, "neighbor_mask": mask}


class RetroDataset:
    """Sample k is item order[k] of the stream: tokens item S ... item S + S, and the neighbours of its S / m chunks."""

    def __init__(
        self, stream: TokenStream, order: NDArray[np.int64], length: int, rules: SampleRules, retrieval: Retrieval
    ) -> None:
        self.stream, self.order, self.length = stream, order, length
        self.rules, self.retrieval = rules, retrieval

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        item = self._item(index)
        # [S + 1]; neighbouring items share one token, the label of the last position of the first.
        window = self.stream.read(item * self.length, self.length + 1)
        require_ids(window, self.rules.vocab_size, f"sample {index}, {self.describe(index)},")
        per_sample = self.length // self.retrieval.chunk_length
        return {
            **causal_sample(window[:-1].copy(), window[1:].copy(), self.rules),
            # Items are multiples of S from the start of the stream, and m divides S: chunks of a sample are rows of the
            # array.
            **self.retrieval.neighbors(item * per_sample, per_sample),
        }

    def fingerprint(self) -> str:
        """The content of the token file, and of the neighbours where it is known."""
        text = self.stream.source.fingerprint()
        return text if self.retrieval.fingerprint is None else combined([text, self.retrieval.fingerprint])

    def describe(self, index: int) -> str:
        start = self._item(index) * self.length
        return f"{self.stream.name}: tokens {start}..{start + self.length - 1} of the file"

    def _item(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.stream.name}, which has {len(self)} samples")
        return int(self.order[index])


def require_ids(tokens: NDArray[np.int64], vocab_size: int, where: str) -> None:
    """Raise DataError for ids that the tokenizer does not have."""
    # As unsigned numbers negative ids are the largest.
    if len(tokens) and tokens.view(np.uint64).max() >= vocab_size:
        wrong = int(tokens[tokens.view(np.uint64) >= vocab_size][0])
        raise DataError(
            f"{where} has the id {wrong}, and the tokenizer has {vocab_size} ids. Configure the tokenizer that the "
            "data was made with, or preprocess the text again"
        )


def items_of(stream: TokenStream, length: int) -> int:
    """Samples that the stream holds: each has one token more, the label of its last."""
    return max(len(stream) - 1, 0) // length


def retro_dataset(
    stream: TokenStream,
    items: range,
    config: NeighborKeys,
    request: SplitRequest,
    rules: SampleRules,
    retrieval: Retrieval,
) -> RetroDataset:
    """The samples of these items, in an order of each epoch's own. Raises DataError when there are none."""
    require_items(items, stream, request.split, request.sequence_length)
    # Chunks of samples are fixed by the stream, so only the order of samples changes between epochs, not their cuts.
    order = items.start + epoch_order(len(items), request.num_samples, request.seed)
    return RetroDataset(stream, order, request.sequence_length, rules, retrieval)


def require_items(items: range, stream: TokenStream, split: Split, length: int) -> None:
    if not len(items):
        raise DataError(
            f"the {split} split of {stream.name} has no sample of data.seq_length={length} (which needs {length + 1} "
            f"tokens); the text has {len(stream)} tokens. Give the split a larger share, add text, or make "
            "data.seq_length smaller"
        )
