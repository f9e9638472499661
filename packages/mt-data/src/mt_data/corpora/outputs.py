"""Output files: their names, their compression, and their appearing whole or not at all."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from mt_core.errors import ConfigError, DataError
from mt_core.paths import is_remote
from mt_data.preprocess.formats import create_zstd

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_INPUT_ENDINGS = (".jsonl", ".json", ".ndjson", ".parquet", ".txt")


def output_names(sources: Sequence[Path], ending: str | None = None) -> list[str]:
    """A name for each input: its path below the folder that all share, with `ending` in place of its own.

    Without `ending`, a compressed input gives an output compressed alike; "same" keeps the names.
    Raises ConfigError when two inputs would be written to one output, and for inputs in an object store.
    """
    if remote := next((source for source in sources if is_remote(source)), None):
        raise ConfigError(f"input {remote}: corpora are built from files of this machine; copy them here first")
    # Of the folders, so that one input gives its bare name.
    parent = Path(os.path.commonpath([source.resolve().parent for source in sources]))
    names: dict[str, Path] = {}
    for source in sources:
        name = _with_ending(source.resolve().relative_to(parent).as_posix(), ending)
        if name in names:
            raise ConfigError(
                f"inputs {names[name]} and {source} would both be written to {name}; "
                "rename one, or give them to two runs with an --output each"
            )
        names[name] = source
    return list(names)


def _with_ending(name: str, ending: str | None) -> str:
    if ending == "same":
        return name
    stem, compression = name, ""
    for known in (".gz", ".zst"):
        if stem.endswith(known):
            stem, compression = stem.removesuffix(known), known
    for known in _INPUT_ENDINGS:
        if stem.endswith(known):
            stem = stem.removesuffix(known)
            break
    return stem + (ending or f".jsonl{compression}")


@contextmanager
def atomic_writer(path: Path) -> Iterator[IO[bytes]]:
    """A binary stream into `path`, compressed if it ends in .gz or .zst; `path` appears when all is on the disk.

    The bytes depend on what is written alone: no time and no name goes into a header.
    Raises DataError, naming the file, when the disk is full or refuses.
    """
    # A fixed name: what a killed run left is overwritten. The caller holds the lock of the output folder.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as raw:
            # Closed before the sync: the end of the compressed data is written only then.
            with _compressed(raw, path.suffix) as stream:
                yield stream
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"{path} could not be written: {error.strerror or error}; make room and run again") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _compressed(raw: IO[bytes], suffix: str) -> Iterator[IO[bytes]]:
    if suffix == ".gz":
        # An empty name and time 0 in the header: the same documents give the same bytes.
        with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=raw, mtime=0) as packed:
            yield cast(IO[bytes], packed)
    elif suffix == ".zst":
        with create_zstd(cast(BinaryIO, raw)) as packed:
            yield packed
    else:
        yield raw


def encode_json_line(value: dict[str, Any]) -> bytes:
    """A record as a line of JSON in UTF-8; text that UTF-8 cannot hold (lone surrogates) is escaped."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain).encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=True, default=_plain).encode("ascii") + b"\n"


def encode_text_line(value: dict[str, Any]) -> bytes:
    """The `text` of a record as a line."""
    return str(value["text"]).encode("utf-8", "surrogatepass") + b"\n"


def _plain(value: Any) -> str:
    """Parquet's dates, times and decimals as text."""
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    if isinstance(value, bytes):
        raise DataError("a column of bytes cannot be written as JSON; leave it out of the Parquet input")
    return str(value)
