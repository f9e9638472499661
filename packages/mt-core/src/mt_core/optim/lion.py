"""Lion: sign of an interpolated momentum (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_core.optim.configs import LionConfig
from mt_core.optim.functional import FunctionalOptimizer, Optimizer
from mt_core.optim.param_groups import ParamGroup


class Lion(FunctionalOptimizer):
    """Every element moves by the learning rate, along the sign of a mean of gradient and momentum.

    One moment, `exp_avg`: half of Adam's state. Weight decay is decoupled. An element whose gradient has always been 0
    is not moved, since sign(0) = 0.
    """

    def __init__(self, groups: list[ParamGroup], lr: float, beta1: float, beta2: float) -> None:
        super().__init__(groups, lr)
        self.beta1, self.beta2 = beta1, beta2

    def update(self, parameters: list[Tensor], gradients: list[Tensor], group: ParamGroup) -> None:
        lr, weight_decay = group["lr"], group["weight_decay"]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            moment = self._moment(parameter)
            # beta1 interpolates for the direction. The moment decays with beta2, after its use.
            direction = moment.lerp(gradient, 1.0 - self.beta1).sign_()
            parameter.mul_(1.0 - lr * weight_decay).add_(direction, alpha=-lr)
            moment.lerp_(gradient, 1.0 - self.beta2)

    def _moment(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        return state["exp_avg"]


def build_lion(config: LionConfig, groups: list[ParamGroup]) -> Optimizer:
    return Lion(groups, config.lr, config.lion_beta1, config.lion_beta2)
