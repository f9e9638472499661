"""AdamW, SGD and Lion, and how they are built."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.reference.adamw import TorchAdamW
from mt_core.nn.kernels.request import Feature
from mt_core.optim.base import FunctionalOptimizer, Optimizer, OptimizerBuildContext
from mt_core.optim.configs import AdamConfig, LionConfig, SGDConfig
from mt_core.optim.fused_adamw import FusedAdamW
from mt_core.optim.master_weights import MasterWeights
from mt_core.optim.param_groups import ParamGroup


class AdamW(FunctionalOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), in one fused kernel per group.

    found_inf: [] fp32 on the device; 1 makes the step a no-op. None: not checked.
    """

    def __init__(self, groups: list[ParamGroup], lr: float, beta1: float, beta2: float, eps: float) -> None:
        super().__init__(groups, lr)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.found_inf: Tensor | None = None

    def update(self, parameters: list[Tensor], gradients: list[Tensor], group: ParamGroup) -> None:
        states = [self._state(parameter) for parameter in parameters]
        adamw(
            parameters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            # The empty list above is max_exp_avg_sqs, which only amsgrad has.
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self.eps * group.get("eps_mult", 1.0),
            maximize=False,
            found_inf=self.found_inf,
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
            # torch's sgd puts the buffers that it creates in the first step into the list.
            if buffer is not None:
                self.state[parameter]["momentum_buffer"] = buffer


def build_adam(
    config: AdamConfig, groups: list[ParamGroup], environment: OptimizerBuildContext | None = None
) -> Optimizer:
    """torch's fused AdamW for fp32 weights and moments when the torch kernel is chosen; else FusedAdamW."""
    halves: tuple[Feature, ...] = ("remainders",) if config.main_weights == "remainders" else ()
    moments: tuple[Feature, ...] = ("moments_16bit",) if config.exp_avg_dtype == "bf16" else ()
    kernels = environment.kernels if environment is not None else Kernels({}, "cpu", "float32")
    engine = kernels.pick("adamw", *halves, *moments)
    options = (config.lr, config.adam_beta1, config.adam_beta2, config.adam_eps)
    if engine is TorchAdamW and not halves and not moments:
        return AdamW(groups, *options)
    copies = {} if environment is None else model_copies(groups, environment.weights)
    return FusedAdamW(groups, *options, engine(), torch.bfloat16 if moments else torch.float32, copies)


def model_copies(groups: list[ParamGroup], weights: MasterWeights) -> dict[Tensor, Tensor]:
    """Master weight -> the model's memory for it, which the optimizer writes from now on."""
    named = ((name, weight) for group in groups for name, weight in zip(group["names"], group["params"], strict=True))
    taken = ((weight, weights.take_copy(name)) for name, weight in named)
    return {weight: copy for weight, copy in taken if copy is not None}


def build_sgd(config: SGDConfig, groups: list[ParamGroup], context: object = None) -> Optimizer:
    return SGD(groups, config.lr, config.sgd_momentum)


# -- Lion: sign of an interpolated momentum (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023)


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


def build_lion(config: LionConfig, groups: list[ParamGroup], context: object = None) -> Optimizer:
    return Lion(groups, config.lr, config.lion_beta1, config.lion_beta2)
