"""The numbers that a scheme can store: how groups of weights are scaled, rounded to codes, and what codes stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mt_ckpt.quantized.codes import E2M1_MAX, E4M3_MAX, decode_e8m0, round_e2m1


@dataclass(frozen=True)
class Scales:
    """What turns codes into weights. scale: [rows, groups] as it is stored. zeros: [rows, groups] int16, the codes that
    stand for 0, of asymmetric integers. whole: divides all scales of a matrix (NVFP4)."""

    scale: Tensor
    zeros: Tensor | None = None
    whole: float = 1.0

    def of_groups(self, groups: Tensor) -> Scales:
        """Those of the given groups, int64 [n]."""
        zeros = None if self.zeros is None else self.zeros[:, groups]
        if self.scale.dtype == torch.float8_e4m3fn:  # which cannot be indexed
            return Scales(self.scale.view(torch.uint8)[:, groups].view(torch.float8_e4m3fn), zeros, self.whole)
        return Scales(self.scale[:, groups], zeros, self.whole)


class Grid(Protocol):
    """The numbers of one scheme. Groups are [rows, groups, size] in fp32."""

    @property
    def size(self) -> int | None:
        """Columns that share a scale; None: all of a row."""
        ...

    def scales(self, low: Tensor, high: Tensor, dtype: torch.dtype, largest: float) -> Scales:
        """Scales with which codes reach from low to high, [rows, groups]. dtype: of scales in the file, where the
        scheme has none of its own. largest: magnitude of the whole matrix."""
        ...

    def codes(self, groups: Tensor, scales: Scales) -> Tensor:
        """The nearest codes, one byte each: int8, uint8, or the element as float8_e4m3fn."""
        ...

    def values(self, codes: Tensor, scales: Scales) -> Tensor:
        """What codes stand for, in fp32."""
        ...


def in_groups(rows: Tensor, size: int | None) -> Tensor:
    """[rows, in] -> [rows, groups, size]"""
    return rows.unflatten(1, (-1, size or rows.shape[1]))


def full_range(grid: Grid, groups: Tensor, dtype: torch.dtype, largest: float) -> Scales:
    """Scales that meet the smallest and the largest number of each group."""
    return grid.scales(groups.amin(-1), groups.amax(-1), dtype, largest)


def rounded(grid: Grid, groups: Tensor, scales: Scales) -> Tensor:
    """The nearest numbers of the grid, in fp32."""
    return grid.values(grid.codes(groups, scales), scales)


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale in the dtype of the file, where one that is 0 is the smallest that is not."""
    stored = scale.to(dtype)
    if dtype == torch.float8_e4m3fn:
        return torch.where(stored.float() > 0, stored.float(), torch.tensor(2.0**-9)).to(dtype)
    return torch.where(stored > 0, stored, torch.tensor(torch.finfo(dtype).tiny, dtype=dtype, device=stored.device))


def magnitude(low: Tensor, high: Tensor) -> Tensor:
    return torch.maximum(-low, high)


@dataclass(frozen=True)
class IntegerGrid:
    """Integers of `bits`: from -2^(bits - 1) on, or from 0 on with a zero point, which makes 0 one of the values."""

    bits: int
    size: int | None
    symmetric: bool = True

    def scales(self, low: Tensor, high: Tensor, dtype: torch.dtype, largest: float) -> Scales:
        if self.symmetric:
            return Scales(stored_scale(magnitude(low, high) / (self._half - 0.5), dtype))
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = stored_scale((high - low) / self._most, dtype)
        return Scales(scale, (-low / scale.float()).round_().clamp_(0, self._most).to(torch.int16))

    def codes(self, groups: Tensor, scales: Scales) -> Tensor:
        steps = groups / scales.scale.float()[..., None]
        if scales.zeros is None:
            return steps.round_().clamp_(-self._half, self._half - 1).to(torch.int8)
        return steps.add_(scales.zeros[..., None]).round_().clamp_(0, self._most).to(torch.uint8)

    def values(self, codes: Tensor, scales: Scales) -> Tensor:
        steps = codes.float() if scales.zeros is None else codes.float() - scales.zeros[..., None]
        return steps * scales.scale.float()[..., None]

    @property
    def _half(self) -> int:
        return 1 << self.bits - 1

    @property
    def _most(self) -> int:
        return (1 << self.bits) - 1


@dataclass(frozen=True)
class Fp8Grid:
    """e4m3 with a scale for each group."""

    size: int | None

    def scales(self, low: Tensor, high: Tensor, dtype: torch.dtype, largest: float) -> Scales:
        return Scales(stored_scale(magnitude(low, high) / E4M3_MAX, dtype))

    def codes(self, groups: Tensor, scales: Scales) -> Tensor:
        return (groups / scales.scale.float()[..., None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)

    def values(self, codes: Tensor, scales: Scales) -> Tensor:
        return codes.float() * scales.scale.float()[..., None]


@dataclass(frozen=True)
class Nvfp4Grid:
    """E2M1 with e4m3 scales for groups of 16 and one fp32 scale for the matrix, which divides."""

    size: int = 16

    def scales(self, low: Tensor, high: Tensor, dtype: torch.dtype, largest: float) -> Scales:
        whole = global_scale(largest)
        scale = (magnitude(low, high) / E2M1_MAX * whole).clamp_(max=E4M3_MAX)
        return Scales(stored_scale(scale, torch.float8_e4m3fn), whole=whole)

    def codes(self, groups: Tensor, scales: Scales) -> Tensor:
        return round_e2m1(groups / self._factors(scales)).to(torch.float8_e4m3fn)

    def values(self, codes: Tensor, scales: Scales) -> Tensor:
        return codes.float() * self._factors(scales)

    @staticmethod
    def _factors(scales: Scales) -> Tensor:
        return (scales.scale.float() / scales.whole)[..., None]


def global_scale(largest: float) -> float:
    """NVFP4's scale of a matrix with this magnitude."""
    # A number of fp32, so that rows are divided by what is stored.
    return torch.tensor(E2M1_MAX * E4M3_MAX / largest if largest > 0 else 1.0, dtype=torch.float32).item()


@dataclass(frozen=True)
class MxGrid:
    """E2M1 (4 bits) or e4m3 (8 bits) with an exponent for each group of 32 (E8M0, uint8)."""

    bits: int
    size: int = 32

    def scales(self, low: Tensor, high: Tensor, dtype: torch.dtype, largest: float) -> Scales:
        return Scales(mx_exponents(magnitude(low, high), 2 if self.bits == 4 else 8))

    def codes(self, groups: Tensor, scales: Scales) -> Tensor:
        numbers = torch.ldexp(groups, 127 - scales.scale.int()[..., None])
        numbers = round_e2m1(numbers) if self.bits == 4 else numbers.clamp_(-E4M3_MAX, E4M3_MAX)
        return numbers.to(torch.float8_e4m3fn)

    def values(self, codes: Tensor, scales: Scales) -> Tensor:
        return codes.float() * decode_e8m0(scales.scale)[..., None]


def mx_exponents(largest: Tensor, largest_exponent: int) -> Tensor:
    """uint8: E8M0 of groups with the given magnitudes. largest_exponent: of the element type's largest number.

    A group whose largest magnitude is 1.75 or more times a power of two counts as the next power, as in
    compressed-tensors.
    """
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1)
    power = exponent - 1 + (mantissa >= 0.875).int() - largest_exponent
    return (power + 127).clamp_(0, 254).to(torch.uint8)
