"""bitsandbytes (`quant_method: bitsandbytes`): nf4 and fp4 with statistics of their own, and int8.

4 bits: `weight` [n, 1], two codes in a byte, the first in the high half, over the whole matrix row by row;
`weight.absmax` for each block, `weight.quant_map` [16] and a JSON object as bytes in
`weight.quant_state.bitsandbytes__nf4`. Nested: `absmax` is uint8 in `nested_quant_map` [256], times `nested_absmax`
of its block, plus an offset. int8: `weight` int8 and `SCB` [out], the largest magnitude of each row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.external_tensors import ExternalTensors
from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized.weights import (
    SLICE,
    Claims,
    Parts,
    QuantizedWeight,
    Range,
    modules_with,
    require,
    require_dtype,
    require_shape,
    row_slices,
)
from mt_core.errors import CheckpointError

STATE = ".quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
INVERSE_127 = 7.874015718698502e-3
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class BitsAndBytes:
    dtype: torch.dtype
    """Dtype of dequantized weights of 8 bits; those of 4 bits say theirs."""

    def claims(self, tensors: ExternalTensors) -> Claims:
        four = [_four_bits(tensors, name, kind) for kind in KINDS for name in modules_with(tensors, f"{STATE}{kind}")]
        eight = [self._eight_bits(tensors, module) for module in modules_with(tensors, ".SCB")]
        return Claims([*four, *eight], {name for name in tensors.infos if name.endswith(".weight_format")})

    def _eight_bits(self, tensors: ExternalTensors, module: str) -> QuantizedWeight:
        name, scale = f"{module}.weight", f"{module}.SCB"
        info = require(tensors, scale, name)
        require_dtype(name, info, torch.int8)
        require_shape(scale, tensors.infos[scale], info.shape[:1], of=f"{name} {list(info.shape)}")
        layout = f"{module}.weight_format"
        if layout in tensors.infos and int(tensors.read(layout).reshape(-1)[0]) != 0:
            raise CheckpointError(f"{layout}: weights in an order of a device are not supported; 0, rows, is")
        weight_info = TensorInfo(info.shape, self.dtype)
        roles = {"weight": name, "SCB": scale}
        return QuantizedWeight(
            name, weight_info, roles, eight_bit_fill, "int8, a scale for the row", {"SCB": "not negative"}
        )


def eight_bit_fill(values: Tensor, parts: Parts) -> None:
    for part in row_slices(*values.shape):
        # In this order: the product of code and largest magnitude is rounded before it is divided.
        exact = parts["weight"][part] * parts["SCB"][part].float()[:, None] * INVERSE_127
        values[part] = exact.to(values.dtype)


def _four_bits(tensors: ExternalTensors, name: str, kind: str) -> QuantizedWeight:
    state = _state(tensors, f"{name}{STATE}{kind}")
    info = require(tensors, f"{name}{STATE}{kind}", name)
    roles = {"weight": name, "state": f"{name}{STATE}{kind}", "absmax": f"{name}.absmax", "map": f"{name}.quant_map"}
    ranges: dict[str, Range] = {"absmax": "not negative"}
    if "nested_blocksize" in state:
        roles |= {"nested": f"{name}.nested_absmax", "nested_map": f"{name}.nested_quant_map"}
        ranges = {"nested": "not negative"}
    infos = {role: require(tensors, name, part) for role, part in roles.items()}
    shape = tuple(int(size) for size in state["shape"])
    count, of = math.prod(shape), f"{name} {list(shape)}"
    stored = math.prod(info.shape) * info.dtype.itemsize
    if stored != -(-count // 2):
        raise CheckpointError(f"{name} has {stored} bytes; {list(shape)} in 4 bits are {-(-count // 2)}")
    blocks = math.ceil(count / int(state["blocksize"]))
    require_shape(roles["absmax"], infos["absmax"], (blocks,), of=of)
    require_shape(roles["map"], infos["map"], (16,), of=of)
    if "nested" in roles:
        require_dtype(roles["absmax"], infos["absmax"], torch.uint8)
        require_shape(roles["nested"], infos["nested"], (math.ceil(blocks / int(state["nested_blocksize"])),), of=of)
        require_shape(roles["nested_map"], infos["nested_map"], (256,), of=of)
    weight_info = TensorInfo(shape, DTYPES[state["dtype"]])
    label = f"{kind}, blocks of {state['blocksize']}{', nested scales' if 'nested' in roles else ''}"
    return QuantizedWeight(name, weight_info, roles, FourBitFill(state), label, ranges)


def _state(tensors: ExternalTensors, name: str) -> dict[str, Any]:
    """Raises CheckpointError for a state that is not what the package writes."""
    try:
        state = json.loads(bytes(tensors.read(name).to(torch.uint8).tolist()))
        if state["dtype"] not in DTYPES or int(state["blocksize"]) < 1 or not state["shape"]:
            raise ValueError(f"{state} is none")
        if "nested_blocksize" in state:
            float(state["nested_offset"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{name}: not the state of a quantized weight: {error}") from None
    return dict(state)


@dataclass(frozen=True)
class FourBitFill:
    state: Mapping[str, Any]

    def __call__(self, values: Tensor, parts: Parts) -> None:
        flat, block = values.view(-1), int(self.state["blocksize"])
        largest = self._largest(parts)
        # Larger storage dtypes hold the same bytes.
        data = parts["weight"].contiguous().view(torch.uint8).reshape(-1)
        step = max(1, SLICE // (2 * block)) * 2 * block
        for first in range(0, len(flat), step):
            last = min(first + step, len(flat))
            packed = data[first // 2 : -(-last // 2)]
            codes = torch.stack((packed >> 4, packed & 15), 1).reshape(-1)[: last - first]
            numbers = parts["map"].float()[codes.int()]
            scales = largest[first // block : -(-last // block)].repeat_interleave(block)[: last - first]
            flat[first:last] = numbers.mul_(scales).to(flat.dtype)

    def _largest(self, parts: Parts) -> Tensor:
        """The largest magnitude of each block, in fp32."""
        if "nested" not in parts:
            return parts["absmax"].float()
        numbers = parts["nested_map"].float()[parts["absmax"].int()]
        size = int(self.state["nested_blocksize"])
        scales = parts["nested"].float().repeat_interleave(size)[: len(numbers)]
        return numbers * scales + float(self.state["nested_offset"])
