"""What all tokenizers share: padding, fingerprints, travelling with a checkpoint, and no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_core.errors import ConfigError, DataError
from mt_core.plugins import load_plugins
from mt_core.specs import TOKENIZERS
from mt_data.tokenizers.base import BaseTokenizer, materialize
from mt_data.tokenizers.byte_level import ByteLevelConfig, build_byte_level
from mt_data.tokenizers.null import NullConfig, build_null


@given(st.text())
def test_byte_level_is_utf8_and_comes_back(text: str) -> None:
    ours = build_byte_level(ByteLevelConfig())
    assert ours.encode(text) == list(text.encode())
    assert ours.decode(ours.encode(text)) == text


def test_byte_level_special_ids() -> None:
    ours = build_byte_level(ByteLevelConfig(vocab_extra_ids=2))
    special = ours.special
    assert (special.eod, special.bos, special.eos, special.pad, special.mask, special.cls, special.sep) == (
        256,
        256,
        256,
        257,
        258,
        259,
        260,
    )
    assert special.sentinels == (261, 262)
    assert ours.vocab_size == 263
    assert ours.decode([104, 0xC3, 256, 262]) == "h\ufffd<eod><extra_id_1>"
    with pytest.raises(DataError, match="id 263 is not one of this tokenizer's 0 to 262"):
        ours.decode([263])
    with pytest.raises(DataError, match=r"U\+D83D at character 1"):
        ours.encode("a\ud83d")


def test_null_reads_numbers() -> None:
    ours = build_null(NullConfig(vocab_size=1000))
    assert ours.encode("17 4\n 999 0") == [17, 4, 999, 0]
    assert ours.encode("") == []
    assert ours.decode([5, 6]) == "5 6"
    assert (ours.vocab_size, ours.special.eod, ours.special.pad) == (1000, 999, None)
    other = build_null(NullConfig(vocab_size=1000, null_tokenizer_eod_id=0, null_tokenizer_pad_id=1))
    assert (other.special.eod, other.special.pad) == (0, 1)
    assert other.fingerprint() != ours.fingerprint()


@pytest.mark.parametrize(
    ("text", "message"), [("1 x", "'x'"), ("1000", "0 to 999"), ("-1", "id -1"), ("9" * 30, "whole numbers")]
)
def test_null_refuses_what_is_no_id(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_null(NullConfig(vocab_size=1000)).encode(text)


def test_null_refuses_an_eod_past_the_vocabulary() -> None:
    with pytest.raises(ConfigError, match=r"null_tokenizer_eod_id=10 is not below tokenizer.vocab_size=10"):
        build_null(NullConfig(vocab_size=10, null_tokenizer_eod_id=10))


@pytest.fixture
def every_section(
    gpt2_files: dict[str, str],
    bert_vocab_file: str,
    sentencepiece_file: str,
    hugging_face_directory: str,
    rank_file: str,
) -> dict[str, dict[str, Any]]:
    """A configuration of each registered tokenizer."""
    return {
        "ByteLevelTokenizer": {"vocab_extra_ids": 3},
        "GPT2BPETokenizer": gpt2_files | {"vocab_extra_ids": 3},
        "BertWordPieceLowerCase": {"vocab_file": bert_vocab_file},
        "BertWordPieceCase": {"vocab_file": bert_vocab_file},
        "HuggingFaceTokenizer": {"tokenizer_model": hugging_face_directory},
        "SentencePieceTokenizer": {"tokenizer_model": sentencepiece_file, "vocab_extra_ids": 3},
        "GPTSentencePieceTokenizer": {"tokenizer_model": sentencepiece_file},
        "Llama2Tokenizer": {"tokenizer_model": sentencepiece_file, "tokenizer_sentencepiece_legacy": True},
        "TikTokenizer": {"tokenizer_model": rank_file, "tiktoken_pattern": "cl100k"},
        "NullTokenizer": {"vocab_size": 100},
    }


def test_every_registered_tokenizer_can_be_copied(
    every_section: dict[str, dict[str, Any]], tmp_path: Path, adversarial: list[str]
) -> None:
    """files() and the configuration are enough to build it again elsewhere: same fingerprint, same ids."""
    registry = load_plugins()[TOKENIZERS]
    ours = [name for name in registry.names() if registry.owners(name)[0].distribution == "mt-data"]
    assert set(ours) == set(every_section)
    fingerprints = set()
    for name, keys in every_section.items():
        spec = registry.get(name)
        config = spec.config_type.load()(tokenizer_type=name, **keys)
        first = spec.build.load()(config)
        moved = materialize(config, first.files(), tmp_path / name)
        again = spec.build.load()(moved)
        assert isinstance(again, BaseTokenizer)
        assert again.fingerprint() == first.fingerprint()
        assert again.special == first.special
        assert again.vocab_size == first.vocab_size
        for text in adversarial if name != "NullTokenizer" else ["1 2"]:
            assert again.encode(text) == first.encode(text)
        assert not first.files() or all(value != getattr(config, key) for key, value in changed(config, moved))
        fingerprints.add(first.fingerprint())
    assert len(fingerprints) == len(every_section)


def changed(before: Any, after: Any) -> list[tuple[str, Any]]:
    return [(key, getattr(after, key)) for key in type(before).file_keys]


def test_materialize_names_a_missing_file_and_refuses_folders(gpt2_files: dict[str, str], tmp_path: Path) -> None:
    from mt_data.tokenizers.gpt2_bpe import GPT2BPEConfig

    config = GPT2BPEConfig(**gpt2_files)
    with pytest.raises(DataError, match=r"tokenizer.merge_file needs the file 'merges.txt'"):
        materialize(config, {"vocab.json": b"{}"}, tmp_path)
    with pytest.raises(DataError, match="plain file name"):
        materialize(config, {"../vocab.json": b"{}"}, tmp_path)


@pytest.mark.slow
def test_tokenizers_do_without_torch_and_transformers(gpt2_files: dict[str, str]) -> None:
    program = f"""
import sys
from mt_core.plugins import load_plugins
from mt_core.specs import TOKENIZERS
spec = load_plugins()[TOKENIZERS].get("GPT2BPETokenizer")
tokenizer = spec.build.load()(spec.config_type.load()(**{gpt2_files!r}))
tokenizer.encode_array("a b")
for name in ("bert_wordpiece", "hugging_face", "sentence_piece", "tik_token", "training"):
    __import__("mt_data.tokenizers." + name)
print([name for name in ("torch", "transformers", "sentencepiece", "tokenizers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
