"""`moe_grouped_gemm`: which grouped GEMM serves the device, the dtype and the sizes of the experts."""

from __future__ import annotations

from typing import Literal

import torch

from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_moe.experts.grouped import grouped_mm_objection, grouped_product, is_one_kernel
from mt_moe.experts.groups import GroupedProduct
from mt_moe.experts.loop import PermutingLoop, loop_product
from mt_moe.kernels.availability import triton_objection

KEY = "model.moe.moe_grouped_gemm"
Name = Literal["loop", "grouped", "triton"]


def resolve_product(
    asked: Literal["auto"] | Name,
    ctx: ParallelContext,
    sizes: tuple[int, ...],
    planned_capability: tuple[int, int] | None = None,
) -> Name:
    """sizes: rows and columns of an expert's matrices on this rank. planned_capability: of the GPU that the meta device
    represents. Raises ConfigError if the choice cannot run."""
    if asked == "auto":
        return _automatic(ctx, sizes, planned_capability)
    objection = None
    if asked == "grouped":
        objection = grouped_mm_objection(ctx.params_dtype, sizes)
    elif asked == "triton":
        objection = triton_objection(ctx.device.type)
    if objection is not None:
        raise ConfigError(f"{KEY}={asked} cannot serve: {objection}; use auto or loop")
    return asked


def _automatic(ctx: ParallelContext, sizes: tuple[int, ...], planned: tuple[int, int] | None) -> Name:
    capability = torch.cuda.get_device_capability(ctx.device) if ctx.device.type == "cuda" else planned
    if capability is None:
        return "loop"
    # Ampere and later, which have bf16 products.
    if capability >= (8, 0) and triton_objection(ctx.device.type) is None:
        return "triton"
    takes_sizes = grouped_mm_objection(ctx.params_dtype, sizes) is None
    return "grouped" if takes_sizes and is_one_kernel(capability, ctx.params_dtype) else "loop"


def load_product(name: Name, device_type: str = "cuda") -> GroupedProduct:
    """The implementation; on the meta device the one that is planned in its place."""
    if device_type == "meta":
        return PermutingLoop() if name == "triton" else loop_product
    if name == "triton":
        from mt_moe.experts.triton import TritonProduct

        return TritonProduct()
    return {"loop": loop_product, "grouped": grouped_product}[name]
