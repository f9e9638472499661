"""Where tokens go when nobody knows their values: choices are dealt out, and what follows from them is computed.

On the meta device scores have no values, so that nobody can say which are the highest. Inside of `Dealt` every `topk`
gives indices that a deal decides, and these are real numbers, on the CPU. Counts, orders and sizes that a dispatcher
works out from them are real too; as soon as one meets a tensor without values the result has none either. So the very
router, dispatcher and experts run, those of other distributions included, with a load that is known beforehand.
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
from mt_core.plan.remembered import RememberedResults, tensors_in

aten = torch.ops.aten

Deal = Callable[[int, int, int], Tensor]
"""(rows, k, choices) -> [rows, k] int64: k different numbers below `choices` for each row"""


def dealt_in_turn(rows: int, k: int, choices: int) -> Tensor:
    """Every choice as often as any other, up to one: a balanced load."""
    return (torch.arange(rows * k) % choices).view(rows, k)


def dealt_to_few(rows: int, k: int, choices: int) -> Tensor:
    """The same k choices for every row: the first rank's experts get all tokens that can meet there."""
    return torch.arange(k).repeat(rows, 1)


class Dealt:
    """Context in which choices are dealt; to be entered for forward and backward passes alike. remembered: of other
    contexts, whose operations are the same for the most part."""

    def __init__(self, deal: Deal, remembered: RememberedResults | None = None) -> None:
        self.deal, self.remembered = deal, remembered or RememberedResults()
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(_Numbers())
        self._entered.enter_context(_Choices(self.deal, self.remembered))

    def __exit__(self, *error: object) -> None:
        self._entered.close()


class _Numbers(TorchFunctionMode):
    """Whole numbers that are written down keep their values: torch.tensor([3, 5], device="meta") is on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.tensor and torch.device(options.get("device") or "cpu").type == "meta":
            found = torch.tensor(*args, **{**options, "device": "cpu"})
            return found if _is_known(found) else found.to("meta")
        return func(*args, **options)


class _Choices(UncompiledDispatchMode):
    """Which experts a token chooses is dealt; what follows from that is computed."""

    def __init__(self, deal: Deal, remembered: RememberedResults) -> None:
        super().__init__()
        self.deal, self.remembered = deal, remembered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func in WITHOUT_VALUES and args[0].device.type == "meta":
            return WITHOUT_VALUES[func](self.deal, func, args, options)
        if (key := self.remembered.key(func, args, options)) is not None:
            return self.remembered.of(key, func, args, options)
        with_values = {_has_values(tensor) for tensor in tensors_in((*args, *options.values()))}
        if len(with_values) < 2:
            return func(*args, **options)
        args, options = tree_map(_forgotten, (_positions(func, args), options))
        return self.remembered(func, args, options)


def _has_values(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _forgotten(value: Any) -> Any:
    return value.to("meta") if _has_values(value) else value


def _is_known(tensor: Tensor) -> bool:
    return not tensor.is_floating_point()


def _positions(func: Any, args: Any) -> Any:
    """Masks among indices as the positions where they are true: how many there are has to be known."""
    if func is not aten.index.Tensor:
        return args
    found: list[Tensor | None] = []
    for index in args[1]:
        is_mask = index is not None and _has_values(index) and index.dtype is torch.bool
        found += index.nonzero().unbind(1) if is_mask else [index]
    return args[0], found


def _topk(deal: Deal, func: Any, args: Any, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """values without values, dealt indices; along the last dimension"""
    values, indices = func(*args, **options)
    rows = indices.shape[:-1].numel()
    return values, deal(rows, indices.shape[-1], args[0].shape[-1]).view(indices.shape)


def _sort(deal: Deal, func: Any, args: Any, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """As if everything were in order."""
    values, indices = func(*args, **options)
    return values, torch.arange(indices.shape[-1]).expand(indices.shape)


def _bincount(deal: Deal, func: Any, args: Any, options: Mapping[str, Any]) -> Tensor:
    """As long as the smallest length that was asked for."""
    _, _, length = (*args, None, 0)[:3]
    return torch.empty(options.get("minlength", length), dtype=torch.int64, device="meta")


WITHOUT_VALUES: Mapping[Any, Callable[..., Any]] = {
    aten.topk.default: _topk,
    aten.sort.stable: _sort,
    aten.sort.default: _sort,
    aten.bincount.default: _bincount,
}
"""Operations on tensors without values that decide where things go."""
