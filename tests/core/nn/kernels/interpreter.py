"""Runs a function where triton interprets kernels on CPU tensors.

The switch has to be set before triton is imported, and an imported triton cannot be switched; so the function runs
in a process of its own, forked from one that has torch and not triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mt_core.nn.kernels.catalogue import KERNELS
from mt_core.nn.kernels.request import KernelName
from mt_core.testing import run_ranks


def run_interpreted(function: Callable[..., Any], *args: Any, ranks: int = 1) -> list[Any]:
    """What function(rank, world, *args) returned on each rank. function has to be a module's."""
    return run_ranks(ranks, _switched_on, function, args)


def _switched_on(rank: int, world: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ["TRITON_INTERPRET"] = "1"
    patch_language_once()
    multiply_numbers_of_bf16()
    scan_positions_at_once()
    return function(rank, world, *args)


def patch_language_once() -> None:
    """Triton's interpreter replaces the functions of triton.language at each launch, and again at each call of a device
    function: half of the time of a small kernel. Here, where only interpreted kernels use them, they stay replaced."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_for(function: Callable[..., Any]) -> Any:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_for


def multiply_numbers_of_bf16() -> None:
    """Triton's interpreter keeps bf16 in 16-bit integers, which its products multiply as integers."""
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    product = interpreter.InterpreterBuilder.create_dot

    def single(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def product_of_numbers(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return product(self, single(a), single(b), *others)

    interpreter.InterpreterBuilder.create_dot = product_of_numbers


def scan_positions_at_once() -> None:
    """Triton's interpreter calls the function of a scan for each element; here for each place along the axis, with all
    elements that are there."""
    import numpy as np
    from triton.runtime.interpreter import ScanOps

    def scan(self: Any, inputs: list[Any]) -> list[Any]:
        arrays = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
        results = [[array[0] for array in arrays]]
        for place in range(1, len(arrays[0])):
            parts = (*results[-1], *(array[place] for array in arrays))
            tensors = [self.to_tensor(part, x.dtype) for part, x in zip(parts, 2 * list(inputs), strict=True)]
            joined = self.combine_fn.fn(*tensors)
            joined = joined if isinstance(joined, tuple) else (joined,)
            results.append([x.handle.data for x in joined])
        stacked = (np.stack(parts, self.axis) for parts in zip(*results, strict=True))
        return [self.to_tensor(array, x.dtype) for array, x in zip(stacked, inputs, strict=True)]

    ScanOps.generic_scan = scan


def implementation(kernel: KernelName, name: str) -> Callable[..., Any]:
    return {i.name: i for i in KERNELS[kernel]}[name].function.load()


def fused(kernel: KernelName) -> Callable[..., Any]:
    """Triton's form of a kernel with the operations around it; see the catalogue."""
    form = {i.name: i for i in KERNELS[kernel]}["triton"].fused
    assert form is not None
    return form.load()
