"""Fake routing on the meta device: choices of experts are assigned, everything that follows from them is computed.

On the meta device scores have no values, so that the top-k is unknown. Inside of `RoutedTokens` every `topk` returns
assigned indices, spread evenly or concentrated on few experts, as real tensors on the CPU. Counts, orders and sizes
that a dispatcher computes from them are real too; a result of them and a tensor without values has no values. So the
real router, dispatcher and experts run, third-party ones included, with a known load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from mt_core._torch_compat import UncompiledDispatchMode
from mt_tools.plan.result_cache import ResultCache, tensors_in

aten = torch.ops.aten

Assignment = Callable[[int, int, int], Tensor]
"""(rows, k, choices) -> [rows, k] int64: k different numbers below `choices` for each row"""


def assign_round_robin(rows: int, k: int, choices: int) -> Tensor:
    """Balanced load: the numbers of tokens of any two experts differ by at most one."""
    # rows 3, k 2, choices 4: [[0, 1], [2, 3], [0, 1]]
    return (torch.arange(rows * k) % choices).view(rows, k)


def assign_to_few(rows: int, k: int, choices: int) -> Tensor:
    """The same k choices for every row: the first rank's experts get as many of the tokens as possible."""
    return torch.arange(k).repeat(rows, 1)


class RoutedTokens:
    """Context in which choices are assigned; to be entered for forward and backward passes alike. cache: the
    result cache of other contexts, which run mostly the same operations."""

    def __init__(self, assign: Assignment, cache: ResultCache | None = None) -> None:
        self.assign, self.cache = assign, cache or ResultCache()
        self._entered = ExitStack()

    def __enter__(self) -> None:
        # Two modes: torch.tensor is a function, which never reaches __torch_dispatch__ with its values.
        self._entered.enter_context(_Numbers())
        self._entered.enter_context(_Choices(self.assign, self.cache))

    def __exit__(self, *error: object) -> None:
        self._entered.close()


class _Numbers(TorchFunctionMode):
    """Integer tensors from literals keep their values: torch.tensor([3, 5], device="meta") is on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.tensor and torch.device(options.get("device") or "cpu").type == "meta":
            tensor = torch.tensor(*args, **{**options, "device": "cpu"})
            return tensor if _is_known(tensor) else tensor.to("meta")
        return func(*args, **options)


class _Choices(UncompiledDispatchMode):
    """Assigns experts to tokens, and computes what follows from that."""

    def __init__(self, assign: Assignment, cache: ResultCache) -> None:
        super().__init__()
        self.assign, self.cache = assign, cache

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        # Of real indices, on the CPU, these operations are computed.
        if func in WITHOUT_VALUES and args[0].device.type == "meta":
            return WITHOUT_VALUES[func](self.assign, func, args, options)
        if (key := self.cache.key(func, args, options)) is not None:
            return self.cache.of(key, func, args, options)
        # All tensors with values, or none: computed as they are. Mixed: operations take tensors of one device, and the
        # result has no values.
        with_values = {_has_values(tensor) for tensor in tensors_in((*args, *options.values()))}
        if len(with_values) < 2:
            return func(*args, **options)
        args, options = tree_map(_forgotten, (_positions(func, args), options))
        return self.cache(func, args, options)


def _has_values(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _forgotten(value: Any) -> Any:
    return value.to("meta") if _has_values(value) else value


def _is_known(tensor: Tensor) -> bool:
    return not tensor.is_floating_point()


def _positions(func: Any, args: Any) -> Any:
    """Boolean masks among indices, as the positions of their true elements: their number has to be known."""
    if func is not aten.index.Tensor:
        return args
    indices: list[Tensor | None] = []
    for index in args[1]:
        is_mask = index is not None and _has_values(index) and index.dtype is torch.bool
        indices += index.nonzero().unbind(1) if is_mask else [index]
    return args[0], indices


MOST_EXPERTS = 256
"""More choices than these are keys of a position (an indexer's), on whose values no size depends: with values, a matrix
of all queries and keys would be computed for each layer and kind of load."""


def _topk(assign: Assignment, func: Any, args: Any, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Values on the meta device and assigned indices, but for those of keys; along the last dimension"""
    values, indices = func(*args, **options)
    if indices.shape[-1] > MOST_EXPERTS:
        return values, indices
    rows = indices.shape[:-1].numel()
    return values, assign(rows, indices.shape[-1], args[0].shape[-1]).view(indices.shape)


def _sort(assign: Assignment, func: Any, args: Any, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns the identity permutation, as if the input were sorted."""
    values, indices = func(*args, **options)
    return values, torch.arange(indices.shape[-1]).expand(indices.shape)


def _bincount(assign: Assignment, func: Any, args: Any, options: Mapping[str, Any]) -> Tensor:
    """Returns the smallest length that was requested."""
    _, _, length = (*args, None, 0)[:3]
    return torch.empty(options.get("minlength", length), dtype=torch.int64, device="meta")


def _scaled_grouped_mm(assign: Assignment, func: Any, args: Any, options: Mapping[str, Any]) -> Tensor:
    """torch 2.11 has no shapes for it. Rows [R, K] x matrices [E, K, N] -> [R, N]; [M, R] x [R, N] -> [E, M, N]"""
    left, right, ends, dtype = args[0], args[1], args[8], args[10]
    shape = (len(left), right.shape[-1]) if right.dim() == 3 else (len(ends), len(left), right.shape[-1])
    return left.new_empty(shape, dtype=dtype)


WITHOUT_VALUES: Mapping[Any, Callable[..., Any]] = {
    aten.topk.default: _topk,
    aten.sort.stable: _sort,
    aten.sort.default: _sort,
    aten.bincount.default: _bincount,
    aten._scaled_grouped_mm_v2.default: _scaled_grouped_mm,
}
"""Operations on tensors without values whose results are indices or sizes, or whose shapes torch does not have."""
