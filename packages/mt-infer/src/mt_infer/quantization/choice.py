"""Whether products with quantized weights are computed by the Triton kernel or from dequantized weights."""

from __future__ import annotations

import torch

from mt_core.nn.kernels.request import KernelRequest, supports_triton

FP8_SINCE = (8, 9)
"""Compute capability."""


def kernel_objection(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot multiply numbers of this format with inputs of this dtype; None if it can."""
    request = KernelRequest(device_type=device.type, dtype=str(dtype).removeprefix("torch."))
    if (reason := supports_triton(request)) is not True:
        return str(reason)
    # Triton is there, and not for a GPU: its interpreter, with TRITON_INTERPRET=1, which tests use.
    if device.type != "cuda":
        return "triton's interpreter does not multiply bf16" if dtype == torch.bfloat16 else None
    # Conversions of e4m3 exist from this compute capability on.
    if name == "fp8" and torch.cuda.get_device_capability(device) < FP8_SINCE:
        return f"{torch.cuda.get_device_name(device)} has no FP8"
    return None


def product_description(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """How products with weights of this format are computed, for people."""
    objection = kernel_objection(name, device, dtype)
    if objection is None:
        return f"Triton weight-only kernel on {device.type.upper()}"
    dequantized = f"dequantized by torch on {device.type.upper()}"
    return f"{dequantized}: {objection}" if device.type == "cuda" else dequantized
