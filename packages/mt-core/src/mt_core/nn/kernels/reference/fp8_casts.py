"""Casts of matrices to FP8 with their scales (one for all of it, one a row, or one a block), in plain torch.

A scaled matrix stands for data * scale. `Casts` is the interface of the implementations, `TorchCasts` the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.kernels.reference.layers import FusedActivation, activation

# -- formats of the operands (Micikevicius et al., FP8 Formats for Deep Learning, 2022) -------------------

Role = Literal["input", "weight", "gradient"]
"""Operand of a linear layer's products; gradient: that of the output."""
ROLES: tuple[Role, ...] = ("input", "weight", "gradient")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS: Mapping[str, Mapping[Role, torch.dtype]] = {
    "e4m3": {"input": E4M3, "weight": E4M3, "gradient": E4M3},
    "hybrid": {"input": E4M3, "weight": E4M3, "gradient": E5M2},
}
"""By precision.fp8_format, of those in 8 bits. Gradients have a wider range and need fewer digits."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the 16 codes of E2M1 stand for."""

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def scale_of(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """The fp32 number that values are divided by, so that `amax` becomes the largest value of `dtype`.

    amax: fp32, any shape; 0 gives 1. margin: powers of two that are left free above. What is not finite stays so, and
    then makes everything that it scales NaN.
    """
    # A tensor: by a number torch's GPU kernels multiply with the rounded reciprocal, which is not the quotient.
    limit = amax.new_full((), torch.finfo(dtype).max / 2.0**margin)
    # amax / 448 may underflow to 0, and x / 0 is infinite.
    scale = (amax / limit).clamp(min=_SMALLEST_SCALE)
    return torch.where(amax == 0.0, 1.0, scale)


def to_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in `dtype`, rounded to nearest, ties to even; beyond the largest value: that value."""
    # Conversions of e4m3 give NaN beyond the largest value: clamp first. NaN passes the clamp.
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


BLOCK = 128
MX_BLOCK = 32
E2M1_BLOCK = 16
ALIGNMENT = 16
"""Scaled products of GPUs take lengths of contracted dimensions that this divides."""


class Granularity(Enum):
    """What shares a scale, for a matrix [rows, length] that is contracted along its length."""

    TENSOR = "tensor"
    """scale []"""
    ROW = "row"
    """scale [rows, 1]"""
    ROW_BLOCK = "1x128"
    """scale [rows, length / 128]"""
    SQUARE_BLOCK = "128x128"
    """scale [rows / 128, length / 128]"""
    MX_BLOCK = "1x32"
    """scale [rows, length / 32] in E8M0"""
    E2M1_BLOCK = "1x16"
    """scale [rows, length / 16] in e4m3, of E2M1 with two numbers a byte: data is [rows, length / 2] uint8"""

    @property
    def multiple(self) -> int:
        """What a contracted length is padded to, with zeros."""
        return BLOCK if self in (Granularity.ROW_BLOCK, Granularity.SQUARE_BLOCK) else ALIGNMENT


_SPREAD = {Granularity.ROW_BLOCK: BLOCK, Granularity.MX_BLOCK: MX_BLOCK, Granularity.E2M1_BLOCK: E2M1_BLOCK}
"""Numbers of a row that share a scale."""


@dataclass(frozen=True)
class Scaled:
    """data [rows, length] in FP8 stands for data * scale; scale is fp32 unless `granularity` says else, and spreads as
    it says. whole: [] fp32, another factor of the whole matrix; None: 1."""

    data: Tensor
    scale: Tensor
    granularity: Granularity
    whole: Tensor | None = None

    def decode(self) -> Tensor:
        """[rows, length] fp32, up to its rounding what the numbers stand for."""
        return self.decode_blocks() if self.whole is None else self.decode_blocks() * self.whole

    def decode_blocks(self) -> Tensor:
        """The same without the factor of the whole matrix."""
        values = unpack_e2m1(self.data) if self.granularity is Granularity.E2M1_BLOCK else self.data.float()
        return values * self._spread()

    def map_rows(self, map_rows: Map) -> Scaled:
        """With another set of rows, of which each has scales of its own."""
        return replace(self, data=map_rows(self.data), scale=map_rows(self.scale))

    def _spread(self) -> Tensor:
        if self.granularity is Granularity.SQUARE_BLOCK:
            return self.scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        length = _SPREAD.get(self.granularity)
        return self.scale if length is None else self.scale.float().repeat_interleave(length, 1)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """[rows, n] uint8 -> [rows, 2n] fp32"""
    codes = torch.stack([packed & 15, packed >> 4], 2).flatten(1)
    return torch.tensor(E2M1, device=packed.device)[codes.long()]


def cast_tensor(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Scaled:
    """x [rows, length] by a scale that is known: []."""
    return Scaled(to_fp8(x, scale, dtype), scale, Granularity.TENSOR)


def cast_rows(x: Tensor, dtype: torch.dtype, margin: int = 0) -> Scaled:
    """x [rows, length], each row by its largest magnitude."""
    x = padded(x, Granularity.ROW.multiple)  # zeros, which change no magnitude
    scale = scale_of(x.abs().amax(1, keepdim=True).float(), dtype, margin)  # [rows, 1]
    return Scaled(to_fp8(x, scale, dtype), scale, Granularity.ROW)


def cast_row_blocks(x: Tensor, dtype: torch.dtype, margin: int = 0) -> Scaled:
    """x [rows, length], every 128 numbers of a row by their largest magnitude (DeepSeek-V3, 2024, section 3.3)."""
    x = padded(x, BLOCK)
    blocks = x.unflatten(1, (-1, BLOCK))  # [rows, blocks, 128]
    scale = scale_of(blocks.abs().amax(2).float(), dtype, margin)  # [rows, blocks]
    return Scaled(to_fp8(blocks, scale[..., None], dtype).flatten(1), scale, Granularity.ROW_BLOCK)


def cast_square_blocks(x: Tensor, dtype: torch.dtype, margin: int = 0) -> Scaled:
    """x [rows, length], multiples of 128 both, every 128 x 128 numbers by their largest magnitude."""
    blocks = x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [row blocks, 128, column blocks, 128]
    scale = scale_of(blocks.abs().amax((1, 3)).float(), dtype, margin)  # [row blocks, column blocks]
    data = to_fp8(blocks, scale[:, None, :, None], dtype)
    return Scaled(data.flatten(2).flatten(0, 1), scale, Granularity.SQUARE_BLOCK)  # [rows, length]


def padded(x: Tensor, multiple: int) -> Tensor:
    """x [rows, length] with zeros behind each row, up to a multiple."""
    missing = -x.shape[1] % multiple
    if missing == 0:
        return x
    if x.element_size() == 1:  # bytes, as torch does not pad FP8
        return F.pad(x.view(torch.uint8), (0, missing)).view(x.dtype)
    return F.pad(x, (0, missing))


# -- a gated activation, or the gradient of its input, as a matrix that is computed where it is cast ------


@dataclass(frozen=True)
class Activated:
    """activation(x) [rows, F], or with `grad` [rows, F] the gradient of x [rows, 2F], in the dtype of x.

    x: [rows, 2F], contiguous, the gate half first. turned: the transpose of that.
    """

    x: Tensor
    name: FusedActivation
    grad: Tensor | None = None
    turned: bool = False

    @property
    def width(self) -> int:
        """F"""
        return self.x.shape[1] // 2

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = len(self.x), self.width if self.grad is None else 2 * self.width
        return (columns, rows) if self.turned else (rows, columns)

    def t(self) -> Activated:
        return replace(self, turned=not self.turned)

    def compute(self) -> Tensor:
        matrix = self._activation() if self.grad is None else self._gradient(self.grad)
        return matrix.t() if self.turned else matrix

    def _activation(self) -> Tensor:
        return activation(self.x, None, self.name)

    def _gradient(self, grad: Tensor) -> Tensor:
        # Called in backward passes, where gradients are off; the graph of this one operation is freed with them.
        with torch.enable_grad():
            x = self.x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(activation(x, None, self.name), x, grad)
        return gradient


Matrix = Tensor | Activated


def computed(matrix: Matrix) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else matrix.compute()


# -- the interface of implementations, and the reference --------------------------------------------------

Map = Callable[[Tensor], Tensor]
"""Function of [rows, ...] to another number of rows, such as an all-gather."""
Cast = Callable[[Matrix, torch.dtype, int], Scaled]
"""(x, format, margin) -> x with a scale for each row or block"""
Along = Literal["columns", "rows", "both"]
"""What the products of a matrix will be contracted along. A cast may give up to what is named."""


@dataclass(frozen=True)
class WholeCast:
    """One scale for all of it: cast once. column_major: the same numbers [rows, columns] with those of a column next to
    one another, perhaps with rows of zeros behind them; None: transposed as bytes when it is needed."""

    cast: Scaled
    column_major: Tensor | None = None

    @property
    def scale(self) -> Tensor | None:
        return self.cast.scale

    def kept(self) -> Tensor:
        # For the weight's gradient: the order that its product reads, where the cast has given it.
        return self.cast.data if self.column_major is None else self.column_major

    def along_columns(self, map_rows: Map | None = None) -> Scaled:
        if map_rows is None:
            return self.cast
        # One scale for the whole matrix, which ranks agreed on: gathering the bytes is enough.
        return Scaled(map_rows(self.cast.data), self.cast.scale, self.cast.granularity)

    def along_rows(self) -> Scaled:
        # [columns, rows]; the number of tokens need not be a multiple of what products take.
        data = padded(self.kept().t(), self.cast.granularity.multiple).contiguous()
        return Scaled(data, self.cast.scale, self.cast.granularity)


def restored_cast(kept: Tensor, scale: Tensor) -> WholeCast:
    """The cast that had `kept` and `scale`, for a product along its rows."""
    return WholeCast(Scaled(kept, scale, Granularity.TENSOR))


class Casts(Protocol):
    """x: [rows, columns]; of `rows`, `row_blocks` and `square_blocks` also a transposed view."""

    @property
    def rows(self) -> Cast:
        """cast_rows"""
        ...

    @property
    def row_blocks(self) -> Cast:
        """cast_row_blocks"""
        ...

    @property
    def square_blocks(self) -> Cast:
        """cast_square_blocks"""
        ...

    def amaxes(self, x: Matrix) -> Tensor:
        """fp32, [] or [n]: magnitudes of which the largest is that of x."""
        ...

    def by_amaxes(self, x: Matrix, amaxes: Tensor, dtype: torch.dtype, margin: int, along: Along) -> WholeCast:
        """By the largest of these magnitudes (see scale_of)."""
        ...

    def by_scale(self, x: Matrix, scale: Tensor, dtype: torch.dtype, along: Along) -> WholeCast:
        """scale: [] fp32."""
        ...

    def by_past(
        self, x: Matrix, past: Tensor, noted: Tensor | None, dtype: torch.dtype, margin: int, along: Along
    ) -> WholeCast:
        """By the magnitude `past`, [] fp32. An x that is not finite becomes NaN, by its scale; of another one the
        largest magnitude is noted: noted = max(noted, it), [] fp32."""
        ...


class TorchCasts:
    """In plain torch: the reference, and what torch.compile makes kernels of."""

    def rows(self, x: Matrix, dtype: torch.dtype, margin: int) -> Scaled:
        return cast_rows(computed(x), dtype, margin)

    def row_blocks(self, x: Matrix, dtype: torch.dtype, margin: int) -> Scaled:
        return cast_row_blocks(computed(x), dtype, margin)

    def square_blocks(self, x: Matrix, dtype: torch.dtype, margin: int) -> Scaled:
        return cast_square_blocks(computed(x), dtype, margin)

    def amaxes(self, x: Matrix) -> Tensor:
        return amax_of(computed(x))

    def by_amaxes(self, x: Matrix, amaxes: Tensor, dtype: torch.dtype, margin: int, along: Along) -> WholeCast:
        return self.by_scale(x, scale_of(amaxes, dtype, margin), dtype, along)

    def by_scale(self, x: Matrix, scale: Tensor, dtype: torch.dtype, along: Along) -> WholeCast:
        return WholeCast(cast_tensor(computed(x), scale, dtype))

    def by_past(
        self, x: Matrix, past: Tensor, noted: Tensor | None, dtype: torch.dtype, margin: int, along: Along
    ) -> WholeCast:
        x = computed(x)
        amax = amax_of(x)
        if noted is not None:
            note(noted, amax)
        # 0 * inf and 0 * NaN are NaN: the scale of a matrix that is not finite becomes NaN without an `if` on the host.
        return self.by_scale(x, scale_of(past + 0.0 * amax, dtype, margin), dtype, along)


TORCH_CASTS = TorchCasts()


def note(noted: Tensor, amax: Tensor) -> None:
    """noted = max(noted, amax), both [] fp32. An amax that is not finite is left out."""
    # Else a step that is not finite would decide the scales of the steps after it.
    torch.maximum(noted, torch.where(amax.isfinite(), amax, 0.0), out=noted)


def amax_of(x: Tensor) -> Tensor:
    """[] fp32, the largest magnitude; 0 for a matrix without elements."""
    # amax is exact in 16 bits, so only the result is widened.
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
