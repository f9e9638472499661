"""Formats in which frozen matrices [out, in] are held: codes of 4 or 8 bits and a scale for each group of a row.

All tensors are bytes, so that what casts parameters (FSDP2) changes no bit.

nf4 is NormalFloat of 4 bits (Dettmers et al., 2023), as bitsandbytes 0.50 makes and reads it. A block is 64 consecutive
numbers of a row: codes of a table of 16 numbers, times the largest magnitude of the block. With double quantization the
magnitudes, less their mean, are codes of 8 bits of another table, times the largest of 256 of them in the order of the
whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from mt_ckpt.quantized.codes import E2M1_MAX, MAGNITUDES, encode_e2m1, unpack_bits

# -- parts of a matrix -------------------------------------------------------------------------------

CODES, SCALES = "codes", "scales"
FLOAT_BYTES = 4
Parts = Mapping[str, Tensor]
"""Name -> [rows, size], fp32 for what is stored as bytes of numbers in fp32, else uint8."""


@dataclass(frozen=True)
class Part:
    """size: numbers of a row. follows_inputs: whether they belong to columns, and are divided with them."""

    name: str
    size: int
    is_float: bool = False
    follows_inputs: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Behind the dimension of rows."""
        return (self.size, FLOAT_BYTES) if self.is_float else (self.size,)


def as_bytes(numbers: Tensor) -> Tensor:
    """fp32 [..., n] -> uint8 [..., n, 4]"""
    return numbers.float().contiguous().view(torch.uint8).unflatten(-1, (numbers.shape[-1], FLOAT_BYTES))


def from_bytes(stored: Tensor) -> Tensor:
    """uint8 [..., n, 4] -> fp32 [..., n]"""
    return stored.contiguous().view(torch.float32).squeeze(-1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., 2 n] of 4 bits -> [..., n], the first in the high half."""
    return codes[..., 0::2] << 4 | codes[..., 1::2]


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> [..., 2 n]"""
    return torch.stack((packed >> 4, packed & 15), -1).flatten(-2)


def by_group(numbers: Tensor, size: int) -> Tensor:
    """[rows, columns] -> [rows, groups, size], the last group filled up with zeros."""
    missing = -numbers.shape[-1] % size
    return torch.nn.functional.pad(numbers, (0, missing)).unflatten(-1, (-1, size))


def multiplied(numbers: Tensor, scales: Tensor, size: int) -> Tensor:
    """numbers [rows, columns] times scales [rows, groups] of `size` columns each, the last maybe of fewer."""
    columns = numbers.shape[-1]
    if columns == size * scales.shape[-1]:
        return (numbers.unflatten(-1, (-1, size)) * scales[..., None]).flatten(-2)
    return numbers * scales.repeat_interleave(size, -1)[:, :columns]


class Format(Protocol):
    @property
    def name(self) -> str: ...

    def objection(self, columns: int) -> str | None:
        """Why rows of so many columns cannot be quantized; None: they can."""
        ...

    def parts(self, columns: int) -> list[Part]:
        """columns: of the whole matrix."""
        ...

    def quantize(self, matrix: Tensor) -> dict[str, Tensor]:
        """fp32 [rows, columns] -> a tensor [rows, size] for each part."""
        ...

    def dequantize(self, parts: Parts, columns: int, first_column: int, whole_columns: int) -> Tensor:
        """[rows, columns] in fp32. first_column: of what the rank holds, in the matrix of whole_columns."""
        ...

    def random(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Numbers of a part of random weights, as `ParameterLayout.init` fills them."""
        ...


# -- nf4 -----------------------------------------------------------------------------------------------

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = (*MAGNITUDES, *(-number for number in MAGNITUDES))
"""E2M1, the fourth bit of a code the sign."""
NESTED_BLOCK = 256
SMALLEST = 1e-38
NESTED, OFFSET = "nested_scales", "scale_offset"
TYPICAL_LARGEST = 0.05
"""Largest magnitude of a block of random weights."""


def dynamic_map() -> Tensor:
    """[256] in fp32: the signed dynamic type of 8 bits (Dettmers, 2016), sorted."""
    numbers = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        middle = (bounds[:-1] + bounds[1:]) / 2.0
        numbers += (10 ** (exponent - 6) * middle).tolist() + (-(10 ** (exponent - 6)) * middle).tolist()
    return torch.tensor(sorted(numbers), dtype=torch.float32)


@cache
def _table(name: str, device: torch.device) -> Tensor:
    if name == "dynamic":
        return dynamic_map().to(device)
    numbers = torch.tensor(NF4 if name.startswith("nf4") else FP4)
    if name == "nf4":
        return numbers.to(device)
    byte = torch.arange(256)  # both numbers of a byte
    return torch.stack((numbers[byte >> 4], numbers[byte & 15]), -1).to(device)


def table(name: str, device: torch.device) -> Tensor:
    """`nf4` [16], `nf4 pairs` and `fp4 pairs` [256, 2], or `dynamic` [256]"""
    # A tensor of a plan is not kept: it belongs to the mode that counts.
    return _table.__wrapped__(name, device) if device.type == "meta" else _table(name, device)


def nearest(numbers: Tensor, sorted_table: Tensor) -> Tensor:
    """Index of the nearest number of the table, uint8."""
    middle = (sorted_table[:-1] + sorted_table[1:]) / 2
    return torch.bucketize(numbers, middle, out_int32=True).to(torch.uint8)


def normalized(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[..., n] -> in -1 ... 1, and the largest magnitudes [...]"""
    largest = blocks.abs().amax(-1)
    return (blocks * (1.0 / largest.clamp(min=SMALLEST))[..., None]).clamp(-1, 1), largest


@dataclass(frozen=True)
class NormalFloat:
    """nf4 with blocks of `group` columns."""

    group: int = 64
    double: bool = True
    name: str = "nf4"

    def objection(self, columns: int) -> str | None:
        """Why rows of so many columns cannot be quantized; None: they can."""
        if columns % self.group:
            return f"its rows of {columns} numbers are no multiple of a block of {self.group}"
        return None

    def nested_group(self, columns: int) -> int:
        """Blocks of a row that surely share a scale of their magnitudes."""
        return math.gcd(columns // self.group, NESTED_BLOCK)

    def parts(self, columns: int) -> list[Part]:
        """columns: of the whole matrix."""
        blocks = columns // self.group
        parts = [Part(CODES, columns // 2), Part(SCALES, blocks, is_float=not self.double)]
        if self.double:
            # Whole on each rank: the place of a column decides which of them counts.
            parts.append(Part(NESTED, blocks // self.nested_group(columns), True, follows_inputs=False))
            parts.append(Part(OFFSET, 1, True, follows_inputs=False))
        return parts

    def quantize(self, matrix: Tensor) -> dict[str, Tensor]:
        """fp32 [rows, columns], the whole matrix as a package would quantize it"""
        inside, largest = normalized(matrix.unflatten(-1, (-1, self.group)))
        codes = pack_nibbles(nearest(inside.flatten(-2), table("nf4", matrix.device)))
        return {CODES: codes, **(self._doubled(largest, matrix.shape[-1]) if self.double else {SCALES: largest})}

    def _doubled(self, largest: Tensor, columns: int) -> dict[str, Tensor]:
        offset = largest.flatten().mean()
        centered = (largest - offset).flatten()
        filled = torch.nn.functional.pad(centered, (0, -len(centered) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
        inside, nested = normalized(filled)
        codes = nearest(inside, table("dynamic", largest.device)).flatten()[: len(centered)].view_as(largest)
        return {SCALES: codes, **self.nested_parts(nested, offset, len(largest), columns)}

    def nested_parts(self, nested: Tensor, offset: Tensor, rows: int, columns: int) -> dict[str, Tensor]:
        """nested: of each 256 blocks in the order of the matrix -> of each row."""
        step = self.nested_group(columns)
        first = torch.arange(0, rows * (columns // self.group), step, device=nested.device) // NESTED_BLOCK
        return {NESTED: nested.float()[first].view(rows, -1), OFFSET: offset.float().expand(rows, 1)}

    def dequantize(self, parts: Parts, columns: int, first_column: int, whole_columns: int) -> Tensor:
        """[rows, columns] in fp32. first_column: of what the rank holds, in the matrix of whole_columns."""
        numbers = table("nf4 pairs", parts[CODES].device)[parts[CODES].int()].flatten(-2)
        return multiplied(numbers, self._largest(parts, first_column, whole_columns), self.group)

    def _largest(self, parts: Parts, first_column: int, whole_columns: int) -> Tensor:
        """[rows, blocks] of this rank"""
        scales = parts[SCALES]
        if not self.double:
            return scales
        places = torch.arange(scales.shape[-1], device=scales.device) + first_column // self.group
        nested = parts[NESTED].index_select(-1, places // self.nested_group(whole_columns))
        return table("dynamic", scales.device)[scales.int()] * nested + parts[OFFSET]

    def random(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Numbers of a part of random weights, as `ParameterLayout.init` fills them."""
        if name == CODES or (name == SCALES and self.double):
            tensor.random_(256, generator=generator)
        else:
            tensor.fill_(TYPICAL_LARGEST / (2 if self.double and name == NESTED else 1))


# -- plain scales --------------------------------------------------------------------------------------

ZEROS = "zeros"
E4M3_MAX, INT8_MAX, INT4_LEVELS = 448.0, 127, 15
TYPICAL = 0.05
"""The largest magnitude of random weights."""


@dataclass(frozen=True)
class Grouped:
    """What formats with plain scales share. group: columns of a scale; None: all of a row."""

    group: int | None

    def objection(self, columns: int) -> str | None:
        return None

    def size(self, columns: int) -> int:
        return columns if self.group is None else self.group

    def scales(self, columns: int) -> Part:
        return Part(SCALES, -(-columns // self.size(columns)), True, follows_inputs=self.group is not None)

    def parts(self, columns: int) -> list[Part]:
        return [Part(CODES, columns), self.scales(columns)]

    def groups(self, matrix: Tensor) -> Tensor:
        return by_group(matrix, self.size(matrix.shape[-1]))


@dataclass(frozen=True)
class Int8(Grouped):
    """int8 from -127 to 127 times a scale in fp32."""

    name: str = "int8"

    def quantize(self, matrix: Tensor) -> dict[str, Tensor]:
        groups = self.groups(matrix)
        scales = positive(groups.abs().amax(-1) / INT8_MAX)
        codes = (groups / scales[..., None]).round().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8).flatten(-2)
        return {CODES: codes[:, : matrix.shape[-1]].contiguous().view(torch.uint8), SCALES: scales}

    def dequantize(self, parts: Parts, columns: int, first_column: int, whole_columns: int) -> Tensor:
        return multiplied(parts[CODES].view(torch.int8).float(), parts[SCALES], self.size(columns))

    def random(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if name == CODES:
            tensor.random_(256, generator=generator)
        else:
            tensor.fill_(TYPICAL / INT8_MAX)


@dataclass(frozen=True)
class Float8(Grouped):
    """e4m3 times a scale in fp32."""

    name: str = "fp8"

    def quantize(self, matrix: Tensor) -> dict[str, Tensor]:
        groups = self.groups(matrix)
        scales = positive(groups.abs().amax(-1) / E4M3_MAX)
        codes = (groups / scales[..., None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2)
        return {CODES: codes.view(torch.uint8)[:, : matrix.shape[-1]], SCALES: scales}

    def dequantize(self, parts: Parts, columns: int, first_column: int, whole_columns: int) -> Tensor:
        return multiplied(parts[CODES].view(torch.float8_e4m3fn).float(), parts[SCALES], self.size(columns))

    def random(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if name == CODES:  # magnitudes of 0.25 to 1.875; the highest bit is the sign
            tensor.random_(256, generator=generator)
            tensor.copy_(128 * (tensor >= 128) + 40 + tensor % 24)
        else:
            tensor.fill_(TYPICAL / 2)


@dataclass(frozen=True)
class Int4(Grouped):
    """(code - zero) times a scale in fp32, codes and zeros from 0 to 15."""

    name: str = "int4"

    def objection(self, columns: int) -> str | None:
        return f"its rows have {columns} numbers, which is odd" if columns % 2 else None

    def parts(self, columns: int) -> list[Part]:
        scales = self.scales(columns)
        return [Part(CODES, columns // 2), scales, Part(ZEROS, scales.size, False, scales.follows_inputs)]

    def quantize(self, matrix: Tensor) -> dict[str, Tensor]:
        groups = self.groups(matrix)
        low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
        scales = positive((high - low) / INT4_LEVELS)
        zeros = (-low / scales).round()
        codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp_(0, INT4_LEVELS).to(torch.uint8)
        packed = pack_nibbles(codes.flatten(-2)[:, : matrix.shape[-1]])
        return {CODES: packed, SCALES: scales, ZEROS: zeros.to(torch.uint8)}

    def dequantize(self, parts: Parts, columns: int, first_column: int, whole_columns: int) -> Tensor:
        zeros = parts[ZEROS].repeat_interleave(self.size(columns), -1)[:, :columns]
        codes = unpack_nibbles(parts[CODES]).to(torch.int16) - zeros.to(torch.int16)
        return multiplied(codes.float(), parts[SCALES], self.size(columns))

    def random(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if name == CODES:
            tensor.random_(256, generator=generator)
        else:
            tensor.fill_(8 if name == ZEROS else TYPICAL / 8)


@dataclass(frozen=True)
class Float4(Grouped):
    """E2M1 (OCP Microscaling Formats, 2023) times a scale in fp32."""

    name: str = "fp4"

    def objection(self, columns: int) -> str | None:
        return f"its rows have {columns} numbers, which is odd" if columns % 2 else None

    def parts(self, columns: int) -> list[Part]:
        return [Part(CODES, columns // 2), self.scales(columns)]

    def quantize(self, matrix: Tensor) -> dict[str, Tensor]:
        groups, columns = self.groups(matrix), matrix.shape[-1]
        scales = positive(groups.abs().amax(-1) / E2M1_MAX)
        numbers = (groups / scales[..., None]).flatten(-2)[:, :columns]
        return {CODES: pack_nibbles(unpack_bits(encode_e2m1(numbers), 4, columns)), SCALES: scales}

    def dequantize(self, parts: Parts, columns: int, first_column: int, whole_columns: int) -> Tensor:
        numbers = table("fp4 pairs", parts[CODES].device)[parts[CODES].int()].flatten(-2)
        return multiplied(numbers, parts[SCALES], self.size(columns))

    def random(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if name == CODES:
            tensor.random_(256, generator=generator)
        else:
            tensor.fill_(TYPICAL / E2M1_MAX)


def positive(scales: Tensor) -> Tensor:
    """1 for a group of zeros."""
    return torch.where(scales > 0, scales, torch.ones_like(scales))


FP8_GROUP, INT4_GROUP, NF4_GROUP, FP4_GROUP = 128, 128, 64, 32


def format_named(name: str, group: int | None, double: bool) -> Format:
    """group: None takes the usual one: 64 for nf4, 128 for fp8 and int4, 32 for fp4, a row for int8. double: of nf4."""
    if name == "nf4":
        return NormalFloat(group or NF4_GROUP, double)
    if name == "int8":
        return Int8(group)
    if name == "fp4":
        return Float4(group or FP4_GROUP)
    return Float8(group or FP8_GROUP) if name == "fp8" else Int4(group or INT4_GROUP)
