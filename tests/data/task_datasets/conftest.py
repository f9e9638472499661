"""A small WordPiece tokenizer, sentence files made of random words, and what Megatron wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from mt_data.indexed.writer import IndexedDatasetWriter
from mt_data.tokenizers.bert_wordpiece import BertWordPieceConfig, BertWordPieceTokenizer, build_bert_wordpiece

SENTINELS = 40
WORDS = [f"w{letter}{digit}" for letter in "abcdefghij" for digit in "abcde"]
PIECES = ["##x", "##y", "##z"]
VOCABULARY = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *(f"<extra_id_{number}>" for number in range(SENTINELS)),
    *(".", ",", "?", "_"),
    *WORDS,
    *PIECES,
]


@pytest.fixture(scope="session")
def golden() -> Path:
    folder = os.environ.get("MT_GOLDEN")
    if not folder:
        pytest.skip("MT_GOLDEN is not set: it names the folder with Megatron's own files")
    return Path(folder) / "data"


@pytest.fixture(scope="session")
def vocab_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(VOCABULARY) + "\n")
    return str(path)


@pytest.fixture(scope="session")
def wordpiece(vocab_file: str) -> BertWordPieceTokenizer:
    return build_bert_wordpiece(BertWordPieceConfig(vocab_file=vocab_file, vocab_extra_ids=SENTINELS))


WriteSentences = Callable[[Sequence[Sequence[Sequence[int]]], str], str]


@pytest.fixture
def write_sentences(tmp_path: Path) -> WriteSentences:
    """Writes documents of sentences of ids as `<name>.bin` and `.idx`; gives the prefix."""

    def write(documents: Sequence[Sequence[Sequence[int]]], name: str = "corpus_text_sentence") -> str:
        prefix = str(tmp_path / name)
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            for sentences in documents:
                for sentence in sentences:
                    writer.add_sequence(sentence)
                writer.end_document()
            writer.finish()
        return prefix

    return write


def random_documents(count: int, seed: int = 0, longest: int = 30) -> list[list[list[int]]]:
    """Documents of 1 to 12 sentences of ordinary ids."""
    random = np.random.default_rng(seed)
    first = VOCABULARY.index(".")
    return [
        [
            random.integers(first, len(VOCABULARY), random.integers(1, longest)).tolist()
            for _ in range(random.integers(1, 13))
        ]
        for _ in range(count)
    ]


@pytest.fixture(scope="session")
def documents() -> list[list[list[int]]]:
    return random_documents(120)
