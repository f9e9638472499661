"""Master weights: the model's own fp32 weights, or fp32 copies of 16-bit ones.

Gradients of 16-bit weights are accumulated in fp32, so that small contributions of later micro-batches are not
rounded away. Matrix products add to the fp32 main_grad directly (`mt_core.nn.main_grad`); other gradients are added
by a hook as soon as autograd has produced them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from mt_core.nn.main_grad import MainGrad, attach_main_grad, clear_all
from mt_core.tensor_slice import TensorSlice


class MasterWeights(Protocol):
    """Named fp32 weights with their gradients, as the optimizer sees them."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def zero_grad(self) -> None: ...

    def copy_to_model(self) -> None:
        """Called after the optimizer's step: copies the updated weights to the model."""
        ...

    def copy_from_model(self) -> None:
        """Called when the model's weights were set directly (a checkpoint without master weights)."""
        ...

    def take_copy(self, name: str) -> Tensor | None:
        """The model's memory for a master weight, of its shape, which the caller writes from now on: `copy_to_model`
        leaves it out. None where the two share memory."""
        ...

    def expect(self, passes: int) -> None:
        """Called before the backward passes of a step, with their number."""
        ...

    def begin_pass(self, number: int) -> None:
        """Called before each backward pass, with its index from 0."""
        ...

    def reduce(self) -> None:
        """Called after the backward passes: completes the reduction over the ranks with the same weights."""
        ...

    def finish_gather(self) -> None:
        """Waits until the model's weights are all-gathered on this rank."""
        ...

    def unshard(self, name: str, part: Tensor | None) -> Tensor:
        """The local tensor, of the parameter's shape, from the shards of all ranks. Collective."""
        ...

    def shard(self, name: str, local: Tensor) -> Tensor:
        """This rank's shard of a local tensor; the inverse of `unshard`."""
        ...

    def owned_slices(self, name: str) -> list[TensorSlice]:
        """The slices of the local tensor that this rank's shard consists of, in the order of its elements."""
        ...

    def owned_weight(self, name: str) -> tuple[list[TensorSlice], Tensor]:
        """This rank's shard of the model's own parameter, sharing its memory. After writing to it, call
        `copy_from_model`, unless the master weights are set too."""
        ...


class UnshardedWeights:
    """Base of master weights that are not sharded and whose gradients are not reduced: methods do nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def take_copy(self, name: str) -> Tensor | None:
        return None

    def expect(self, passes: int) -> None: ...

    def begin_pass(self, number: int) -> None: ...

    def reduce(self) -> None: ...

    def finish_gather(self) -> None: ...

    def unshard(self, name: str, part: Tensor | None) -> Tensor:
        assert part is not None
        return part

    def shard(self, name: str, local: Tensor) -> Tensor:
        return local

    def owned_slices(self, name: str) -> list[TensorSlice]:
        return [TensorSlice.whole(tuple(self.model.get_parameter(name).shape))]

    def owned_weight(self, name: str) -> tuple[list[TensorSlice], Tensor]:
        parameter = self.model.get_parameter(name).detach()
        return [TensorSlice.whole(tuple(parameter.shape))], parameter


class Fp32Weights(UnshardedWeights):
    """fp32 training: the model's weights are the master weights."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return trained_parameters(self.model)

    def zero_grad(self) -> None:
        # With None the first micro-batch's gradient is stored and not added, which saves writing and reading zeros.
        self.model.zero_grad(set_to_none=True)

    def copy_to_model(self) -> None: ...

    def copy_from_model(self) -> None: ...


class AccumulatedWeights(UnshardedWeights):
    """Base of 16-bit training with gradients that are accumulated in fp32.

    weight_of: the optimizer's weight for each of the model's, of its shape.
    """

    def __init__(self, model: nn.Module, weight_of: Callable[[nn.Parameter], nn.Parameter]) -> None:
        super().__init__(model)
        self.own = {name: weight_of(parameter) for name, parameter in trained_parameters(model)}
        self._mains: dict[str, MainGrad] = {}
        for name, parameter in trained_parameters(model):
            gradient = torch.zeros_like(self.own[name], dtype=torch.float32)
            # Set once: products and hooks write to its memory through the MainGrad.
            self.own[name].grad = gradient
            # A weight in 32 bits among others: nothing but its hook adds to the sum.
            self._mains[name] = attach_main_grad(parameter, gradient) or MainGrad(gradient)
            parameter.register_post_accumulate_grad_hook(_accumulate_into(self._mains[name]))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.own.items())

    def zero_grad(self) -> None:
        clear_all(self._mains.values())

    def reduce(self) -> None:
        for main in self._mains.values():
            # A weight that got no gradient in this step: its memory has last step's values until zeros are written.
            main.settle()


class Fp32MasterWeights(AccumulatedWeights):
    """16-bit training: fp32 copies, and fp32 accumulation of gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, _fp32_copy)
        self._taken: set[str] = set()

    def take_copy(self, name: str) -> Tensor | None:
        self._taken.add(name)
        return self.model.get_parameter(name).detach()

    @torch.no_grad()
    def copy_to_model(self) -> None:
        for name, parameter in trained_parameters(self.model):
            if name not in self._taken:
                parameter.copy_(self.own[name])

    @torch.no_grad()
    def copy_from_model(self) -> None:
        for name, parameter in trained_parameters(self.model):
            self.own[name].copy_(parameter)


class Fp32RemainderWeights(AccumulatedWeights):
    """16-bit training without copies: the optimizer keeps the other 16 bits of each weight (`FusedAdamW`), and
    gradients are accumulated in fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, _same_memory)

    def copy_to_model(self) -> None: ...

    def copy_from_model(self) -> None: ...


class RemainderWeights(Fp32Weights):
    """Same as Fp32RemainderWeights, with gradients in the dtype of the weights."""


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of the parameters that the optimizer updates."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _fp32_copy(parameter: nn.Parameter) -> nn.Parameter:
    # copy=True: for a weight that is already fp32, detach().float() would alias its memory.
    return nn.Parameter(parameter.detach().to(torch.float32, copy=True))


def _same_memory(parameter: nn.Parameter) -> nn.Parameter:
    """Beside the model's, whose gradient has the dtype that autograd gives it."""
    # detach() shares memory: the optimizer's write is the model's.
    weight = nn.Parameter(parameter.detach())
    # torch requires a gradient in the dtype of its tensor unless grad_dtype says otherwise.
    weight.grad_dtype = torch.float32
    return weight


def _accumulate_into(main: MainGrad) -> Callable[[Tensor], None]:
    def accumulate(parameter: Tensor) -> None:
        # None where a matrix product has added the gradient to main_grad itself.
        if parameter.grad is not None:
            main.add(parameter.grad)
            parameter.grad = None

    return accumulate


def build_master_weights(model: nn.Module) -> MasterWeights:
    """The master weights of a model that is not replicated on other ranks."""
    is_fp32 = all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return Fp32Weights(model) if is_fp32 else Fp32MasterWeights(model)
