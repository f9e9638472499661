"""Optimizers behind the hook, and the groups of parameters they get."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from mt_core.optim.configs import AdamConfig, SGDConfig

ParamGroup = dict[str, Any]


def decays(name: str, shape: Sequence[int]) -> bool:
    """Whether weight decay applies: as in Megatron, not on biases and vectors (norms)."""
    return len(shape) > 1 and not name.endswith("bias")


def param_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> list[ParamGroup]:
    """Two groups, with and without decay; each knows the canonical names of its parameters.

    shapes: of the whole parameters, where those given are pieces of them.
    """
    groups: list[ParamGroup] = [
        {"params": [], "names": [], "weight_decay": weight_decay},
        {"params": [], "names": [], "weight_decay": 0.0},
    ]
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            shape = parameter.shape if shapes is None else shapes[name]
            group = groups[0] if decays(name, shape) else groups[1]
            group["params"].append(parameter)
            group["names"].append(name)
    return [group for group in groups if group["params"]]


class Optimizer(Protocol):
    """What the trainer needs of an optimizer; those of torch.optim have it too."""

    param_groups: list[ParamGroup]
    """Each with `params`, `names`, `lr` and `weight_decay`."""
    state: Any
    """parameter -> {name: tensor}, empty until the first step."""

    def step(self) -> Any: ...


class FunctionalOptimizer:
    """An optimizer over torch's functional kernels.

    The classes of torch.optim import torch's compiler at construction, which costs seconds in every process.
    """

    def __init__(self, groups: list[ParamGroup], lr: float) -> None:
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


class AdamW(FunctionalOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), in one fused kernel a group."""

    def __init__(self, groups: list[ParamGroup], lr: float, beta1: float, beta2: float, eps: float) -> None:
        super().__init__(groups, lr)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def update(self, parameters: list[Tensor], gradients: list[Tensor], group: ParamGroup) -> None:
        states = [self._state(parameter) for parameter in parameters]
        adamw(
            parameters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self.eps,
            maximize=False,
        )

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


class SGD(FunctionalOptimizer):
    """Gradient descent with momentum; weight decay is added to the gradient, as torch and Megatron do."""

    def __init__(self, groups: list[ParamGroup], lr: float, momentum: float) -> None:
        super().__init__(groups, lr)
        self.momentum = momentum

    def update(self, parameters: list[Tensor], gradients: list[Tensor], group: ParamGroup) -> None:
        buffers: list[Tensor | None] = [self.state[parameter].get("momentum_buffer") for parameter in parameters]
        sgd(
            parameters,
            gradients,
            buffers,
            foreach=True,
            weight_decay=group["weight_decay"],
            momentum=self.momentum,
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for parameter, buffer in zip(parameters, buffers, strict=True):
            if buffer is not None:
                self.state[parameter]["momentum_buffer"] = buffer


def build_adam(config: AdamConfig, groups: list[ParamGroup]) -> Optimizer:
    return AdamW(groups, config.lr, config.adam_beta1, config.adam_beta2, config.adam_eps)


def build_sgd(config: SGDConfig, groups: list[ParamGroup]) -> Optimizer:
    return SGD(groups, config.lr, config.sgd_momentum)
