"""Indexed datasets: `<prefix>.bin` and `<prefix>.idx`, Megatron's format, byte for byte."""

from __future__ import annotations

from mt_data.indexed.dataset import IndexedDataset, check_files
from mt_data.indexed.layout import dtype_for_vocab
from mt_data.indexed.manifest import Manifest
from mt_data.indexed.memory import MemoryIndexedDataset
from mt_data.indexed.reader import SequenceReader
from mt_data.indexed.verification import VerifyReport, verify
from mt_data.indexed.writer import IndexedDatasetWriter

__all__ = [
    "IndexedDataset",
    "IndexedDatasetWriter",
    "Manifest",
    "MemoryIndexedDataset",
    "SequenceReader",
    "VerifyReport",
    "check_files",
    "dtype_for_vocab",
    "verify",
]
