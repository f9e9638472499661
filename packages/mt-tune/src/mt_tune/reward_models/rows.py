"""Rows of several whole texts, each a segment that sees itself alone: all tokens are read, none is predicted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mt_core.interfaces import TOKEN_MASK


def row_of_texts(texts: Sequence[NDArray[np.int32]], length: int) -> tuple[dict[str, np.ndarray], list[int]]:
    """(tokens, position_ids, segment_ids, token_mask, loss_mask of zeros, all [length]; where each text begins)."""
    row: dict[str, np.ndarray] = {
        "tokens": np.zeros(length, np.int64),
        "position_ids": np.zeros(length, np.int64),
        "segment_ids": np.full(length, len(texts), np.int32),
        "loss_mask": np.zeros(length, np.float32),
        TOKEN_MASK: np.zeros(length, np.float32),
    }
    starts, start = [], 0
    for number, tokens in enumerate(texts):
        end = start + len(tokens)
        row["tokens"][start:end] = tokens
        row["position_ids"][start:end] = np.arange(len(tokens))
        row["segment_ids"][start:end] = number
        row[TOKEN_MASK][start:end] = 1.0
        starts.append(start)
        start = end
    row["position_ids"][start:] = np.arange(length - start)
    return row, starts


def last_scored(tokens: NDArray[np.int32], padding: int | None) -> int:
    """The place of the token at which a text is scored: the last one that is not padding's, where Hugging Face's
    classes read it, which know texts without their lengths."""
    real = np.flatnonzero(tokens != padding) if padding is not None else np.array([], np.int64)
    return int(real[-1]) if len(real) else len(tokens) - 1
