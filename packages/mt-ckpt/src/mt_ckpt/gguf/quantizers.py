"""Which types can be written, and quantization of tensors in pieces over threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from mt_ckpt.gguf import quantize_blocks, quantize_k
from mt_ckpt.gguf.block_types import BY_NAME, BlockType
from mt_core.errors import ConfigError

Quantize = Callable[[np.ndarray, np.ndarray | None], np.ndarray]
"""(float32 [blocks, elements of a block], importance of each element or None) -> bytes [blocks, bytes of a block]."""
QUANTIZERS: Mapping[str, Quantize] = {
    "Q4_0": quantize_blocks.q4_0,
    "Q4_1": quantize_blocks.q4_1,
    "Q5_0": quantize_blocks.q5_0,
    "Q5_1": quantize_blocks.q5_1,
    "Q8_0": quantize_blocks.q8_0,
    "Q4_K": quantize_k.q4_k,
    "Q5_K": quantize_k.q5_k,
    "Q6_K": quantize_k.q6_k,
    "IQ4_NL": quantize_blocks.iq4_nl,
    "IQ4_XS": quantize_blocks.iq4_xs,
    "MXFP4": quantize_blocks.mxfp4,
}
BY_ROW = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Types whose weights with an importance matrix depend on the mean square of the whole row."""
PIECE = 1 << 16
"""Elements quantized together: their arrays stay in a core's cache."""


def quantize(values: Tensor, type_: BlockType, importance: np.ndarray | None = None, threads: int = 0) -> np.ndarray:
    """Bytes of a tensor [..., width] in the type. importance: [width], float32. threads: 0 for one on each core.

    Raises ConfigError for a type that is not written, or a width that is no whole number of blocks.
    """
    if type_.dequantize is None:
        return values.to(type_.dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
    if type_.name not in QUANTIZERS or values.shape[-1] % type_.elements:
        raise ConfigError(f"rows of {values.shape[-1]} elements cannot be quantized to {type_.name}")
    rows = values.reshape(-1, values.shape[-1])
    encoded = np.empty((len(rows), type_.size(rows.shape[1])), np.uint8)
    step = max(1, PIECE // rows.shape[1])
    starts = range(0, len(rows), step)

    def encode(start: int) -> None:
        piece = rows[start : start + step].float().numpy()
        encoded[start : start + step] = _encode(piece, type_, importance).reshape(len(piece), -1)

    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(encode, starts):
            pass
    return encoded.reshape(-1)


def _encode(rows: np.ndarray, type_: BlockType, importance: np.ndarray | None) -> np.ndarray:
    weights = None
    if importance is not None:
        weights = np.broadcast_to(importance.astype(np.float32), rows.shape)
        if type_.name in BY_ROW:
            # Row by row, in order, as ggml adds them.
            mean = np.cumsum(rows * rows, axis=1, dtype=np.float32)[:, -1:] / np.float32(rows.shape[1])
            weights = weights * np.sqrt(mean + rows * rows)
        weights = weights.reshape(-1, type_.elements)
    # Blocks of zeros divide by zero; what comes of it is not used.
    with np.errstate(all="ignore"):
        return QUANTIZERS[type_.name](rows.reshape(-1, type_.elements), weights)


def require_writable(name: str) -> BlockType:
    if name not in QUANTIZERS and (name not in BY_NAME or BY_NAME[name].dequantize is not None):
        raise ConfigError(f"the GGUF type {name} is not written; it can be {', '.join(QUANTIZERS)}, F32, F16 or BF16")
    return BY_NAME[name]
