"""The built-in corpus with neighbours found by MinHash."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mt_core.interfaces import Split, SplitRequest, Tokenizer
from mt_data.datasets.builtin import NAME, build_builtin
from mt_data.datasets.retro.config import BuiltinRetroDataConfig
from mt_data.datasets.retro.database import StreamDatabase, TokenStream
from mt_data.datasets.retro.dataset import Retrieval, RetroDataset, items_of, retro_dataset
from mt_data.datasets.samples import SampleRules


def build_builtin_retro(config: BuiltinRetroDataConfig, tokenizer: Tokenizer, request: SplitRequest) -> RetroDataset:
    """Samples of RETRO_SAMPLE over the documents of `request.split`; the database is the training split.

    Raises DataError when this Python carries no text, or too little for one sample.
    """

    def stream_of(split: Split) -> TokenStream:
        # Only the tokens of the split are used; its GPT samples, in another order than RETRO's, are not read.
        documents = build_builtin(config, tokenizer, replace(request, split=split, num_samples=None))
        return TokenStream(documents.source, f"{NAME} ({split})")

    database = stream_of("train")
    training = request.split == "train"
    text = database if training else stream_of(request.split)
    chunk = config.retro_chunk_length
    numbers = nearest_chunks(
        chunks_of(text, chunk, chunk),
        chunks_of(database, chunk, config.retrieved_length),
        config.retro_num_neighbors,
        same_text=training,
    )
    rules = SampleRules.of(config, tokenizer)
    retrieval = Retrieval(numbers, StreamDatabase(database, chunk), chunk, config.retrieved_length, rules.vocab_size)
    items = range(items_of(text, request.sequence_length))
    return retro_dataset(text, items, config, request, rules, retrieval)


# -- similar chunks by MinHash (Broder, 1997), the same on every machine, in linear time -------------
#
# The signature of a chunk is, for each of 16 hash functions, the smallest hash of its runs of four tokens. Two chunks
# agree in a function with a probability of the share of runs that they have in common.

RUN = 4
FUNCTIONS = 16
CANDIDATES = 8
"""Chunks that are looked at of all that agree with a chunk in one function."""
ROWS = 2048
"""Chunks whose neighbours are found at a time."""


@dataclass(frozen=True)
class Chunks:
    """signatures: [chunks, FUNCTIONS]. documents: [chunks, 2], the first and the last document of a chunk; for chunks
    of a database, with what is retrieved behind them."""

    signatures: NDArray[np.uint64]
    documents: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.signatures)


def chunks_of(stream: TokenStream, chunk_length: int, reach: int) -> Chunks:
    """All whole chunks of the stream. reach: tokens from the beginning of a chunk whose documents count."""
    count = len(stream) // chunk_length
    tokens = stream.read(0, count * chunk_length).reshape(count, chunk_length)
    starts = np.arange(count, dtype=np.int64) * chunk_length
    # Last token that counts of each chunk, [chunks].
    ends = np.minimum(starts + reach, max(len(stream), 1)) - 1
    documents = np.stack([stream.sequences_at(starts), stream.sequences_at(ends)], axis=1)
    return Chunks(signatures_of(tokens), documents)


def signatures_of(tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
    """[chunks, m] -> [chunks, FUNCTIONS]"""
    # Fixed and from the legacy generator, whose numbers NumPy does not change: neighbours depend on the text alone.
    random = np.random.RandomState(0)
    # Odd factors modulo 2^64: one for each place of a run, and one for each function.
    places, functions = (
        random.randint(0, 2**62, n).astype(np.uint64) * np.uint64(2) + np.uint64(1) for n in (RUN, FUNCTIONS)
    )
    run = min(RUN, tokens.shape[1])
    # [chunks, m - run + 1, run], a view
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), run, axis=1)
    # [chunks, m - run + 1]: a polynomial hash modulo 2^64. 1 is added so that id 0 counts too.
    runs = ((windows + np.uint64(1)) * places[:run]).sum(-1, dtype=np.uint64)
    # Products by odd factors mix upwards only; the shift brings high bits down before the factors of the functions.
    runs ^= runs >> np.uint64(29)
    # The smallest of a chunk's hashes under one function: equal in two chunks with the probability of their Jaccard
    # similarity (MinHash).
    return np.stack([(runs * factor).min(1) for factor in functions], axis=1)


def nearest_chunks(queries: Chunks, database: Chunks, neighbors: int, *, same_text: bool = False) -> NDArray[np.int64]:
    """[queries, neighbors]: numbers of the chunks of the database that agree in the most functions, the nearest
    first, of equal ones the lower number; -1 where fewer agree in any.

    Where more than CANDIDATES chunks agree with a query in one function, as many of them are looked at, evenly spread.
    same_text: queries and database are one text. Chunks that touch a document of the query are then left out, since
    they would tell what comes next.
    """
    nearest = np.full((len(queries), neighbors), -1, np.int64)
    if not len(database):
        return nearest
    # One sorted list for each function: chunks with equal values are adjacent in it and found by bisection.
    orders = [np.argsort(column, kind="stable") for column in database.signatures.T]
    for start in range(0, len(queries), ROWS):
        rows = slice(start, start + ROWS)
        signatures = queries.signatures[rows]
        candidates = np.concatenate(
            [_agreeing(signatures[:, f], database.signatures[:, f], orders[f]) for f in range(FUNCTIONS)], axis=1
        )
        # [rows, candidates]: functions in which both agree; [rows, candidates, FUNCTIONS] before the sum, so ROWS
        # bounds memory.
        agreeing = (signatures[:, None] == database.signatures[candidates]).sum(-1)
        left_out = candidates < 0
        if same_text:
            left_out |= _touch(queries.documents[rows, None], database.documents[candidates])
        # One number to order by: more agreement first, then the lower number, as every candidate is below the factor.
        rank = np.where(left_out, -1, agreeing * (len(database) + 1) - candidates)
        for place in range(neighbors):
            best = rank.argmax(1)[:, None]
            chosen = np.take_along_axis(candidates, best, 1)
            chosen = np.where(np.take_along_axis(rank, best, 1) >= 0, chosen, -1)
            nearest[rows, place] = chosen[:, 0]
            # A chunk that agrees in several functions is a candidate several times; all of its places are struck out.
            rank[candidates == chosen] = -1
    return nearest


def _agreeing(queries: NDArray[np.uint64], database: NDArray[np.uint64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """[queries, CANDIDATES]: chunks of the database with a query's value, -1 for none. order sorts the database."""
    values = database[order]
    first = np.searchsorted(values, queries, side="left")[:, None]
    count = np.searchsorted(values, queries, side="right")[:, None] - first
    steps = np.arange(CANDIDATES)[None]
    # [queries, CANDIDATES] places in the sorted list, spread over the run of equal values where it is longer.
    places = first + np.where(count > CANDIDATES, steps * count // CANDIDATES, steps)
    exists = steps < count
    return np.where(exists, order[np.where(exists, places, 0)], -1)


def _touch(left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Ranges of documents [..., 2], ends included -> [...], True where they have one in common."""
    return (left[..., 0] <= right[..., 1]) & (right[..., 0] <= left[..., 1])
