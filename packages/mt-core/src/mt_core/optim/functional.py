"""The optimizer interface of the trainer, and a base for optimizers over torch's functional kernels."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol

import torch
from torch import Tensor

from mt_core.optim.param_groups import ParamGroup


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
