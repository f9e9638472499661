"""What the rules of a name map make of tensors, found by carrying them out on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mt_ckpt.safetensors_files import TensorInfo


def infer(function: Callable[[list[Tensor]], Sequence[Tensor]], inputs: Sequence[TensorInfo]) -> list[TensorInfo]:
    """Shapes and dtypes of what `function` makes of tensors of the given ones. Raises what torch raises."""
    empty = [torch.empty(info.shape, dtype=info.dtype, device="meta") for info in inputs]
    with _LightJoining():
        made = function(empty)
    return [TensorInfo(tuple(tensor.shape), tensor.dtype) for tensor in made]


class _LightJoining(TorchFunctionMode):
    """torch.cat and torch.stack of tensors without values, which in torch import its compiler: seconds and 200 MB."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Other functions are the meta device's own.
        if func is torch.cat:
            func = _concatenated
        elif func is torch.stack:
            func = _stacked
        return func(*args, **(kwargs or {}))


def _concatenated(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = tensors[0]
    dim %= first.ndim
    # Equal in all but the joined dimension.
    _require_same((x.dtype, *x.shape[:dim], -1, *x.shape[dim:][1:]) for x in tensors)
    size = sum(x.shape[dim] for x in tensors)
    return first.new_empty([*first.shape[:dim], size, *first.shape[dim:][1:]])


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = tensors[0]
    dim %= first.ndim + 1
    _require_same((x.dtype, *x.shape) for x in tensors)
    return first.new_empty([*first.shape[:dim], len(tensors), *first.shape[dim:]])


def _require_same(kinds: Iterable[tuple[Any, ...]]) -> None:
    """Raises RuntimeError, as torch does, for tensors that cannot be joined."""
    if len(found := set(kinds)) > 1:
        raise RuntimeError(f"tensors of the kinds {sorted(found, key=str)} cannot be joined")
