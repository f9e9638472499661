"""Bytes that torch's operators read and write, by their schemas: whatever a function calls is counted as it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from mt_core._torch_compat import UncompiledDispatchMode

ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
OVERWRITING = {"copy_", "fill_", "zero_", "_foreach_zero_", "_foreach_copy_"}
"""Operators that write their first argument without a look at what it held."""


class OperatorBytes(UncompiledDispatchMode):
    """counts: which tensors count. One that an operator both reads and writes counts twice."""

    def __init__(self, counts: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        super().__init__()
        self.counts = counts
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = kwargs.get("out")
        # On the meta device there is nothing to compute, and torch 2.11 has no addmm with `out_dtype` there.
        result = out if isinstance(out, Tensor) and out.is_meta else func(*args, **kwargs)
        self.bytes += sum(x.nbytes for x in read_and_written(func, args, kwargs, result) if self.counts(x))
        return result


def read_and_written(func: Any, args: Any, kwargs: Any, result: Any) -> Iterator[Tensor]:
    """Each tensor once for being read and once for being written. Views and allocations move nothing."""
    name = func.overloadpacket.__name__
    if func.is_view or name in ALLOCATIONS:
        return
    schema = func._schema
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    for argument in schema.arguments:
        tensors = [x for x in tree_leaves(given.get(argument.name)) if isinstance(x, Tensor)]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not (is_written and (argument.is_out or name in OVERWRITING))
        yield from tensors * (is_read + is_written)
    # A result that aliases an argument was counted with it.
    if all(returned.alias_info is None for returned in schema.returns):
        yield from (x for x in tree_leaves(result) if isinstance(x, Tensor))
