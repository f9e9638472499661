"""Element types of GGUF. A quantized type packs blocks of elements of a row with their scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mt_ckpt.gguf import dequantize, dequantize_codebooks, dequantize_floats

Dequantize = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class BlockType:
    """A block of `elements` takes `num_bytes`. dtype: of the tensor that is made of it. number: in the file."""

    name: str
    number: int
    elements: int
    num_bytes: int
    dtype: torch.dtype = torch.float32
    dequantize: Dequantize | None = None

    def to_tensor(self, data: np.ndarray) -> Tensor:
        """[elements] from the bytes of whole blocks."""
        if self.dequantize is None:
            # No byte swap: the file is little-endian, and so is the machine.
            return torch.from_numpy(data).view(self.dtype)
        # Random or damaged scales may be infinite: the product is then what ggml computes, without a warning.
        with np.errstate(all="ignore"):
            return torch.from_numpy(self.dequantize(data.reshape(-1, self.num_bytes))).reshape(-1)

    def size(self, elements: int) -> int:
        """Bytes of so many elements of whole blocks."""
        return elements // self.elements * self.num_bytes


_ALL = (
    BlockType("F32", 0, 1, 4),
    BlockType("F16", 1, 1, 2, torch.float16),
    BlockType("BF16", 30, 1, 2, torch.bfloat16),
    BlockType("F64", 28, 1, 8, torch.float64),
    BlockType("I8", 24, 1, 1, torch.int8),
    BlockType("I16", 25, 1, 2, torch.int16),
    BlockType("I32", 26, 1, 4, torch.int32),
    BlockType("I64", 27, 1, 8, torch.int64),
    BlockType("Q4_0", 2, 32, 18, dequantize=dequantize.q4_0),
    BlockType("Q4_1", 3, 32, 20, dequantize=dequantize.q4_1),
    BlockType("Q5_0", 6, 32, 22, dequantize=dequantize.q5_0),
    BlockType("Q5_1", 7, 32, 24, dequantize=dequantize.q5_1),
    BlockType("Q8_0", 8, 32, 34, dequantize=dequantize.q8_0),
    BlockType("Q2_K", 10, 256, 84, dequantize=dequantize.q2_k),
    BlockType("Q3_K", 11, 256, 110, dequantize=dequantize.q3_k),
    BlockType("Q4_K", 12, 256, 144, dequantize=dequantize.q4_k),
    BlockType("Q5_K", 13, 256, 176, dequantize=dequantize.q5_k),
    BlockType("Q6_K", 14, 256, 210, dequantize=dequantize.q6_k),
    BlockType("Q8_K", 15, 256, 292, dequantize=dequantize.q8_k),
    BlockType("IQ1_S", 19, 256, 50, dequantize=dequantize_codebooks.iq1_s),
    BlockType("IQ1_M", 29, 256, 56, dequantize=dequantize_codebooks.iq1_m),
    BlockType("IQ2_XXS", 16, 256, 66, dequantize=dequantize_codebooks.iq2_xxs),
    BlockType("IQ2_XS", 17, 256, 74, dequantize=dequantize_codebooks.iq2_xs),
    BlockType("IQ2_S", 22, 256, 82, dequantize=dequantize_codebooks.iq2_s),
    BlockType("IQ3_XXS", 18, 256, 98, dequantize=dequantize_codebooks.iq3_xxs),
    BlockType("IQ3_S", 21, 256, 110, dequantize=dequantize_codebooks.iq3_s),
    BlockType("IQ4_NL", 20, 32, 18, dequantize=dequantize_codebooks.iq4_nl),
    BlockType("IQ4_XS", 23, 256, 136, dequantize=dequantize_codebooks.iq4_xs),
    BlockType("TQ1_0", 34, 256, 54, dequantize=dequantize_floats.tq1_0),
    BlockType("TQ2_0", 35, 256, 66, dequantize=dequantize_floats.tq2_0),
    BlockType("MXFP4", 39, 32, 17, dequantize=dequantize_floats.mxfp4),
    BlockType("NVFP4", 40, 64, 36, dequantize=dequantize_floats.nvfp4),
    BlockType("Q1_0", 41, 128, 18, dequantize=dequantize_floats.q1_0),
    BlockType("Q2_0", 42, 64, 18, dequantize=dequantize_floats.q2_0),
)
TYPES = {type_.number: type_ for type_ in _ALL}
"""Number of a type in the file -> what it is."""
BY_NAME = {type_.name: type_ for type_ in _ALL}
