"""Graphs without a GPU: the operators of a capture with their tensors, called again with results put where they were.

As a CUDA graph does, a replay runs no Python of what was captured and reads and writes the memory of the capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TapedGraph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not (func.is_view and shares_memory(out, args)):
            self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                again = func(*args, **kwargs)
                for own, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(own, torch.Tensor) and own is not new and own.data_ptr() != new.data_ptr():
                        own.detach().copy_(new)


def shares_memory(out: Any, args: Any) -> bool:
    """Whether this is a view. In inference mode `reshape` is an operator, which may copy."""
    storages = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
    return all(x.untyped_storage().data_ptr() in storages for x in tree_leaves(out) if isinstance(x, torch.Tensor))


class TapeRecorder:
    """A Recorder. graphs: those of each pool."""

    def __init__(self) -> None:
        self.pools: list[list[TapedGraph]] = []
        self.runs_aside = 0

    def new_pool(self) -> list[TapedGraph]:
        self.pools.append([])
        return self.pools[-1]

    @contextmanager
    def capture(self, pool: list[TapedGraph]) -> Iterator[TapedGraph]:
        graph = TapedGraph()
        pool.append(graph)
        with graph:
            yield graph

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.runs_aside += 1
        yield
