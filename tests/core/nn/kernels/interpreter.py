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


def implementation(kernel: KernelName, name: str) -> Callable[..., Any]:
    return {i.name: i for i in KERNELS[kernel]}[name].function.load()


def fused(kernel: KernelName) -> Callable[..., Any]:
    """Triton's form of a kernel with the operations around it; see the catalogue."""
    form = {i.name: i for i in KERNELS[kernel]}["triton"].fused
    assert form is not None
    return form.load()
