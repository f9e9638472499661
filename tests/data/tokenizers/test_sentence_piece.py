"""The SentencePiece tokenizers against the library itself and against Megatron's older wrapper, restated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_core.errors import DataError
from mt_data.tokenizers.sentence_piece import SentencePieceConfig, SentencePieceTokenizer, build_sentence_piece

NAMES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


def build(path: str, name: str = "SentencePieceTokenizer", **keys: Any) -> SentencePieceTokenizer:
    return build_sentence_piece(SentencePieceConfig(tokenizer_type=name, tokenizer_model=path, **keys))


def library(path: str) -> Any:
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_file=path)


@pytest.mark.slow
def test_agrees_with_sentencepiece(sentencepiece_file: str, adversarial: list[str]) -> None:
    reference = library(sentencepiece_file)
    for name in NAMES:
        ours = build(sentencepiece_file, name)
        special = ours.special
        assert ours.vocab_size == len(reference)
        assert (special.bos, special.eos, special.eod, special.pad) == (1, 2, 2, None)
        assert (special.cls, special.sep, special.mask) == (None, None, None)
        for text in [*adversarial, "xy" * 100_000]:
            assert ours.encode(text) == reference.encode(text), text
            assert ours.decode(ours.encode(text)) == reference.decode(reference.encode(text))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.text())
def test_agrees_with_sentencepiece_on_any_text(sentencepiece_file: str, text: str) -> None:
    assert build(sentencepiece_file).encode(text) == library(sentencepiece_file).encode(text)


def test_legacy_llama_puts_bos_before(sentencepiece_file: str) -> None:
    ours = build(sentencepiece_file, "Llama2Tokenizer", tokenizer_sentencepiece_legacy=True)
    assert ours.encode("some text") == [1, *library(sentencepiece_file).encode("some text")]
    assert ours.encode("") == [1]


def test_legacy_adds_the_special_tokens_in_megatrons_order(sentencepiece_file: str, adversarial: list[str]) -> None:
    """<CLS>, <SEP>, <EOD>, <MASK>, then pad, bos and eos where the model has none, then the sentinels."""
    reference = library(sentencepiece_file)
    size = len(reference)
    ours = build(sentencepiece_file, tokenizer_sentencepiece_legacy=True, vocab_extra_ids=10)
    special = ours.special
    assert (special.cls, special.sep, special.eod, special.mask) == (size, size + 1, size + 2, size + 3)
    assert (special.pad, special.bos, special.eos) == (size + 4, 1, 2)
    assert special.sentinels == tuple(range(size + 5, size + 15))
    assert ours.vocab_size == size + 15
    ids = {"<CLS>": size, "<SEP>": size + 1, "<EOD>": size + 2, "<MASK>": size + 3, "<PAD>": size + 4}
    ids |= {"<s>": 1, "</s>": 2} | {f"<extra_id_{i}>": size + 5 + i for i in range(10)}
    for text in [*adversarial, "a<EOD>b <extra_id_3>", "<MASK><MASK>"]:
        assert ours.encode(text) == split_and_encode(text, ids, reference)
    assert ours.decode([*reference.encode("a b"), size + 2, *reference.encode("c")]) == "a b <EOD> c"


def split_and_encode(text: str, ids: dict[str, int], reference: Any) -> list[int]:
    """The nearest special token, again and again, as the older wrapper does it."""
    result: list[int] = []
    while found := [(text.index(name), name) for name in ids if name in text]:
        at, name = min(found)
        result += [*reference.encode(text[:at]), ids[name]]
        text = text[at + len(name) :]
    return result + reference.encode(text)


def test_sentinels_without_legacy(sentencepiece_file: str) -> None:
    reference = library(sentencepiece_file)
    ours = build(sentencepiece_file, vocab_extra_ids=2)
    assert ours.special.sentinels == (len(reference), len(reference) + 1)
    assert ours.encode("a<extra_id_1>") == [*reference.encode("a"), len(reference) + 1]
    assert ours.special.eod == 2


def test_bad_models(sentencepiece_file: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    with pytest.raises(DataError, match=r"tokenizer_model='.*tokenizer.model' cannot be read"):
        build(str(path))
    # ModelProto.pieces: a SentencePiece with the piece b"\xff", which the library cannot show.
    path.write_bytes(Path(sentencepiece_file).read_bytes() + b"\x0a\x03\x0a\x01\xff")
    with pytest.raises(DataError, match=r"is no SentencePiece model, or damaged"):
        build(str(path))
    path.write_bytes(b"no model")
    with pytest.raises(DataError, match=r"tokenizer_model='.*' is no SentencePiece model"):
        build(str(path))


def test_lone_surrogate_is_named(sentencepiece_file: str) -> None:
    with pytest.raises(DataError, match=r"U\+D800 at character 0"):
        build(sentencepiece_file).encode("\ud800")
