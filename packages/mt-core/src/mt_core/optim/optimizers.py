"""Optimizers behind the hook, and the groups of parameters they get."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mt_core.optim.configs import AdamConfig, SGDConfig

ParamGroup = dict[str, Any]


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: as in Megatron, not on biases and vectors (norms)."""
    return parameter.ndim > 1 and not name.endswith("bias")


def param_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[ParamGroup]:
    """Two groups, with and without decay; each knows the canonical names of its parameters."""
    groups: list[ParamGroup] = [
        {"params": [], "names": [], "weight_decay": weight_decay},
        {"params": [], "names": [], "weight_decay": 0.0},
    ]
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            group = groups[0] if decays(name, parameter) else groups[1]
            group["params"].append(parameter)
            group["names"].append(name)
    return [group for group in groups if group["params"]]


def build_adam(config: AdamConfig, groups: list[ParamGroup]) -> torch.optim.Optimizer:
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


def build_sgd(config: SGDConfig, groups: list[ParamGroup]) -> torch.optim.Optimizer:
    """Weight decay is added to the gradient, as torch and Megatron's SGD do."""
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum)
