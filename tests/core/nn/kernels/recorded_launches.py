"""Launches of Triton kernels with tensors of the meta device, and their compilation for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from tests.core.nn.kernels.cubin import resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}


class Launch(NamedTuple):
    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Compiled(NamedTuple):
    name: str
    registers: int
    """Of a thread."""
    stack: int
    """Bytes of a thread: what does not fit into registers."""
    shared: int
    """Bytes of a program."""
    ptx: str


def launches_of(function: Callable[[], object], patch: Callable[[Any, str, Any], None]) -> list[Launch]:
    """What the function would launch. patch: setattr, or monkeypatch's."""
    launches: list[Launch] = []

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(Launch(self, arguments, options))

    patch(JITFunction, "run", run)
    function()
    return launches


def compiled(launch: Launch, folder: Path, capability: int = 90) -> Compiled:
    """As the launch would compile the kernel. folder: for a file."""
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(launch.kernel.params, launch.arguments, strict=True)):
        signature[parameter.name] = kind_of(parameter, value)
        if signature[parameter.name] == "constexpr":
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    used = resources(kernel.asm["cubin"], folder)
    return Compiled(launch.kernel.__name__, used["REG"], used["STACK"], kernel.metadata.shared, kernel.asm["ptx"])


def kind_of(parameter: Any, value: Any) -> str:
    # Triton compiles the number 1 into a kernel.
    if parameter.is_constexpr or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"
