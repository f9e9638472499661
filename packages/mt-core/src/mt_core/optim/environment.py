"""What an optimizer gets that looks at whole weights, where a rank holds pieces of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.layout import ParameterLayout
from mt_core.optim.main_weights import MainWeights
from mt_core.parallel.context import ParallelContext


@dataclass(frozen=True)
class OptimizerEnvironment:
    """layouts: of the model's parameters, by canonical name. weights: whose named parameters are optimized."""

    model: nn.Module
    weights: MainWeights
    layouts: Mapping[str, ParameterLayout]
    ctx: ParallelContext = field(default_factory=ParallelContext)
    kernels: Kernels = field(default_factory=lambda: Kernels({}, "cpu", "float32"))
    """Those of the run."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of the whole weight."""
        return {name: layout.shape for name, layout in self.layouts.items()}
