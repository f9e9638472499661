"""What the optimizer works on: the model's own weights in fp32, or fp32 copies of 16-bit ones.

With 16-bit weights each gradient is added to an fp32 buffer as soon as the backward pass has made it, so
that accumulating over micro-batches loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from mt_core._torch_compat import zero_all_


class MainWeights(Protocol):
    """Named fp32 weights with gradients that the optimizer may use."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def zero_grad(self) -> None: ...

    def publish(self) -> None:
        """Called after the optimizer's step: the model gets the new weights."""
        ...

    def refresh(self) -> None:
        """Called when the model's weights were set from outside (a checkpoint without main weights)."""
        ...


class ModelWeights:
    """fp32 training: the model's weights are the main weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return _trained(self.model)

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def publish(self) -> None: ...

    def refresh(self) -> None: ...


class CopiedWeights:
    """16-bit training: fp32 copies, and fp32 accumulation of gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # A copy even of a weight that is fp32 in memory: detach().float() would share it.
        self.copies = {
            name: nn.Parameter(parameter.detach().to(torch.float32, copy=True)) for name, parameter in _trained(model)
        }
        for name, parameter in _trained(model):
            copy = self.copies[name]
            copy.grad = torch.zeros_like(copy)
            parameter.register_post_accumulate_grad_hook(_accumulate_into(copy))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.copies.items())

    def zero_grad(self) -> None:
        zero_all_([copy.grad for copy in self.copies.values() if copy.grad is not None])

    @torch.no_grad()
    def publish(self) -> None:
        for name, parameter in _trained(self.model):
            parameter.copy_(self.copies[name])

    @torch.no_grad()
    def refresh(self) -> None:
        for name, parameter in _trained(self.model):
            self.copies[name].copy_(parameter)


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _accumulate_into(copy: nn.Parameter) -> Callable[[Tensor], None]:
    def accumulate(parameter: Tensor) -> None:
        assert copy.grad is not None
        assert parameter.grad is not None
        copy.grad.add_(parameter.grad)
        parameter.grad = None

    return accumulate


def build_main_weights(model: nn.Module) -> MainWeights:
    is_fp32 = all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return ModelWeights(model) if is_fp32 else CopiedWeights(model)
