"""When may tiktoken, which merges by the rank of the result, stand in for merging by listed pairs?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mt_data.tokenizers.merges import BytePairVocabulary, byte_alphabet

Pair = tuple[str, str]


def merge_by_pairs(text: str, merges: Sequence[Pair]) -> list[str]:
    """Textbook BPE: the listed pair of lowest rank, leftmost first, until none is left."""
    ranks = {pair: number for number, pair in enumerate(merges)}
    parts = list(text)
    while True:
        found = [(ranks[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not found:
            return parts
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def merge_by_results(text: str, ranks: Mapping[str, int]) -> list[str]:
    """tiktoken's BPE: the neighbours whose joined text has the lowest rank; a known text is one token."""
    if text in ranks:
        return [text]
    parts = list(text)
    while True:
        joined = [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not joined:
            return parts
        at = min(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def vocabulary(merges: Sequence[Pair]) -> BytePairVocabulary:
    names = dict.fromkeys([*byte_alphabet(), *(left + right for left, right in merges)])
    return BytePairVocabulary({name: number for number, name in enumerate(names)}, tuple(merges))


def agree(merges: Sequence[Pair], longest: int = 8) -> bool:
    ranks = {left + right: number for number, (left, right) in enumerate(merges)}
    texts = ("".join(letters) for length in range(1, longest + 1) for letters in product("ab", repeat=length))
    return all(merge_by_pairs(text, merges) == merge_by_results(text, ranks) for text in texts)


@st.composite
def merge_lists(draw: st.DrawFn) -> list[Pair]:
    """Pairs of letters and of tokens made before, without one pair twice."""
    tokens, merges = ["a", "b"], []
    for _ in range(draw(st.integers(1, 6))):
        pair = draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens))
        assume(pair not in merges)
        merges.append(pair)
        tokens.append(pair[0] + pair[1])
    return merges


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(merge_lists())
def test_merges_by_rank_is_sound(merges: list[Pair]) -> None:
    if vocabulary(merges).merges_by_rank:
        assert agree(merges)


def train(text: str, count: int) -> list[Pair]:
    """BPE training: join the most frequent pair (the first of equals), again and again."""
    words, merges = [list(word) for word in text.split()], []
    for _ in range(count):
        counts: dict[Pair, int] = {}
        for word in words:
            for pair in pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        best = max(counts, key=counts.__getitem__)
        merges.append(best)
        words = [merge_by_pairs("".join(word), merges) for word in words]
    return merges


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab ", max_size=40), st.integers(1, 8))
def test_trained_merges_are_recognized(text: str, count: int) -> None:
    assert vocabulary(train(text, count)).merges_by_rank


@pytest.mark.parametrize(
    "merges",
    [
        [("a", "b"), ("b", "a"), ("a", "ba")],  # "aba" is cut ab|a by then
        [("a", "b"), ("ab", "a"), ("b", "a"), ("a", "ba")],  # two merges make "aba"
        [("a", "bb"), ("b", "b")],  # a part that is made only later
        [("a", "a"), ("a", "aa")],  # leftmost first makes aa|a
    ],
)
def test_merges_that_ranks_alone_get_wrong_are_found(merges: list[Pair]) -> None:
    assert not vocabulary(merges).merges_by_rank


def test_equal_letters_merge_from_the_left() -> None:
    """ "aaa" is aa|a, so (aa, a) is what training would list, and the mirror image is not."""
    merges = [("a", "a"), ("aa", "a")]
    assert vocabulary(merges).merges_by_rank
    assert agree(merges)
