"""What the optimizer works on: the model's own weights in fp32, or fp32 copies of 16-bit ones.

With 16-bit weights gradients are added up in fp32, so that accumulating over micro-batches loses nothing: matrix
products add to the sums themselves (`mt_core.nn.main_gradients`), and what else the backward pass makes is added as
soon as it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from mt_core._torch_compat import zero_all_
from mt_core.nn.boxes import Box
from mt_core.nn.main_gradients import give_main_gradient


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

    def expect(self, passes: int) -> None:
        """Called before the backward passes of a step: how many there will be."""
        ...

    def begin_pass(self, number: int) -> None:
        """Called before each of them, from 0."""
        ...

    def reduce(self) -> None:
        """Called after them: from now on gradients are sums over the ranks with the same weights."""
        ...

    def finish_gather(self) -> None:
        """Returns when the model's weights are whole on this rank."""
        ...

    def whole(self, name: str, part: Tensor | None) -> Tensor:
        """The local tensor of a parameter's shape from what this rank has of it. Collective."""
        ...

    def part(self, name: str, local: Tensor) -> Tensor:
        """What this rank has of a local tensor; the inverse of `whole`."""
        ...

    def held(self, name: str) -> list[Box]:
        """The boxes of the local tensor that this rank's part of a state consists of, in the order of its elements."""
        ...

    def held_weight(self, name: str) -> tuple[list[Box], Tensor]:
        """The same of the model's own parameter, with the memory itself. After it was written to, `refresh` has to
        follow unless main weights are set too."""
        ...


class WholeWeights:
    """What main weights do that are not divided and whose gradients nobody shares."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def expect(self, passes: int) -> None: ...

    def begin_pass(self, number: int) -> None: ...

    def reduce(self) -> None: ...

    def finish_gather(self) -> None: ...

    def whole(self, name: str, part: Tensor | None) -> Tensor:
        assert part is not None
        return part

    def part(self, name: str, local: Tensor) -> Tensor:
        return local

    def held(self, name: str) -> list[Box]:
        return [Box.whole(tuple(self.model.get_parameter(name).shape))]

    def held_weight(self, name: str) -> tuple[list[Box], Tensor]:
        parameter = self.model.get_parameter(name).detach()
        return [Box.whole(tuple(parameter.shape))], parameter


class ModelWeights(WholeWeights):
    """fp32 training: the model's weights are the main weights."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return trained_parameters(self.model)

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def publish(self) -> None: ...

    def refresh(self) -> None: ...


class CopiedWeights(WholeWeights):
    """16-bit training: fp32 copies, and fp32 accumulation of gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # A copy even of a weight that is fp32 in memory: detach().float() would share it.
        self.copies = {
            name: nn.Parameter(parameter.detach().to(torch.float32, copy=True))
            for name, parameter in trained_parameters(model)
        }
        for name, parameter in trained_parameters(model):
            copy = self.copies[name]
            copy.grad = torch.zeros_like(copy)
            give_main_gradient(parameter, copy.grad)
            parameter.register_post_accumulate_grad_hook(_accumulate_into(copy))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.copies.items())

    def zero_grad(self) -> None:
        zero_all_([copy.grad for copy in self.copies.values() if copy.grad is not None])

    @torch.no_grad()
    def publish(self) -> None:
        for name, parameter in trained_parameters(self.model):
            parameter.copy_(self.copies[name])

    @torch.no_grad()
    def refresh(self) -> None:
        for name, parameter in trained_parameters(self.model):
            self.copies[name].copy_(parameter)


class SplitWeights(ModelWeights):
    """16-bit training without copies: the optimizer keeps the other 16 bits of each weight (`FusedAdamW`).

    Gradients are added up in the format of the weights.
    """


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of those that the optimizer updates."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _accumulate_into(copy: nn.Parameter) -> Callable[[Tensor], None]:
    def accumulate(parameter: Tensor) -> None:
        assert copy.grad is not None
        if parameter.grad is not None:
            copy.grad.add_(parameter.grad)
            parameter.grad = None

    return accumulate


def build_main_weights(model: nn.Module) -> MainWeights:
    """Of a model whose weights no other rank has."""
    is_fp32 = all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return ModelWeights(model) if is_fp32 else CopiedWeights(model)
