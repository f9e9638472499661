"""Assigning kernels to models, losses and optimizers after they are built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, cast

from mt_core.config.schema import Config
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.request import KernelName
from mt_core.parallel.context import ParallelContext

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class UsesKernels(Protocol):
    """A module, loss or optimizer that uses kernels with several implementations. The default is plain torch."""

    def use_kernels(self, kernels: Kernels) -> None:
        """Pick what it needs. Raises ConfigError when a named implementation cannot serve."""
        ...


def configured_kernels(config: Config, ctx: ParallelContext) -> Kernels:
    """What the section `kernels` selects, on the device and in the dtype of the run."""
    wanted = cast(Mapping[KernelName, str], config.kernels.model_dump())
    return Kernels(wanted, ctx.device.type, DTYPES[config.precision.dtype])


def use_kernels(parts: Iterable[object], kernels: Kernels) -> None:
    """Call `use_kernels` of each part that has it."""
    for part in parts:
        # hasattr, since isinstance of a Protocol costs 30 us in Python 3.11, and some models have 10,000 modules.
        if hasattr(part, "use_kernels"):
            cast(UsesKernels, part).use_kernels(kernels)
