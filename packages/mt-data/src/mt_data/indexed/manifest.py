"""`<prefix>.manifest.json`: what a finished indexed dataset consists of, and what made it.

Megatron writes none; its files are read without. The file depends on nothing but the data, so that the same
data always has the same manifest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from mt_core.errors import DataError
from mt_data.indexed.blocks import BlockChecksums


def manifest_path(prefix: str) -> str:
    return prefix + ".manifest.json"


class FileRecord(BaseModel):
    """Size in bytes and SHA-256 (hexadecimal) of one file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    size: NonNegativeInt
    sha256: str


class Manifest(BaseModel):
    """Counts, checksums and origin of an indexed dataset."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal["mt-indexed-dataset"] = "mt-indexed-dataset"
    format_version: Literal[1] = 1
    sequences: NonNegativeInt
    documents: NonNegativeInt
    tokens: NonNegativeInt
    dtype: str
    multimodal: bool = False
    bin: FileRecord
    idx: FileRecord
    bin_blocks: BlockChecksums | None = None
    """Checksums of the blocks of `.bin`, compared as it is read; None in a manifest of an older release."""
    tokenizer: dict[str, Any] | None = None
    """tokenizer_type, config, fingerprint and vocab_size of the tokenizer; None when it is not known."""
    extra: dict[str, Any] = {}
    """What else the writer recorded, such as whether documents end in the end-of-document id."""

    @property
    def vocab_size(self) -> int | None:
        """The tokenizer's number of ids, None when it is not recorded."""
        value = (self.tokenizer or {}).get("vocab_size")
        return value if isinstance(value, int) else None

    def to_json(self) -> bytes:
        """The content of the file."""
        return (self.model_dump_json(indent=2) + "\n").encode()


def parse_manifest(path: str, data: bytes) -> Manifest:
    """The manifest in the bytes of a file; DataError that names the key which is wrong."""
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{path} is not a manifest of format version 1: {where + ': ' if where else ''}"
            f"{first['msg']}. Remove it to read the data without one, or write the data again"
        ) from error


def as_json_values(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` as they will be read back; DataError when JSON cannot hold one of them."""
    try:
        return json.loads(json.dumps(dict(values), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise DataError(f"the manifest's {name} must consist of JSON values: {error}") from error
