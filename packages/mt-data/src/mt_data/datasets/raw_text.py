"""Raw text named in data_path: tokenized once, into the cache folder, and read as a token file from then on.

For corpora that take long, `mt data preprocess` does the same with many workers and a restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mt_core.errors import DataError
from mt_core.specs import Tokenizer
from mt_data.datasets.content_cache import ContentCache
from mt_data.datasets.progress import index_progress
from mt_data.indexed.dataset import IndexedDataset
from mt_data.indexed.layout import dtype_for_vocab
from mt_data.indexed.writer import IndexedDatasetWriter
from mt_data.preprocess.formats import detect_format
from mt_data.preprocess.readers import Record, iter_records

STEM = "text_document"
_CHUNK = 1 << 24


def is_raw_text(name: str) -> bool:
    """Whether a name in data_path is a file of text, by its ending; a prefix that ends like one has an `.idx`."""
    try:
        detect_format(Path(name))
    except DataError:
        return False
    return not Path(f"{name}.idx").exists()


def tokenized(name: str, json_key: str, tokenizer: Tokenizer, cache: Path) -> Path:
    """Prefix of the token file made from the text file `name`, each document followed by the eod id.

    The file is found again by the text's content, the tokenizer's fingerprint and json_key. Raises DataError,
    with file and line, for text that cannot be read, and when the cache cannot be written.
    """
    key = {
        "kind": "tokens",
        "text": _content_hash(Path(name)),
        "json_key": json_key,
        "tokenizer": tokenizer.fingerprint(),
    }

    def write(folder: Path) -> None:
        _write_tokens(Path(name), json_key, tokenizer, folder / STEM)

    try:
        return ContentCache(cache).get(key, write, _checked_prefix)
    except OSError as error:
        raise DataError(
            f"the tokens of {name} cannot be written into {cache}: {error.strerror or error}; "
            "set data.data_cache_path to a folder that can be written"
        ) from error


def _checked_prefix(folder: Path) -> Path:
    reader = IndexedDataset(folder / STEM)  # checks header and sizes
    if reader.manifest() is None:
        raise DataError(f"{reader.prefix} has no manifest")
    return folder / STEM


def _content_hash(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; check data.data_path") from error
    return digest.hexdigest()


def _write_tokens(path: Path, json_key: str, tokenizer: Tokenizer, prefix: Path) -> None:
    eod = tokenizer.special.eod
    with IndexedDatasetWriter(prefix, dtype_for_vocab(tokenizer.vocab_size)) as writer:
        for record in _with_progress(path, json_key):
            ids = _encode(tokenizer, _text(record, json_key))
            if len(ids):
                writer.add_sequence(ids if eod is None else np.append(ids, np.asarray(eod, ids.dtype)))
            writer.end_document()
        writer.finish(tokenizer=_description(tokenizer), extra={"json_key": json_key, "append_eod": eod is not None})


def _with_progress(path: Path, json_key: str) -> Iterator[Record]:
    size = path.stat().st_size
    with index_progress(f"tokenizing {path.name}", size) as progress:
        done = 0
        for record in iter_records(path, columns=[json_key]):
            yield record
            # Compressed text is longer than its file; the bar then stays full for a while.
            done = min(size, done + len(str(record.value.get(json_key, ""))))
            progress(done, size)


def _text(record: Record, json_key: str) -> list[str]:
    """The document's parts: its text, or the sentences of a list."""
    if json_key not in record.value:
        known = ", ".join(sorted(record.value)) or "none"
        raise DataError(f"{record.file}, line {record.line}: no key {json_key!r} (keys: {known}); set data.json_key")
    value = record.value[json_key]
    parts = value if isinstance(value, list) else [value]
    if not all(isinstance(part, str) for part in parts):
        raise DataError(f"{record.file}, line {record.line}: {json_key!r} must be a text, got {type(value).__name__}")
    return parts


def _encode(tokenizer: Tokenizer, parts: list[str]) -> np.ndarray:
    encode = getattr(tokenizer, "encode_array", tokenizer.encode)
    return np.concatenate([np.asarray(encode(part)) for part in parts]) if parts else np.zeros(0, np.int32)


def _description(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokenizer_type": type(tokenizer).__name__,
        "fingerprint": tokenizer.fingerprint(),
        "vocab_size": tokenizer.vocab_size,
    }
