"""The bytes that ids stand for: those of a text's ids are the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mt_core.interfaces import HasTokenBytes
from mt_core.plugins import load_plugins
from mt_core.specs import TOKENIZERS

TEXTS = [
    '{"a": [1, 2.5, "b c"]}',
    "naïve café — 日本語 と 한국어 🙂",
    "def f(x):\n    return x\n",
    "no  such\ttoken \U0010ffff",
]


def build(kind: str, **keys: Any) -> Any:
    spec = load_plugins()[TOKENIZERS].get(kind)
    return spec.build.load()(spec.config_type.load()(tokenizer_type=kind, **keys))


def written(tokenizer: HasTokenBytes, ids: list[int]) -> bytes:
    pieces = tokenizer.token_bytes()
    assert pieces is not None
    return b"".join(pieces[token] or b"" for token in ids)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level(text: str) -> None:
    tokenizer = build("ByteLevelTokenizer")
    assert written(tokenizer, [*tokenizer.encode(text), tokenizer.special.eod]) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2(gpt2_files: dict[str, str], text: str) -> None:
    tokenizer = build("GPT2BPETokenizer", **gpt2_files)
    assert written(tokenizer, [*tokenizer.encode(text), tokenizer.special.eod]) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_tiktoken(rank_file: str, text: str) -> None:
    tokenizer = build("TikTokenizer", tokenizer_model=rank_file)
    assert written(tokenizer, [*tokenizer.encode(text), tokenizer.special.eod]) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_hugging_face(hugging_face_directory: str, text: str) -> None:
    tokenizer = build("HuggingFaceTokenizer", tokenizer_model=hugging_face_directory)
    assert written(tokenizer, tokenizer.encode(text)) == text.encode()


@pytest.mark.parametrize("text", TEXTS[:2])
def test_sentencepiece(sentencepiece_file: str, text: str) -> None:
    """With the space that it puts before a text; its normalization makes one space of several."""
    tokenizer = build("SentencePieceTokenizer", tokenizer_model=sentencepiece_file)
    assert written(tokenizer, tokenizer.encode(text)) == b" " + text.encode()


def test_sentencepiece_in_tokenizers_json(tmp_path: Path) -> None:
    """As Llama's: pieces with a mark for spaces, bytes for what no piece has."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {"<unk>": 0, "\u2581a": 1, "b": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    own = build("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert written(own, own.encode("\u00e9bb")) == "\u00e9bb".encode()
    assert own.token_bytes()[1] == b" a"


def test_tokenizers_whose_ids_have_no_bytes(bert_vocab_file: str) -> None:
    assert build("NullTokenizer", vocab_size=9).token_bytes() is None
    assert build("BertWordPieceCase", vocab_file=bert_vocab_file).token_bytes() is None
