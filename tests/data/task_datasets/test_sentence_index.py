"""The sentence index against the rules written as one plain loop over sentences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_core.errors import DataError
from mt_data.datasets import sentences
from mt_data.datasets.mersenne_twister import Mt19937, Mt1993764
from mt_data.datasets.sentences import (
    LONG_SENTENCE,
    BlockIndexPlan,
    SentenceIndexPlan,
    build_block_index,
    build_sentence_index,
)

Rows = list[list[int]]
corpora = st.lists(
    st.lists(st.one_of(st.integers(0, 40), st.just(LONG_SENTENCE + 1), st.just(LONG_SENTENCE)), max_size=12),
    min_size=1,
    max_size=12,
)


def shuffled(rows: Rows, seed: int) -> Rows:
    numbers = Mt1993764(seed + 1).draw(len(rows)).tolist()
    for number, row in zip(numbers, range(len(rows) - 1, 0, -1), strict=False):
        other = number % (row + 1)
        rows[row], rows[other] = rows[other], rows[row]
    return rows


def plain_sentence_index(documents: list[list[int]], plan: SentenceIndexPlan) -> Rows:
    """Sentence by sentence: add it, and close the sample when it is long enough and enough is left."""
    random = Mt19937(plan.seed)
    # C++ rounds a half up, where Python's round would take 2 for 2.5.
    ratio = int(1 / plan.short_sequence_probability + 0.5) if plan.short_sequence_probability else 0

    def target() -> int:
        if not ratio:
            return plan.max_length
        number = int(random.draw(1)[0])
        return 2 + number % (plan.max_length - 1) if number % ratio == 0 else plan.max_length

    rows: Rows = []
    while not rows or len(rows) < (plan.num_samples or 0):
        first = 0
        for lengths in documents:
            left = len(lengths)
            if left >= plan.min_sentences and (left == 1 or max(lengths) <= LONG_SENTENCE):
                start, tokens, taken, wanted = first, 0, 0, target()
                for number, length in enumerate(lengths, first):
                    tokens, taken, left = tokens + length, taken + 1, left - 1
                    if left == 0 or (tokens >= wanted and left > 1 and taken >= plan.min_sentences):
                        rows.append([start, number + 1, wanted])
                        start, tokens, taken, wanted = number + 1, 0, 0, target()
            first += len(lengths)
        if not rows:
            return []
    return shuffled(rows, plan.seed)


def plain_block_index(documents: list[list[int]], titles: list[int], plan: BlockIndexPlan) -> Rows:
    rows: Rows = []
    while not rows or len(rows) < (plan.num_samples or 0):
        first, block = 0, 0
        for document, lengths in enumerate(documents):
            left = len(lengths)
            if left >= plan.min_sentences and max(lengths) <= LONG_SENTENCE:
                start, tokens, taken = first, 0, 0
                for number, length in enumerate(lengths, first):
                    tokens, taken, left = tokens + length, taken + 1, left - 1
                    enough = tokens >= plan.max_length - titles[document]
                    if left == 0 or (enough and left >= plan.min_sentences and taken >= plan.min_sentences):
                        rows.append([start, number + 1, document, block])
                        start, tokens, taken, block = number + 1, 0, 0, block + 1
            first += len(lengths)
        if not rows:
            return []
    return shuffled(rows, plan.seed)


def arrays(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    bounds = np.cumsum([0, *map(len, documents)])
    return bounds, np.array([length for document in documents for length in document], np.int32)


def check(build: Any, expected: Rows) -> None:
    if not expected:
        with pytest.raises(DataError, match="none of the .* documents of the split gives a sample"):
            build()
        return
    found = build()
    assert found.dtype == np.uint32
    assert found.tolist() == expected


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    documents=corpora,
    max_length=st.integers(2, 60),
    min_sentences=st.sampled_from([1, 2]),
    probability=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    num_samples=st.one_of(st.none(), st.integers(1, 60)),
    block=st.sampled_from([1, 7, 1 << 19]),
)
def test_sentence_index_is_that_of_the_plain_loop(
    documents: list[list[int]],
    max_length: int,
    min_sentences: int,
    probability: float,
    num_samples: int | None,
    block: int,
) -> None:
    plan = SentenceIndexPlan(max_length, min_sentences, probability, num_samples, seed=11)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentences, "_BLOCK", block)
        check(lambda: build_sentence_index(*arrays(documents), plan), plain_sentence_index(documents, plan))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    documents=corpora,
    max_length=st.integers(10, 60),
    min_sentences=st.sampled_from([1, 2]),
    num_samples=st.one_of(st.none(), st.integers(1, 60)),
    block=st.sampled_from([1, 7, 1 << 19]),
)
def test_block_index_is_that_of_the_plain_loop(
    documents: list[list[int]], max_length: int, min_sentences: int, num_samples: int | None, block: int
) -> None:
    plan = BlockIndexPlan(max_length, min_sentences, num_samples, seed=5)
    titles = [3 + number % 5 for number in range(len(documents))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentences, "_BLOCK", block)
        check(
            lambda: build_block_index(*arrays(documents), np.array(titles, np.int32), plan),
            plain_block_index(documents, titles, plan),
        )


def test_a_part_of_the_documents_keeps_their_sentence_numbers() -> None:
    documents = [[5, 5, 5], [7, 7], [9, 9, 9, 9]]
    bounds, lengths = arrays(documents)
    plan = SentenceIndexPlan(10, 2, 0.0, None, seed=1)
    assert sorted(build_sentence_index(bounds[1:], lengths, plan).tolist()) == [[3, 5, 10], [5, 7, 10], [7, 9, 10]]
