"""Which words are masked, and with what."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SplitRequest
from mt_data.datasets.bert import BertDataConfig, build_bert, truncate_pair
from mt_data.datasets.masking import MaskingRules, SpanMasker, masking_rules
from mt_data.tokenizers.byte_level import ByteLevelTokenizer

VOCAB = 200
CONTINUES = range(150, VOCAB)
CLS, SEP = 1, 2


def rules(**changes: Any) -> MaskingRules:
    starts, maskable = np.ones(VOCAB, np.bool_), np.ones(VOCAB, np.bool_)
    starts[CONTINUES.start :] = False
    maskable[[CLS, SEP]] = False
    return replace(MaskingRules(0.15, 3, True, False, False, starts, maskable), **changes)


def close_to(count: int, total: int, share: float) -> bool:
    """Within five standard deviations of a binomial."""
    return abs(count - total * share) <= 5 * (total * share * (1 - share)) ** 0.5


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, VOCAB - 1), max_size=120),
    seed=st.integers(0, 2**32 - 1),
    geometric=st.booleans(),
    full_words=st.booleans(),
    max_ngram=st.integers(1, 10),
    target=st.integers(2, 150),
)
def test_spans_are_whole_words_within_the_budget(
    tokens: list[int], seed: int, geometric: bool, full_words: bool, max_ngram: int, target: int
) -> None:
    masker = SpanMasker(rules(max_ngram=max_ngram, geometric=geometric, full_words=full_words))
    ids = np.array(tokens, np.int64)
    spans = list(masker.spans(ids, target, np.random.RandomState(seed)))
    masked = list(itertools.chain.from_iterable(spans))
    assert len(masked) == len(set(masked))
    assert len(masked) <= min(0.15 * target, max(1, round(len(tokens) * 0.15)))
    assert not set(ids[masked].tolist()) & {CLS, SEP}
    maskable = [place for place, token in enumerate(tokens) if token not in (CLS, SEP)]
    for span in spans:
        first = maskable.index(span[0])
        assert span == maskable[first : first + len(span)]
        starts = [place for place in span if not full_words or tokens[place] not in CONTINUES]
        assert len(starts) <= max_ngram
        if full_words:
            begins = tokens[span[0]] not in CONTINUES or first == 0
            after = maskable[first + len(span)] if first + len(span) < len(maskable) else None
            assert begins
            assert after is None or tokens[after] not in CONTINUES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({}, [6 / 11, 3 / 11, 2 / 11]),
        ({"longer_ngrams": True}, [2 / 11, 3 / 11, 6 / 11]),
        ({"geometric": True}, [0.2, 0.16, 0.64]),
    ],
)
def test_lengths_of_spans_follow_the_distribution(changes: dict[str, Any], shares: list[float]) -> None:
    masker = SpanMasker(rules(**changes))
    ids = np.full(100, 10, np.int64)
    random = np.random.RandomState(0)
    firsts = [next(masker.spans(ids, 100, random)) for _ in range(4000)]
    # The last words of the text have no room for a long span.
    lengths = [len(span) for span in firsts if span[0] < 98]
    for length, share in enumerate(shares, 1):
        assert close_to(lengths.count(length), len(lengths), share), length


def test_masked_tokens_are_replaced_80_10_10(write_sentences: Any, documents: Any, wordpiece: Any) -> None:
    config = BertDataConfig(data_path=[write_sentences(documents)], split="1", data_cache_path=None)
    dataset = build_bert(config, wordpiece, SplitRequest("train", 600, 128, 3))
    assert dataset is not None
    samples = [dataset[number] for number in range(600)]
    tokens, labels = (np.stack([sample[key] for sample in samples]) for key in ("tokens", "labels"))
    masked = labels >= 0
    np.testing.assert_array_equal(masked, np.stack([sample["loss_mask"] for sample in samples]) == 1)
    total, found, true = int(masked.sum()), tokens[masked], labels[masked]
    assert total > 6000
    by_mask = int((found == wordpiece.special.mask).sum())
    kept = int((found == true).sum())
    # A random id is the true one, or the mask, once in vocab_size cases.
    once = 0.1 / wordpiece.vocab_size
    assert close_to(by_mask, total, 0.8 + once)
    assert close_to(kept, total, 0.1 + once)
    assert len(set(found.tolist())) > wordpiece.vocab_size * 0.9
    assert (labels[~masked] == -1).all()


def test_bert_sample_is_the_text_of_its_sentences(write_sentences: Any, documents: Any, wordpiece: Any) -> None:
    """CLS A SEP B SEP holds, unmasked and put in order, consecutive sentences of one document."""
    prefix = write_sentences(documents)
    config = BertDataConfig(data_path=[prefix], split="1", short_seq_prob=0.3)
    dataset: Any = build_bert(config, wordpiece, SplitRequest("train", 300, 96, 3))
    sentences = [sentence for document in documents for sentence in document]
    special = wordpiece.special
    seen = {"exchanged": 0, "truncated": 0, "short": 0}
    for number in range(300):
        sample = dataset[number]
        first, end, target = dataset.samples.row(number)
        text = np.where(sample["labels"] >= 0, sample["labels"], sample["tokens"])
        length = int(sample["padding_mask"].sum())
        assert (text[length:] == special.pad).all()
        cut = [0, *np.flatnonzero(text[:length] == special.sep).tolist()]
        assert text[0] == special.cls
        assert len(cut) == 3
        assert cut[-1] == length - 1
        a, b = text[1 : cut[1]].tolist(), text[cut[1] + 1 : cut[2]].tolist()
        np.testing.assert_array_equal(sample["tokentype_ids"][cut[1] + 1 : length], 1)
        assert sample["tokentype_ids"].sum() == length - cut[1] - 1
        whole = [token for sentence in sentences[first:end] for token in sentence]
        assert len(a) + len(b) == min(len(whole), target)
        assert sample["truncated"] == (len(whole) > target)
        if not sample["truncated"]:
            assert (b + a if sample["is_random"] else a + b) == whole
        seen["exchanged"] += int(sample["is_random"])
        seen["truncated"] += int(sample["truncated"])
        seen["short"] += target < 93
    assert close_to(seen["exchanged"], 300, 0.5)
    assert seen["truncated"] > 20
    assert close_to(seen["short"], 300, 1 / 3)


def test_bert_without_the_second_head_has_one_stretch(write_sentences: Any, documents: Any, wordpiece: Any) -> None:
    config = BertDataConfig(data_path=[write_sentences(documents)], split="1", bert_binary_head=False)
    dataset = build_bert(config, wordpiece, SplitRequest("train", 20, 64, 3))
    assert dataset is not None
    for number in range(20):
        sample = dataset[number]
        assert sample["tokentype_ids"].sum() == 0
        assert sample["is_random"] == 0
        assert (sample["tokens"] == wordpiece.special.sep).sum() <= 2


@given(lengths=st.tuples(st.integers(0, 40), st.integers(0, 40)), target=st.integers(0, 60), seed=st.integers(0, 1000))
def test_truncation_takes_ends_of_the_longer_part(lengths: tuple[int, int], target: int, seed: int) -> None:
    a, b = np.arange(lengths[0]), np.arange(100, 100 + lengths[1])
    expected_a, expected_b = list(a), list(b)
    random = np.random.RandomState(seed)
    while len(expected_a) + len(expected_b) > target:
        part = expected_a if len(expected_a) > len(expected_b) else expected_b
        part.pop(0 if random.random_sample() < 0.5 else -1)
    found_a, found_b = truncate_pair(a, b, target, np.random.RandomState(seed))
    assert (found_a.tolist(), found_b.tolist()) == (expected_a, expected_b)


def test_samples_do_not_depend_on_what_was_read_before(write_sentences: Any, documents: Any, wordpiece: Any) -> None:
    config = BertDataConfig(data_path=[write_sentences(documents)], split="8,1,1")
    request = SplitRequest("train", 50, 64, 7)
    one, other = build_bert(config, wordpiece, request), build_bert(config, wordpiece, request)
    assert one is not None
    assert other is not None
    for number in reversed(range(0, 50, 7)):
        other[number]
    for key, value in one[13].items():
        np.testing.assert_array_equal(value, other[13][key])
    assert one.describe(13) == other.describe(13)
    assert "document " in one.describe(13)
    with pytest.raises(IndexError, match=f"which has {len(one)} samples"):
        one[len(one)]


def test_bad_configuration_names_the_key(write_sentences: Any, documents: Any, wordpiece: Any, tmp_path: Path) -> None:
    prefix = write_sentences(documents)
    request = SplitRequest("train", 5, 64, 7)
    with pytest.raises(ValueError, match=r"data\.mask_prob=1\.0 must lie between 0 and 1"):
        BertDataConfig(data_path=[prefix], mask_prob=1.0)
    with pytest.raises(ValueError, match=r"data\.reset_attention_mask=True has no effect"):
        BertDataConfig(data_path=[prefix], reset_attention_mask=True)
    with pytest.raises(ValueError, match="masking_use_longer_ngrams=true has no effect"):
        BertDataConfig(data_path=[prefix], masking_use_longer_ngrams=True, masking_use_geometric_distribution=True)
    with pytest.raises(ConfigError, match=r"masking_do_full_word=true needs a tokenizer with WordPiece"):
        masking_rules(BertDataConfig(data_path=[prefix]), ByteLevelTokenizer(), ())
    with pytest.raises(ConfigError, match=r"data\.seq_length=4 must be 5 or more"):
        build_bert(BertDataConfig(data_path=[prefix]), wordpiece, SplitRequest("train", 5, 4, 7))
    text = tmp_path / "corpus.jsonl"
    text.write_text('{"text": "a b"}\n')
    with pytest.raises(DataError, match=r"raw text, which data\.dataset_type=.bert. does not take"):
        build_bert(BertDataConfig(data_path=[str(text)], split="1"), wordpiece, request)
    foreign = write_sentences([[[10, 9999], [11]]], "foreign")
    dataset = build_bert(BertDataConfig(data_path=[foreign], split="1"), wordpiece, request)
    assert dataset is not None
    with pytest.raises(DataError, match="ids from 10 to 9999, and the tokenizer has"):
        dataset[0]
    single = write_sentences([[[10, 11]], [[12]]], "single")
    with pytest.raises(DataError, match=r"single, train split: none of the 2 documents .* at least 2 sentences"):
        build_bert(BertDataConfig(data_path=[single], split="1"), wordpiece, request)
