"""The dtypes of the format, under their safetensors names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ElementType:
    """torch_name is the attribute of torch that holds the dtype; num_bytes counts one element."""

    torch_name: str
    num_bytes: int

    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.torch_name)


ELEMENT_TYPES = {
    "F64": ElementType("float64", 8),
    "F32": ElementType("float32", 4),
    "F16": ElementType("float16", 2),
    "BF16": ElementType("bfloat16", 2),
    "F8_E4M3": ElementType("float8_e4m3fn", 1),
    "F8_E5M2": ElementType("float8_e5m2", 1),
    "F8_E8M0": ElementType("float8_e8m0fnu", 1),
    "I64": ElementType("int64", 8),
    "I32": ElementType("int32", 4),
    "I16": ElementType("int16", 2),
    "I8": ElementType("int8", 1),
    "U64": ElementType("uint64", 8),
    "U32": ElementType("uint32", 4),
    "U16": ElementType("uint16", 2),
    "U8": ElementType("uint8", 1),
    "BOOL": ElementType("bool", 1),
}


def format_name(dtype: torch.dtype) -> str | None:
    """The name of `dtype` in the format, or None when it cannot be stored."""
    torch_name = str(dtype).removeprefix("torch.")
    return next((name for name, element in ELEMENT_TYPES.items() if element.torch_name == torch_name), None)
