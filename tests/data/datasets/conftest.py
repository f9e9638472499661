"""Small token files and a tokenizer of given ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from mt_core.interfaces import SpecialTokens
from mt_data.indexed.writer import IndexedDatasetWriter
from mt_data.tokenizers.byte_level import ByteLevelTokenizer


class FakeTokenizer:
    """Only what data sets ask of a tokenizer besides encoding: special ids, size and identity."""

    def __init__(self, vocab_size: int, eod: int | None, pad: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.special = SpecialTokens(eod=eod, eos=eod, pad=pad)

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def fingerprint(self) -> str:
        return "fake"

    def files(self) -> Mapping[str, bytes]:
        return {}


@pytest.fixture
def fake_tokenizer() -> type[FakeTokenizer]:
    return FakeTokenizer


@pytest.fixture
def byte_tokenizer() -> ByteLevelTokenizer:
    return ByteLevelTokenizer(3)


WriteTokens = Callable[..., str]


@pytest.fixture
def write_tokens(tmp_path: Path) -> WriteTokens:
    """Writes documents (lists of ids, perhaps empty) and returns the prefix."""

    def write(name: str, documents: Sequence[Sequence[int]], tokenizer: Mapping[str, object] | None = None) -> str:
        prefix = tmp_path / name
        with IndexedDatasetWriter(prefix, np.int32) as writer:
            for document in documents:
                if len(document):
                    writer.add_sequence(document)
                writer.end_document()
            writer.finish(tokenizer=tokenizer)
        return str(prefix)

    return write
