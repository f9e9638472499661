"""The pieces of a SentencePiece model (tokenizer.model), read from its protocol buffer."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mt_core.errors import CheckpointError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
UNIGRAM, BPE = 1, 2
"""Values of trainer_spec.model_type."""


@dataclass(frozen=True)
class Piece:
    """kind: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte; llama.cpp has the same numbers."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    pieces: tuple[Piece, ...]
    model_type: int
    adds_prefix: bool


def parse(data: bytes) -> SentencePieceModel:
    """Raises CheckpointError for what is no such model."""
    try:
        return _model(data)
    except (IndexError, struct.error, UnicodeDecodeError, ValueError, TypeError) as error:
        raise CheckpointError(f"tokenizer.model is no SentencePiece model: {error}") from None


def _model(data: bytes) -> SentencePieceModel:
    pieces, model_type, adds_prefix = [], UNIGRAM, True
    for field, value in _fields(data):
        if field == 1:
            pieces.append(_piece(value))
        elif field == 2:  # trainer_spec
            model_type = dict(_fields(value)).get(3, UNIGRAM)
        elif field == 3:  # normalizer_spec
            adds_prefix = bool(dict(_fields(value)).get(3, 1))
    if not pieces:
        raise ValueError("it has no pieces")
    return SentencePieceModel(tuple(pieces), model_type, adds_prefix)


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    return Piece(fields[1].decode(), struct.unpack("<f", fields.get(2, b"\0\0\0\0"))[0], int(fields.get(3, 1)))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a message: int, or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(kind)
        if kind == BYTES:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise ValueError(f"byte {at}")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError(f"byte {at}")
