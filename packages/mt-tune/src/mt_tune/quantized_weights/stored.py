"""Published quantized weights whose codes and scales are those of a format here: they are kept bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.hugging_face.reader import StoredWeight
from mt_ckpt.quantized import awq, bitsandbytes, compressed_tensors, fp8_blocks, gptq, mlx, modelopt
from mt_ckpt.quantized.codes import decode_e8m0, unpack_bits
from mt_tune.quantized_weights.formats import (
    CODES,
    NF4,
    SCALES,
    ZEROS,
    Float4,
    Float8,
    Int4,
    Int8,
    NormalFloat,
    dynamic_map,
    pack_nibbles,
)
from mt_tune.quantized_weights.weight import QuantizedWeight

Read = Callable[[int | None], dict[str, Tensor]]


@dataclass(frozen=True)
class KeptWeight:
    """parts: number of a matrix in a stack, or None -> its parts [rows, size]."""

    parts: Read


def kept_weight(stored: StoredWeight, weight: QuantizedWeight) -> KeptWeight | str:
    """The parts of a stored weight in the format of `weight`, or why it has another."""
    fill, form = stored.weight.fill, weight.form
    if (fp4 := _fp4_of(fill, stored)) is not None:
        return _fp4(stored, form, *fp4)
    if isinstance(fill, bitsandbytes.FourBitFill):
        return _nf4(stored, form)
    if fill is bitsandbytes.eight_bit_fill:
        return _int8_of_bitsandbytes(stored, form)
    if isinstance(fill, fp8_blocks.BlockFill):
        return _fp8_blocks(stored, form, fill)
    if isinstance(fill, compressed_tensors.PlainFill):
        return _bytes_of_compressed_tensors(stored, form, fill)
    if isinstance(fill, compressed_tensors.IntegerFill):
        return _int4_of_compressed_tensors(stored, form, fill)
    if isinstance(fill, awq.AwqFill):
        return _awq(stored, form, fill)
    if isinstance(fill, gptq.GptqFill):
        return _gptq(stored, form, fill)
    return f"as {stored.weight.format}"


# -- bitsandbytes --------------------------------------------------------------------------------------


def _nf4(stored: StoredWeight, form: Any) -> KeptWeight | str:
    fill = stored.weight.fill
    assert isinstance(fill, bitsandbytes.FourBitFill)
    nested = "nested" in stored.weight.parts
    if not isinstance(form, NormalFloat) or not stored.weight.format.startswith("nf4"):
        return f"as {stored.weight.format}"
    if int(fill.state["blocksize"]) != form.group:
        return f"in blocks of {fill.state['blocksize']} (adapter.base_block_size)"
    if nested != form.double:
        return f"{'with' if nested else 'without'} nested scales (adapter.base_double_quant={str(nested).lower()})"
    rows, columns = stored.weight.info.shape
    return KeptWeight(partial(_nf4_parts, stored, form, rows, columns))


def _nf4_parts(
    stored: StoredWeight, form: NormalFloat, rows: int, columns: int, index: int | None
) -> dict[str, Tensor]:
    parts, fill = stored.read(), stored.weight.fill
    assert isinstance(fill, bitsandbytes.FourBitFill)
    if not torch.equal(parts["map"].float(), torch.tensor(NF4)):
        stored.refuse("its table of numbers is not that of nf4")
    codes = parts["weight"].contiguous().view(torch.uint8).view(rows, columns // 2)
    scales = parts["absmax"].view(rows, -1)
    if not form.double:
        return {CODES: codes, SCALES: scales.float()}
    if not torch.equal(parts["nested_map"].float(), dynamic_map()) or int(fill.state["nested_blocksize"]) != 256:
        stored.refuse("its nested scales are not those of 256 blocks in the dynamic type")
    offset = torch.tensor(float(fill.state["nested_offset"]), dtype=torch.float32)
    return {CODES: codes, SCALES: scales, **form.nested_parts(parts["nested"], offset, rows, columns)}


def _int8_of_bitsandbytes(stored: StoredWeight, form: Any) -> KeptWeight | str:
    if not isinstance(form, Int8):
        return f"as {stored.weight.format}"

    def parts(index: int | None) -> dict[str, Tensor]:
        tensors = stored.read()
        scale = tensors["SCB"].float()[:, None] * bitsandbytes.INVERSE_127
        return {CODES: tensors["weight"].view(torch.uint8), SCALES: _spread(scale, form, tensors["weight"].shape[1])}

    return KeptWeight(parts)


# -- e4m3 and int8 -----------------------------------------------------------------------------------------


def _fp8_blocks(stored: StoredWeight, form: Any, fill: fp8_blocks.BlockFill) -> KeptWeight | str:
    if not isinstance(form, Float8) or not stored.weight.format.startswith("e4m3"):
        return f"as {stored.weight.format}"
    if (problem := _unfit(fill.block[1] if fill.block else None, form, stored.weight.info.shape[-1])) is not None:
        return problem

    def parts(index: int | None) -> dict[str, Tensor]:
        tensors = stored.read()
        values, scale = _of_stack(tensors["weight"], index), tensors["scale"]
        scale = decode_e8m0(scale) if scale.dtype in fp8_blocks.EXPONENTS else scale.float()
        rows, columns = values.shape
        if fill.block is None:
            lone = scale.reshape(-1)
            grid, height = lone[index if index is not None and len(lone) > 1 else 0].reshape(1, 1), rows
        else:
            grid, height = _of_stack(scale, index), fill.block[0]
        by_row = grid[torch.arange(rows) // height]
        width = fill.block[1] if fill.block else columns
        return {CODES: values.view(torch.uint8), SCALES: _widened(by_row, width, form, columns)}

    return KeptWeight(parts)


def _bytes_of_compressed_tensors(
    stored: StoredWeight, form: Any, fill: compressed_tensors.PlainFill
) -> KeptWeight | str:
    group, roles = fill.group, stored.weight.parts
    kind = Float8 if group.floating else Int8
    if not isinstance(form, kind) or compressed_tensors.ZERO in roles or compressed_tensors.ORDER in roles:
        return f"as {stored.weight.format}"
    width = {"block": group.block[1], "group": group.group, "tensor_group": group.group}.get(group.strategy)
    if (problem := _unfit(width, form, stored.weight.info.shape[-1])) is not None:
        return problem

    def parts(index: int | None) -> dict[str, Tensor]:
        tensors = stored.read()
        values, scale = _of_stack(tensors["weight"], index), tensors[compressed_tensors.SCALE]
        scale = decode_e8m0(scale).to(torch.bfloat16) if group.exponents else scale
        scales = _of_stack(scale, index) if scale.ndim == tensors["weight"].ndim else scale
        rows, columns = values.shape
        scales = scales.float().reshape(rows, -1) if group.strategy == "channel" else scales.float()
        by_row = scales.reshape(1, 1).expand(rows, 1) if group.strategy == "tensor" else scales
        by_row = by_row[torch.arange(rows) // group.block[0]] if group.strategy == "block" else by_row
        return {CODES: values.view(torch.uint8), SCALES: _widened(by_row, width or columns, form, columns)}

    return KeptWeight(parts)


def _int4_of_compressed_tensors(
    stored: StoredWeight, form: Any, fill: compressed_tensors.IntegerFill
) -> KeptWeight | str:
    group = fill.group
    if not isinstance(form, Int4) or group.bits != 4 or compressed_tensors.ORDER in stored.weight.parts:
        return f"as {stored.weight.format}"
    width = group.group if group.strategy in ("group", "tensor_group") else None
    if (problem := _unfit(width, form, stored.weight.info.shape[-1])) is not None:
        return problem

    def parts(index: int | None) -> dict[str, Tensor]:
        tensors = stored.read()
        rows, columns = stored.weight.info.shape
        scale = tensors[compressed_tensors.SCALE].float()
        by_row = scale.reshape(1, 1).expand(rows, 1) if group.strategy == "tensor" else scale.reshape(rows, -1)
        zeros = torch.full_like(by_row, 8)
        if compressed_tensors.ZERO in tensors:
            zeros = fill.zeros(tensors[compressed_tensors.ZERO], rows, by_row.shape[-1]).float() + 8
        codes = unpack_bits(tensors[compressed_tensors.PACKED], 4, columns)
        return _int4_parts(form, codes, by_row, zeros, width or columns)

    return KeptWeight(parts)


# -- E2M1 ---------------------------------------------------------------------------------------------------

Factors = Callable[[Mapping[str, Tensor]], Tensor]


def _fp4_of(fill: Any, stored: StoredWeight) -> tuple[str, int, Factors] | None:
    """The part with the codes, columns of a scale, and the scales [..., rows, groups] in fp32. None: no such format."""
    if isinstance(fill, compressed_tensors.FloatFill) and fill.group.bits == 4:
        return compressed_tensors.PACKED, fill.group.group, _scales_of_compressed_tensors
    if fill is modelopt.nvfp4_fill:
        return "weight", modelopt.NVFP4_GROUP, _scales_of_modelopt
    if isinstance(fill, fp8_blocks.BlockFill) and stored.weight.format.startswith("e2m1"):
        return "weight", fp8_blocks.FP4_BLOCK[1], lambda parts: _exponents(parts["scale"])
    if isinstance(fill, mlx.MlxFill) and fill.settings.mode in ("mxfp4", "nvfp4"):
        return "weight", fill.settings.group, lambda parts: fill.factors(parts["scales"])
    return None


def _scales_of_compressed_tensors(parts: Mapping[str, Tensor]) -> Tensor:
    scale = parts[compressed_tensors.SCALE]
    if compressed_tensors.GLOBAL not in parts:
        return decode_e8m0(scale)
    return scale.float() / parts[compressed_tensors.GLOBAL].reshape(1)


def _scales_of_modelopt(parts: Mapping[str, Tensor]) -> Tensor:
    second, scale = parts[modelopt.SECOND].float(), parts[modelopt.SCALE].float()
    return scale * second.reshape(*second.shape, *(1 for _ in scale.shape[second.ndim :]))


def _exponents(scale: Tensor) -> Tensor:
    return decode_e8m0(scale) if scale.dtype in fp8_blocks.EXPONENTS else scale.float()


def _fp4(stored: StoredWeight, form: Any, codes: str, width: int, factors: Factors) -> KeptWeight | str:
    columns = stored.weight.info.shape[-1]
    if not isinstance(form, Float4):
        return f"as {stored.weight.format}"
    if (problem := _unfit(width, form, columns)) is not None:
        return problem

    def parts(index: int | None) -> dict[str, Tensor]:
        tensors = stored.read()
        packed, scales = _of_stack(tensors[codes], index), _of_stack(factors(tensors), index)
        repacked = pack_nibbles(unpack_bits(packed.contiguous().view(torch.uint8), 4, columns))
        return {CODES: repacked, SCALES: _widened(scales, width, form, columns)}

    return KeptWeight(parts)


# -- AWQ and GPTQ, stored [in, out] --------------------------------------------------------------------------


def _awq(stored: StoredWeight, form: Any, fill: awq.AwqFill) -> KeptWeight | str:
    if not isinstance(form, Int4):
        return f"as {stored.weight.format}"
    if (problem := _unfit(fill.group, form, stored.weight.info.shape[-1])) is not None:
        return problem

    def parts(index: int | None) -> dict[str, Tensor]:
        tensors = stored.read()
        scales = tensors["scales"].T
        zeros = awq.unordered(tensors["qzeros"]).T if "qzeros" in tensors else torch.full(scales.shape, 8)
        return _int4_parts(form, awq.unordered(tensors["qweight"]).T, scales, zeros, fill.group)

    return KeptWeight(parts)


def _gptq(stored: StoredWeight, form: Any, fill: gptq.GptqFill) -> KeptWeight | str:
    rows, columns = stored.weight.info.shape
    if not isinstance(form, Int4) or fill.bits != 4:
        return f"as {stored.weight.format}"
    if (problem := _unfit(fill.group, form, columns)) is not None:
        return problem
    if "g_idx" in stored.weight.parts and not torch.equal(
        stored.read()["g_idx"].long(), torch.arange(columns) // fill.group
    ):
        return "with groups of inputs that are not neighbours (desc_act)"

    def parts(index: int | None) -> dict[str, Tensor]:
        tensors = stored.read()
        codes = unpack_bits(tensors["qweight"].T, 4, columns)
        return _int4_parts(form, codes, tensors["scales"].T, fill.zeros(tensors["qzeros"], rows).T, fill.group)

    return KeptWeight(parts)


def _int4_parts(form: Int4, codes: Tensor, scales: Tensor, zeros: Tensor, width: int) -> dict[str, Tensor]:
    """codes [rows, columns], scales and zeros [rows, groups of `width` columns]"""
    columns = codes.shape[-1]
    return {
        CODES: pack_nibbles(codes),
        SCALES: _widened(scales.float(), width, form, columns),
        ZEROS: _widened(zeros, width, form, columns).to(torch.uint8),
    }


# -- groups ------------------------------------------------------------------------------------------------


def _unfit(width: int | None, form: Any, columns: int) -> str | None:
    """Why scales of `width` columns (None: a row) cannot be written as those of the format."""
    size = form.size(columns)
    if width is not None and (width % size or size > width):
        return f"in groups of {width} columns (adapter.base_block_size)"
    return None


def _widened(by_row: Tensor, width: int, form: Any, columns: int) -> Tensor:
    """Scales [rows, groups of `width` columns] for the groups of the format, which are as wide or narrower."""
    size = form.size(columns)
    first = torch.arange(-(-columns // size)) * size // width
    return by_row[:, first]


def _spread(scale: Tensor, form: Any, columns: int) -> Tensor:
    return _widened(scale, columns, form, columns)


def _of_stack(values: Tensor, index: int | None) -> Tensor:
    return values if index is None else values[index]
