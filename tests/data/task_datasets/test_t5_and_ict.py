"""T5's spans and sentinels, and the queries and blocks of the inverse cloze task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SplitRequest
from mt_data.datasets.ict import ICTDataConfig, build_ict
from mt_data.datasets.t5 import T5DataConfig, build_t5
from mt_data.tokenizers.bert_wordpiece import BertWordPieceConfig, build_bert_wordpiece


def test_the_decoder_restores_the_text(write_sentences: Any, documents: Any, wordpiece: Any) -> None:
    config = T5DataConfig(data_path=[write_sentences(documents)], split="1", decoder_seq_length=64)
    dataset: Any = build_t5(config, wordpiece, SplitRequest("train", 200, 128, 3))
    sentences = [sentence for document in documents for sentence in document]
    special = wordpiece.special
    for number in range(200):
        sample = dataset[number]
        first, end, target = dataset.samples.row(number)
        whole = [token for sentence in sentences[first:end] for token in sentence]
        count = int(sample["decoder_mask"].sum())
        labels, decoder = sample["labels"][:count].tolist(), sample["decoder_tokens"][:count].tolist()
        assert decoder == [special.bos, *labels[:-1]]
        assert labels[-1] == special.eos
        assert (sample["labels"][count:] == -1).all()
        np.testing.assert_array_equal(sample["loss_mask"], sample["decoder_mask"])
        spans: dict[int, list[int]] = {}
        for token in labels[:-1]:
            if token in special.sentinels:
                spans[token] = []
            else:
                spans[list(spans)[-1]].append(token)
        assert list(spans) == list(special.sentinels[: len(spans)])
        encoder = sample["encoder_tokens"][: int(sample["encoder_mask"].sum())].tolist()
        restored = [t for token in encoder for t in spans.get(token, [token])]
        assert restored == whole[:target]
        assert sample["truncated"] == (len(whole) > target)
        assert sum(map(len, spans.values())) <= 0.15 * target


def test_sentinels_and_decoder_positions_can_run_out(
    write_sentences: Any, documents: Any, wordpiece: Any, vocab_file: str
) -> None:
    prefix = write_sentences(documents)
    request = SplitRequest("train", 20, 128, 3)
    few = build_bert_wordpiece(BertWordPieceConfig(vocab_file=vocab_file, vocab_extra_ids=1))
    dataset: Any = build_t5(T5DataConfig(data_path=[prefix], split="1"), few, request)
    with pytest.raises(DataError, match=r"spans are masked and the tokenizer has 1 sentinels; set tokenizer\.vocab_ex"):
        [dataset[number] for number in range(20)]
    dataset = build_t5(T5DataConfig(data_path=[prefix], split="1", decoder_seq_length=8), wordpiece, request)
    with pytest.raises(DataError, match=r"document \d+, .* data\.decoder_seq_length=8 are there; set it to \d+"):
        [dataset[number] for number in range(20)]
    none = build_bert_wordpiece(BertWordPieceConfig(vocab_file=vocab_file))
    with pytest.raises(ConfigError, match=r"needs sentinels, .* set tokenizer\.vocab_extra_ids=100"):
        build_t5(T5DataConfig(data_path=[prefix]), none, request)


def ict(prefix: str, wordpiece: Any, split: Any = "train", samples: int | None = 200, **keys: Any) -> Any:
    config = ICTDataConfig(data_path=[prefix], split="8,2", **keys)
    return build_ict(config, wordpiece, SplitRequest(split, samples, 64, 3))


@pytest.fixture
def titled(write_sentences: Any, documents: Any) -> tuple[str, list[list[int]]]:
    titles = [[50 + number % 40, 60][: 1 + number % 2] for number in range(len(documents))]
    write_sentences([[title] for title in titles], "corpus_title_document")
    return write_sentences(documents), titles


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_query_and_block(titled: Any, documents: Any, wordpiece: Any, split: str, probability: float) -> None:
    prefix, titles = titled
    dataset = ict(prefix, wordpiece, split, query_in_block_prob=probability)
    bounds = np.cumsum([0, *map(len, documents)])
    sentences = [sentence for document in documents for sentence in document]
    special, kept = wordpiece.special, 0
    for number in range(200):
        sample = dataset[number % len(dataset)]
        first, end, document, _ = sample["block_data"].tolist()
        assert bounds[document] <= first < end <= bounds[document + 1]
        assert end - first >= 2
        query = sample["query_tokens"][: int(sample["query_padding_mask"].sum())].tolist()
        context = sample["context_tokens"][: int(sample["context_padding_mask"].sum())].tolist()
        assert (query[0], query[-1], context[0], context[-1]) == (*[special.cls, special.sep] * 2,)
        block = sentences[first:end]
        room = 64 - 3 - len(titles[document])
        head = [special.cls, *titles[document], special.sep]
        whole = [token for sentence in block for token in sentence][:room]
        assert query[1:-1] in block
        if context == [*head, *whole, special.sep]:
            kept += 1
        else:
            without = list(block)
            without.remove(query[1:-1])
            assert context == [*head, *[token for sentence in without for token in sentence][:room], special.sep]
    deviation = (200 * probability * (1 - probability)) ** 0.5
    # A query beyond the cut leaves the same context when it is taken out.
    assert 200 * probability - 5 * deviation <= kept <= 200 * probability + 5 * deviation + 40


def test_a_sample_depends_on_seed_and_number_only(titled: Any, wordpiece: Any) -> None:
    one, other = ict(titled[0], wordpiece), ict(titled[0], wordpiece, samples=1000)
    again = one[5]
    [other[number] for number in range(9)]
    for key, value in one[5].items():
        np.testing.assert_array_equal(value, again[key])


def test_single_sentence_documents_keep_their_query(write_sentences: Any, wordpiece: Any) -> None:
    write_sentences([[[60]], [[61]]], "one_title_document")
    prefix = write_sentences([[[70, 71]], [[72, 73]]], "one_text_sentence")
    config = ICTDataConfig(data_path=[prefix], split="1", query_in_block_prob=0.0, use_one_sent_docs=True)
    dataset = build_ict(config, wordpiece, SplitRequest("train", None, 16, 3))
    assert dataset is not None
    contexts = {tuple(dataset[number]["context_tokens"][:6].tolist()) for number in range(2)}
    assert contexts == {(2, 60, 3, 70, 71, 3), (2, 61, 3, 72, 73, 3)}


def test_titles_that_do_not_fit(write_sentences: Any, documents: Any, wordpiece: Any) -> None:
    prefix = write_sentences(documents)
    write_sentences([[[60]]], "few_titles")
    with pytest.raises(DataError, match=r"few_titles has 1 titles and .* has 120 documents; .* with --json-keys title"):
        ict(prefix, wordpiece, titles_data_path=prefix.replace("corpus_text_sentence", "few_titles"))
    write_sentences([[[60] * 61], *[[[60]]] * 119], "corpus_title_document")
    with pytest.raises(DataError, match=r"corpus_title_document, document 0: the title has 61 tokens"):
        ict(prefix, wordpiece)
    with pytest.raises(ConfigError, match=r"data\.titles_data_path must name the titles of"):
        ict(prefix.replace("corpus_text_sentence", "few_titles"), wordpiece)
