"""Models of `transformers` in fp64, where they compute in fp32 too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _DoubleForFloat(TorchFunctionMode):
    """Calls that ask for fp32, as norms and routers do, get fp64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        return func(*map(doubled, args), **{name: doubled(value) for name, value in (kwargs or {}).items()})


def doubled(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


@contextmanager
def in_double() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _DoubleForFloat():
            yield
    finally:
        torch.set_default_dtype(dtype)


def double_model(model: nn.Module) -> nn.Module:
    """A copy with its weights and buffers in fp64."""
    copy = deepcopy(model).double()
    # Grouped products have no fp64.
    copy.set_experts_implementation("eager")
    return copy
