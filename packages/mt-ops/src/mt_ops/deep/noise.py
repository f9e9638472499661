"""A twin: the same computation with other rounding, which says how far apart two correct ones may be.

What makes two correct computations differ is the order of sums (kernels, ranks) and the rounding of each operation.
A twin has both. Matrix products are summed in another order, drawn anew for each. Outputs of modules, and gradients at
them, move by one unit in the last place, up or down: as much as twelve roundings together, each of which is even over
half a unit to both sides, with a variance of a twelfth. Between two modules there are no more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mt_core._torch_compat import UncompiledDispatchMode

aten = torch.ops.aten
PRODUCTS: Mapping[Any, int] = {
    aten.mm.default: 0,
    aten.mm.out: 0,
    aten.bmm.default: 0,
    aten.bmm.out: 0,
    aten.mv.default: 0,
    aten.addmm.default: 1,
    aten.addmm.out: 1,
    aten.addmm_.default: 1,
    aten.baddbmm.default: 1,
    aten.baddbmm_.default: 1,
}
"""Operation -> place of its left factor, behind which the right one stands."""
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
"""Beginnings of names of fused operations, whose sums cannot be ordered: their inputs move instead."""


class OtherOrder(UncompiledDispatchMode):
    """Within it every matrix product sums over its inner dimension in another order."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        place = PRODUCTS.get(func)
        if place is not None:
            args = (*args[:place], *self._reordered(args[place], args[place + 1]), *args[place + 2 :])
        elif func.overloadpacket.__name__.startswith(ATTENTION) and "backward" not in func.overloadpacket.__name__:
            args = tuple(self._moved(value) for value in args)
        return func(*args, **(kwargs or {}))

    def _reordered(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """left: [..., m, k]; right: [..., k, n] or [k]."""
        order = torch.randperm(left.shape[-1], generator=self.generator).to(left.device)
        return left.index_select(-1, order), right.index_select(max(right.ndim - 2, 0), order)

    def _moved(self, value: Any) -> Any:
        is_number = isinstance(value, Tensor) and value.is_floating_point()
        return value + step_of_one_unit(value, self.generator) if is_number else value


class _Moved(torch.autograd.Function):
    """x with each element moved by one unit in the last place; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, generator: torch.Generator) -> Tensor:
        ctx.generator = generator
        return x + step_of_one_unit(x, generator)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] + step_of_one_unit(gradients[0], ctx.generator), None


def step_of_one_unit(x: Tensor, generator: torch.Generator) -> Tensor:
    """From each element to the next larger or smaller number of its dtype; 0 stays."""
    signs = torch.randint(0, 2, x.shape, generator=generator).to(x.device).bool()
    towards = torch.where(signs, torch.inf, -torch.inf).to(x.dtype)
    # A value of 0 stands for one that is 0 in every order: a mask, an unused row.
    return torch.where(x == 0, torch.zeros_like(x), torch.nextafter(x, towards) - x)


@contextmanager
def other_rounding(model: nn.Module, seed: int) -> Iterator[None]:
    """Within it the model computes as a twin does. seed: of the twin; the same on ranks that hold copies."""
    generator = torch.Generator().manual_seed(seed)
    with ExitStack() as stack:
        for module in model.modules():
            handle = module.register_forward_hook(_move_output(generator))
            stack.callback(handle.remove)
        stack.enter_context(OtherOrder(generator))
        yield


def _move_output(generator: torch.Generator) -> Callable[[nn.Module, Any, Any], Any]:
    def move(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor) and output.is_floating_point():
            return _Moved.apply(output, generator)
        return None

    return move
