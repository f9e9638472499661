"""Completions as rows of a batch: the prompt and the completion, a row each, filled up to one width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.data.loader import Arrays
from mt_tune.rl.routing_record import decoded
from mt_tune.rl.samples import ADVANTAGES, DRAWN_LOGPS, ROUTED_EXPERTS, SAMPLED


@dataclass
class Row:
    """prompt and completion: ids. drawn, logps: of the completion's tokens, see Rollout. values: further fields with a
    value for each of them. counts: whether its tokens count in the loss. experts: see Rollout."""

    prompt: Sequence[int]
    completion: Sequence[int]
    drawn: Sequence[int]
    logps: Sequence[float]
    counts: bool = True
    values: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    experts: str = ""

    @property
    def positions(self) -> int:
        """n tokens take n - 1."""
        return len(self.prompt) + len(self.completion) - 1

    @property
    def predicted(self) -> slice:
        """The positions at which the completion's tokens are predicted."""
        return slice(len(self.prompt) - 1, self.positions)

    @property
    def is_drawn(self) -> NDArray[np.bool_]:
        """[completion]"""
        return np.array(self.drawn) > 0

    def of_drawn(self, name: str) -> NDArray[np.float64]:
        """The values of the tokens that the policy drew."""
        return self.values[name][self.is_drawn].astype(np.float64)

    def set_drawn(self, name: str, values: NDArray[np.float64]) -> None:
        """Sets the values of the tokens that the policy drew; others have 0."""
        whole = np.zeros(len(self.completion), np.float32)
        whole[self.is_drawn] = values
        self.values[name] = whole

    def to_json(self) -> dict[str, Any]:
        values = {name: part.tolist() for name, part in self.values.items()}
        lists = [list(part) for part in (self.prompt, self.completion, self.drawn, self.logps)]
        return dict(zip(("prompt", "completion", "drawn", "logps"), lists, strict=True)) | {
            "counts": self.counts,
            "values": values,
            "experts": self.experts,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Row:
        values = {name: np.array(part, np.float32) for name, part in value["values"].items()}
        return cls(**{**value, "values": values})


def stacked(rows: Sequence[Row], width: int) -> Arrays:
    """[rows, width] for each field."""
    filled = [_filled(row, width) for row in rows]
    return {name: np.stack([arrays[name] for arrays in filled]) for name in filled[0]}


def _filled(row: Row, width: int) -> Mapping[str, np.ndarray]:
    whole = np.array([*row.prompt, *row.completion], np.int64)
    arrays: dict[str, np.ndarray] = {
        "tokens": _padded(whole[:-1], 0, width, np.int64),
        "labels": _padded(whole[1:], 0, width, np.int64),
    }
    start = row.predicted.start
    drawn = _padded(np.array(row.drawn, np.float32), start, width, np.float32)
    arrays[SAMPLED] = drawn
    arrays["loss_mask"] = drawn if row.counts else np.zeros_like(drawn)
    arrays[DRAWN_LOGPS] = _padded(np.array(row.logps, np.float32), start, width, np.float32)
    arrays[ADVANTAGES] = np.zeros(width, np.float32)
    for name, values in row.values.items():
        arrays[name] = _padded(values, start, width, np.float32)
    experts = decoded(row.experts)
    if experts is not None:
        # [width, routers x k]; where there are none, padding included, routers choose.
        arrays[ROUTED_EXPERTS] = np.full((width, experts.shape[1]), -1, np.int16)
        arrays[ROUTED_EXPERTS][: len(experts)] = experts
    return arrays


def _padded(values: np.ndarray, start: int, width: int, dtype: type) -> np.ndarray:
    result: np.ndarray = np.zeros(width, dtype)
    result[start : start + len(values)] = values
    return result
