"""Round-to-nearest quantization of matrices [out, in], a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized.weights import SLICE

ROW_MULTIPLE = 128
"""Rows that are quantized at once are a multiple of this, so that no block and no packed word is cut."""


class Quantizer(Protocol):
    """One kind of quantized files."""

    @property
    def name(self) -> str:
        """The name of the scheme."""
        ...

    @property
    def rows_dim(self) -> int:
        """Along which dimension of its parts the rows of a weight are."""
        ...

    @property
    def shares_largest(self) -> bool:
        """Whether weights that readers fuse (q, k and v; gate and up) need one global scale."""
        ...

    def objection(self, shape: tuple[int, ...]) -> str | None:
        """Why a matrix cannot be quantized; None: it can."""
        ...

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo]:
        """Name within the module, such as weight_scale -> shape and dtype."""
        ...

    def encode_rows(self, rows: Tensor, dtype: torch.dtype, largest: float) -> Mapping[str, Tensor]:
        """Parts of some rows [rows, in] in fp32. dtype: of the weight. largest: magnitude of the whole weight."""
        ...

    def whole(self, shape: tuple[int, ...], largest: float) -> Mapping[str, Tensor]:
        """Parts that are not made of rows."""
        ...

    def settings(self, left: Sequence[str]) -> Mapping[str, Any]:
        """Keys of config.json. left: modules with a matrix that stay as they are."""
        ...


def encode(quantizer: Quantizer, weight: Tensor, largest: float | None = None) -> dict[str, Tensor]:
    """All parts of a weight [out, in]. largest: magnitude that a global scale is made for; None: the weight's own."""
    most = largest_of(weight) if largest is None else largest
    infos = quantizer.parts(TensorInfo(tuple(weight.shape), weight.dtype))
    made = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in infos.items()}
    made |= quantizer.whole(tuple(weight.shape), most)
    for rows in _slices(*weight.shape):
        for name, part in quantizer.encode_rows(weight[rows].float(), weight.dtype, most).items():
            dim = quantizer.rows_dim
            # Exact but for parts whose last element stands for fewer rows, which rounding down leaves in their place.
            start = rows.start * made[name].shape[dim] // len(weight)
            made[name].narrow(dim, start, part.shape[dim]).copy_(part)
    return made


def largest_of(weight: Tensor) -> float:
    return max(weight[rows].abs().max().item() for rows in _slices(*weight.shape))


def _slices(rows: int, columns: int) -> list[slice]:
    step = max(1, SLICE // (columns * ROW_MULTIPLE)) * ROW_MULTIPLE
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale in the dtype of the file, where one that is 0 is the smallest that is not."""
    stored = scale.to(dtype)
    if dtype == torch.float8_e4m3fn:
        return torch.where(stored.float() > 0, stored.float(), torch.tensor(2.0**-9)).to(dtype)
    return torch.where(stored > 0, stored, torch.tensor(torch.finfo(dtype).tiny, dtype=dtype))


def grouped(rows: Tensor, size: int) -> Tensor:
    """[rows, in] -> [rows, groups, size]"""
    return rows.unflatten(1, (-1, size))


def symmetric_codes(groups: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """groups [..., size] -> codes from -2^(bits - 1) on, and scales [...] in dtype."""
    half = 1 << bits - 1
    scale = stored_scale(groups.abs().amax(-1) / (half - 0.5), dtype)
    return (groups / scale.float()[..., None]).round_().clamp_(-half, half - 1).to(torch.int16), scale


def asymmetric_codes(groups: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """groups [..., size] -> codes from 0 on, scales [...] in dtype, zero points [...]; 0 is one of the values."""
    most = (1 << bits) - 1
    low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    scale = stored_scale((high - low) / most, dtype)
    zeros = (-low / scale.float()).round_().clamp_(0, most)
    codes = (groups / scale.float()[..., None]).add_(zeros[..., None]).round_().clamp_(0, most)
    return codes.to(torch.int16), scale, zeros.to(torch.int16)


def mx_exponents(groups: Tensor, largest_exponent: int) -> Tensor:
    """uint8 [...]: E8M0 of groups [..., size]. largest_exponent: of the element type's largest number.

    A group whose largest magnitude is 1.75 or more times a power of two counts as the next power, as in
    compressed-tensors.
    """
    mantissa, exponent = torch.frexp(groups.abs().amax(-1))  # mantissa in [0.5, 1)
    power = exponent - 1 + (mantissa >= 0.875).int() - largest_exponent
    return (power + 127).clamp_(0, 254).to(torch.uint8)


def indivisible(shape: tuple[int, ...], **multiples: int) -> str | None:
    """Why a shape does not fit: rows or columns that are no multiple of what is given."""
    for dimension, index in (("rows", 0), ("columns", 1)):
        multiple = multiples.get(dimension, 1)
        if shape[index] % multiple:
            return f"its {shape[index]} {dimension} are no multiple of {multiple}"
    return None
