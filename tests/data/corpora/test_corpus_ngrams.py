"""Words, n-gram hashes, grouping and disjoint sets against plain Python."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_data.corpora.grouping import DisjointSets, iter_equal_groups
from mt_data.corpora.words import character_hashes, iter_word_spans, ngram_hashes, normalized_words, word_hashes

WORDS = st.lists(st.sampled_from(["a", "b", "ab", "ba", "é", "😀"]), min_size=1, max_size=30)


def test_words_are_gpt3s_grams() -> None:
    assert normalized_words('  "Hello," she\tsaid - it\'s 5%!') == ["hello", "she", "said", "its", "5"]
    assert normalized_words("ΣΟΦΟΣ – हिन्दी, 𝒙+1") == ["σοφος", "हिन्दी", "x1"]  # 𝒙 is an x in NFKC
    assert normalized_words("我爱 北京a。b") == ["我", "爱", "北", "京", "ab"]
    assert normalized_words("… ¿? 🎉") == []


@given(st.text())
def test_spans_are_of_the_normalized_words(text: str) -> None:
    spans = list(iter_word_spans(text))
    assert [normalized_words(text[start:end]) for start, end in spans] == [[word] for word in normalized_words(text)]


LETTERS = "aeéüÅçñ ßςがぱ한글िक.-¨"


@given(st.text(st.sampled_from(LETTERS)))
def test_words_are_the_same_in_composed_and_decomposed_form(text: str) -> None:
    composed, decomposed = (unicodedata.normalize(form, text) for form in ("NFC", "NFD"))
    assert normalized_words(composed) == normalized_words(decomposed)


def test_compatible_characters_are_the_same_words() -> None:
    assert normalized_words("ﬁnd Ｆｉｎｄ Ⅸ ² ｶﾞ") == ["find", "find", "ix", "2", "ガ"]


@given(WORDS, st.integers(1, 4))
def test_ngram_hashes_agree_exactly_where_the_ngrams_do(words: list[str], n: int) -> None:
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    hashes = ngram_hashes(word_hashes(words), n).tolist()
    assert len(hashes) == len(grams)
    assert len(set(zip(grams, hashes, strict=True))) == len(set(grams)) == len(set(hashes))


def test_hashes_do_not_depend_on_what_stands_around() -> None:
    assert ngram_hashes(word_hashes(["x", "long", "way"]), 2)[1] == ngram_hashes(word_hashes(["long", "way"]), 2)[0]
    assert ngram_hashes(character_hashes("abc"), 2)[1] == ngram_hashes(character_hashes("bc"), 2)[0]
    assert word_hashes(["ab", "c"])[0] != word_hashes(["a", "bc"])[0]


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**63]), max_size=50), st.sampled_from([48, 480, 10**6])
)
def test_groups_are_all_rows_of_a_key(values: list[int], memory: int) -> None:
    keys = np.array(values, np.uint64).reshape(-1, 1)
    chunks = [(start, keys[start : start + 7]) for start in range(0, len(keys), 7)]
    found = {tuple(group.tolist()) for group in iter_equal_groups(lambda: chunks, len(keys), 1, memory)}
    wanted = {tuple(i for i, other in enumerate(values) if other == value) for value in values}
    assert found == {group for group in wanted if len(group) > 1}


def test_groups_compare_all_words_of_a_key() -> None:
    keys = np.array([[5, 1], [5, 2], [5, 1]], np.uint64)
    assert [group.tolist() for group in iter_equal_groups(lambda: [(0, keys)], 3, 2, 10**6)] == [[0, 2]]


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=30), st.integers(1, 20))
def test_sets_are_the_connected_components(edges: list[tuple[int, int]], chunk: int) -> None:
    sets, first = DisjointSets(20), list(range(20))
    for one, other in edges:
        sets.union(one, other)
        low, high = sorted((first[one], first[other]))
        first = [low if label == high else label for label in first]
    assert sets.flatten(chunk).tolist() == first
