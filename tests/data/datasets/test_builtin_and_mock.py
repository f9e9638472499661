"""Data that needs no files."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_core.errors import DataError
from mt_core.interfaces import SplitRequest
from mt_data.datasets import builtin
from mt_data.datasets.builtin import BuiltinDataConfig, build_builtin
from mt_data.datasets.mock import MockDataConfig, MockTokens, build_mock
from mt_data.tokenizers.byte_level import ByteLevelTokenizer


def test_builtin_holds_whole_documents_out(byte_tokenizer: ByteLevelTokenizer) -> None:
    names = {split: set[str]() for split in ("train", "valid", "test")}
    for document in builtin.corpus(1_000_000):
        names[builtin.split_of(document.name)].add(document.name)
    total = sum(map(len, names.values()))
    assert sum(document.size for document in builtin.corpus(1_000_000)) >= 1_000_000
    assert len(names["train"]) > 0.8 * total
    assert names["valid"]
    assert names["test"]
    assert not any("/test/" in name or "site-packages" in name for name in names["train"])


def test_every_split_of_a_small_corpus_has_a_document() -> None:
    """Python 3.12 has none for validation among the first million bytes."""
    assert sorted(builtin.split_of(document.name) for document in builtin.corpus(1)) == ["test", "train", "valid"]


def test_builtin_text_is_that_of_the_library(byte_tokenizer: ByteLevelTokenizer) -> None:
    config = BuiltinDataConfig(corpus_bytes=300_000)
    dataset = build_builtin(config, byte_tokenizer, SplitRequest("train", None, 256, 5))
    root = Path(sysconfig.get_paths()["stdlib"])
    checked = 0
    for number in range(20):
        name = dataset.describe(number).split(": ")[1].split(" tokens")[0]
        if (root / name).is_file() and "," not in dataset.describe(number):
            text = byte_tokenizer.decode(dataset[number]["tokens"].tolist())
            assert text.strip("\ufffd") in (root / name).read_text(encoding="utf-8")
            checked += 1
    assert checked >= 5
    again = build_builtin(config, byte_tokenizer, SplitRequest("train", None, 256, 5))
    np.testing.assert_array_equal(dataset[3]["tokens"], again[3]["tokens"])


def test_a_python_without_text(byte_tokenizer: ByteLevelTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "_all_documents", list)
    with pytest.raises(DataError, match=r"choose another data\.dataset_type"):
        build_builtin(BuiltinDataConfig(), byte_tokenizer, SplitRequest("train", None, 64, 1))


def test_sources_in_another_encoding(tmp_path: Path) -> None:
    latin, broken = tmp_path / "latin.py", tmp_path / "broken.py"
    latin.write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9t\xe9\n")
    broken.write_bytes(b"x = '\xe9'\n")
    assert builtin._read_source(latin).endswith("# été\n")
    assert builtin._read_source(broken) == ""


def test_mock_documents(fake_tokenizer: Any) -> None:
    tokens = MockTokens(vocab_size=100, eod=99)
    lengths = np.random.default_rng(0).integers(1, 4096, 100_000, dtype=np.int32)
    np.testing.assert_array_equal(tokens.sequence_lengths, lengths)
    longest = int(tokens.sequence_lengths.argmax())
    whole = np.append(np.arange(1, tokens.sequence_lengths[longest]) % 100, 99)
    np.testing.assert_array_equal(tokens.read(longest), whole)
    np.testing.assert_array_equal(tokens.read(longest, 90, 30), whole[90:120])
    np.testing.assert_array_equal(tokens.read(longest, 4000), whole[4000:])


def test_mock_documents_are_without_ids_of_media(fake_tokenizer: Any) -> None:
    """A model takes pictures in their place, which these samples have not."""
    request = SplitRequest("train", 4, 64, 1, frozenset({5, 7, 1000}))
    dataset = build_mock(MockDataConfig(), fake_tokenizer(10, 9), request)
    assert dataset is not None
    drawn = {int(token) for index in range(4) for token in dataset[index]["tokens"]}
    assert drawn == {0, 1, 2, 3, 4, 6, 8, 9}
    documents = MockTokens(10, 9, request.media_token_ids)
    np.testing.assert_array_equal(documents.read(0, 0, 9), [1, 2, 3, 4, 6, 8, 9, 0, 1])
    assert (
        documents.fingerprint() != MockTokens(10, 9).fingerprint() == MockTokens(10, 9, frozenset({10})).fingerprint()
    )


def test_mock_samples(fake_tokenizer: Any) -> None:
    dataset = build_mock(MockDataConfig(), fake_tokenizer(1000, 999), SplitRequest("valid", 10, 32, 1))
    assert dataset is not None
    assert len(dataset) >= 10
    np.testing.assert_array_equal(dataset[0]["tokens"][1:], dataset[0]["labels"][:-1])
    assert build_mock(MockDataConfig(split="1"), fake_tokenizer(1000, 999), SplitRequest("test", 10, 32, 1)) is None
