"""Rows of several answers, each with its prompt as a segment that sees itself alone."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from mt_tune.preferences.samples import ANSWER

EncodedAnswer = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""tokens [n] of a prompt and its answer, and which of them are the answer's."""


def packed_row(answers: Iterable[EncodedAnswer], length: int) -> tuple[dict[str, np.ndarray], list[int]]:
    """(tokens, labels, position_ids, segment_ids, token_mask, all [length]; the first predicted position of each
    answer). n tokens take n - 1 positions. Padding is a segment of its own, behind those of the answers."""
    row: dict[str, np.ndarray] = {
        "tokens": np.zeros(length, np.int64),
        "labels": np.zeros(length, np.int64),
        "position_ids": np.zeros(length, np.int64),
        "segment_ids": np.zeros(length, np.int32),
        ANSWER: np.zeros(length, np.float32),
    }
    start = 0
    first_positions: list[int] = []
    for tokens, answer in answers:
        end = start + len(tokens) - 1
        row["tokens"][start:end] = tokens[:-1]
        row["labels"][start:end] = tokens[1:]
        row[ANSWER][start:end] = answer[1:]
        row["position_ids"][start:end] = np.arange(end - start)
        row["segment_ids"][start:end] = len(first_positions)
        first_positions.append(start + int(answer[1:].argmax()))
        start = end
    row["segment_ids"][start:] = len(first_positions)
    row["position_ids"][start:] = np.arange(length - start)
    return row, first_positions
