"""Layouts and context for optimizers that need whole weights (Muon) where a rank holds shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.layout import ParameterLayout
from mt_core.optim.master_weights import MasterWeights
from mt_core.parallel.context import ParallelContext


@dataclass(frozen=True)
class OptimizerEnvironment:
    """layouts: of the model's parameters, by canonical name. weights: the master weights that are optimized."""

    model: nn.Module
    weights: MasterWeights
    layouts: Mapping[str, ParameterLayout]
    ctx: ParallelContext = field(default_factory=ParallelContext)
    kernels: Kernels = field(default_factory=lambda: Kernels({}, "cpu", "float32"))
    """Those of the run."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of the whole weight."""
        return {name: layout.shape for name, layout in self.layouts.items()}
