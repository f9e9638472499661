"""The interface of optimizers: what the trainer calls, what they are built from, the bytes of their state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.layout import ParameterLayout, ones
from mt_core.optim.master_weights import Fp32Weights, MasterWeights
from mt_core.optim.param_groups import ParamGroup
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import OPTIMIZERS


class Optimizer(Protocol):
    """The optimizer interface of the trainer, which torch.optim's classes satisfy."""

    param_groups: list[ParamGroup]
    """Each with `params`, `names`, `lr` and `weight_decay`."""
    state: Any
    """parameter -> {name: tensor}, empty until the first step."""

    def step(self) -> Any: ...


class FunctionalOptimizer:
    """An optimizer over torch's functional kernels.

    Not torch.optim's classes: they import torch's compiler at construction, which takes seconds in every process.
    """

    def __init__(self, groups: list[ParamGroup], lr: float) -> None:
        # A group's own lr wins.
        self.param_groups: list[ParamGroup] = [{"lr": lr, **group} for group in groups]
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self.update(parameters, [parameter.grad for parameter in parameters], group)

    def update(self, parameters: list[Tensor], gradients: list[Tensor], group: ParamGroup) -> None:
        raise NotImplementedError


# -- layouts and context, for optimizers that need whole weights (Muon) where a rank holds shards ---------


@dataclass(frozen=True)
class OptimizerBuildContext:
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


# -- bytes of state per parameter -------------------------------------------------------------------------


@dataclass(frozen=True)
class StateBytes:
    """Bytes of optimizer state per element and per parameter, separately for matrices that Muon updates
    (`mt_core.optim.muon.is_matrix`) and for all other weights."""

    of_element: Mapping[bool, float]
    of_parameter: Mapping[bool, float]

    def of(self, is_matrix: bool, elements: int) -> float:
        return self.of_element[is_matrix] * elements + self.of_parameter[is_matrix]


def probe_state(config: Config, host: PluginHost) -> StateBytes:
    """Measured: run a step of the configured optimizer on a small matrix and a small vector."""
    elements, of_element, of_parameter = 64, {}, {}
    spec = host[OPTIMIZERS].get(config.optimizer.optimizer, key="optimizer.optimizer")
    build = spec.build.load()
    # Where there are no fp32 master weights the optimizer's state has the other 16 bits of each weight.
    remainders = getattr(config.optimizer, "main_weights", None) == "remainders" and config.precision.dtype == "bf16"
    dtype = torch.bfloat16 if remainders else torch.float32
    # 64 elements each: tensors of 64 or more are state per element, smaller ones (step counters) state per parameter.
    for is_matrix, shape in ((True, (8, 8)), (False, (elements,))):
        parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
        name = "decoder.layers.0.mlp.linear_fc1.weight" if is_matrix else "decoder.final_layernorm.weight"
        groups = [{"params": [parameter], "names": [name], "weight_decay": 0.0}]
        whole = nn.Module()
        context = OptimizerBuildContext(whole, Fp32Weights(whole), {name: ParameterLayout(shape, ones)})
        optimizer = build(config.optimizer, groups, context)
        optimizer.step()
        kept = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
        like = [value for value in kept if value.numel() >= elements]
        of_element[is_matrix] = sum(value.numel() * value.element_size() for value in like) / elements
        of_parameter[is_matrix] = sum(
            value.numel() * value.element_size() for value in kept if value.numel() < elements
        )
    return StateBytes(of_element, of_parameter)
