"""`ParallelContext`: where this process stands, passed explicitly to whatever needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

AxisName = Literal["tp", "cp", "ep", "dp", "pp"]


@dataclass(frozen=True)
class Axis:
    """One parallel axis as this process sees it."""

    size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class ParallelContext:
    """Device, number format of the weights, and this process's place on every axis.

    There is no global one: several contexts live in one process, each with models of its own.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    params_dtype: torch.dtype = torch.float32
    tp: Axis = Axis()
    cp: Axis = Axis()
    ep: Axis = Axis()
    dp: Axis = Axis()
    pp: Axis = Axis()

    def axis(self, name: AxisName) -> Axis:
        return getattr(self, name)

    def with_device(self, device: torch.device) -> ParallelContext:
        """The same place with parameters on another device, for instance `meta`."""
        from dataclasses import replace

        return replace(self, device=device)
