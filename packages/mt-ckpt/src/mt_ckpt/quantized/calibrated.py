"""Weights whose codes and scales were chosen by calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mt_ckpt.quantized.grids import Scales


@dataclass(frozen=True)
class CalibratedWeight:
    """codes: [..., out, in] of the scheme's grid. scales: [..., out, groups]. largest: magnitude that a global scale
    was made for."""

    codes: Tensor
    scales: Scales
    largest: float

    def mapped(self, rows: Callable[[Tensor], Tensor]) -> CalibratedWeight:
        """With other rows, taken of codes and scales alike."""
        scales, zeros = self.scales, self.scales.zeros
        chosen = Scales(rows(scales.scale), None if zeros is None else rows(zeros), scales.whole)
        return CalibratedWeight(rows(self.codes), chosen, self.largest)


class CalibratedWeights(Protocol):
    """By canonical name, without the prefix of models."""

    def read(self, name: str) -> CalibratedWeight: ...
