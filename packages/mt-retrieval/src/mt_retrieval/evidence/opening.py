"""Opens evidence by its path."""

from __future__ import annotations

from pathlib import Path

from mt_core.config.schema import DataConfig
from mt_core.errors import DataError
from mt_core.specs import Tokenizer
from mt_retrieval.evidence.blocks import BlockEvidence
from mt_retrieval.evidence.passages import Evidence
from mt_retrieval.evidence.tsv import TSVEvidence


def open_evidence(path: str, tokenizer: Tokenizer, seq_length: int, trained_on: DataConfig) -> Evidence:
    """A TSV file of passages, or the prefix of an indexed data set of sentences.

    trained_on: the data section of the encoder. Raises DataError for what is neither.
    """
    if Path(path).is_file():
        return TSVEvidence(Path(path), tokenizer)
    if Path(f"{path}.idx").is_file():
        return BlockEvidence(path, tokenizer, seq_length, trained_on)
    raise DataError(
        f"the evidence {path} is neither a TSV file with the columns id, text and title nor the prefix of an indexed "
        f"data set ({path}.idx does not exist)"
    )
