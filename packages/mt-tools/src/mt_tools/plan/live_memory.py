"""Bytes of the tensors that operations make on the meta device, while they live."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mt_core._torch_compat import UncompiledDispatchMode
from mt_tools.plan.result_cache import tensors_in


class LiveMemory(UncompiledDispatchMode):
    """Counts the storages that are made on the meta device while it is active, each until it is freed.

    Numbers of experts, which have values in a plan, are on the CPU and left out: 8 bytes beside a row of a token.

    bytes: of those alive. peak: the most that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._makes_new: dict[Any, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = kwargs.get("out")
        # Products into given memory make nothing; torch 2.11 has some of them on no meta device.
        out = given if isinstance(given, Tensor) and given.is_meta else func(*args, **kwargs)
        if func not in self._makes_new:
            self._makes_new[func] = all(one.alias_info is None for one in func._schema.returns)
        if self._makes_new[func]:
            for tensor in tensors_in((out,)):
                if tensor.is_meta:
                    self._add(tensor.untyped_storage())
        return out

    def bytes_without(self, others: Collection[StorageWeakRef]) -> int:
        """Of the living storages that are not among others."""
        alive = (reference() for reference in self._alive.values())
        return sum(each.nbytes() for each in alive if each is not None and StorageWeakRef(each) not in others)

    def reset_peak(self) -> None:
        self.peak = self.bytes

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        # An operation may return its argument, whatever its schema says.
        if address in self._alive:
            return

        def free(reference: object) -> None:
            del self._alive[address]
            self.bytes -= size

        # torch keeps the Python object of a storage for as long as the storage lives.
        self._alive[address] = weakref.ref(storage, free)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


def bytes_of(tensors: Collection[Tensor]) -> float:
    """Of their elements."""
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
