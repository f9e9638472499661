"""Round-to-nearest quantization of matrices [out, in], a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized.grids import Grid, Scales, full_range, in_groups
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


@runtime_checkable
class PacksCodes(Quantizer, Protocol):
    """A `Quantizer` whose codes and scales may be chosen by calibration."""

    @property
    def grid(self) -> Grid: ...

    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of stored scales of a weight with this dtype, where the grid has none of its own."""
        ...

    def value_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which readers return such a weight."""
        ...

    @property
    def input_grid(self) -> Grid | None:
        """To which readers round the inputs of a matrix, with a scale for each token; None: they do not."""
        ...

    def pack(self, codes: Tensor, scales: Scales) -> Mapping[str, Tensor]:
        """Parts of some rows. codes: [rows, groups, size] of the grid."""
        ...


class RoundsToGrid:
    """Rounds to the nearest number of a grid whose scales meet the largest number of each group."""

    def encode_rows(self, rows: Tensor, dtype: torch.dtype, largest: float) -> Mapping[str, Tensor]:
        assert isinstance(self, PacksCodes)
        groups = in_groups(rows, self.grid.size)
        scales = full_range(self.grid, groups, self.scale_dtype(dtype), largest)
        return self.pack(self.grid.codes(groups, scales), scales)

    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def value_dtype(self, dtype: torch.dtype) -> torch.dtype:
        assert isinstance(self, PacksCodes)
        return self.scale_dtype(dtype)

    @property
    def input_grid(self) -> Grid | None:
        return None


def pack_weight(quantizer: Quantizer, codes: Tensor, scales: Scales, largest: float) -> dict[str, Tensor]:
    """All parts of a weight whose codes [out, in] and scales are given. largest: magnitude that a global scale was made
    for."""
    assert isinstance(quantizer, PacksCodes)
    whole = quantizer.whole(tuple(codes.shape), largest)
    return {**whole, **quantizer.pack(in_groups(codes, quantizer.grid.size), scales)}


def encode(quantizer: Quantizer, weight: Tensor, largest: float | None = None) -> dict[str, Tensor]:
    """All parts of a weight [out, in]. largest: magnitude that a global scale is made for; None: the weight's own."""
    most = largest_of(weight) if largest is None else largest
    infos = quantizer.parts(TensorInfo(tuple(weight.shape), weight.dtype))
    parts = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in infos.items()}
    parts |= quantizer.whole(tuple(weight.shape), most)
    for rows in _slices(*weight.shape):
        for name, part in quantizer.encode_rows(weight[rows].float(), weight.dtype, most).items():
            dim = quantizer.rows_dim
            # Exact but for parts whose last element stands for fewer rows, which rounding down leaves in their place.
            start = rows.start * parts[name].shape[dim] // len(weight)
            parts[name].narrow(dim, start, part.shape[dim]).copy_(part)
    return parts


def largest_of(weight: Tensor) -> float:
    return max(weight[rows].abs().max().item() for rows in _slices(*weight.shape))


def _slices(rows: int, columns: int) -> list[slice]:
    step = max(1, SLICE // (columns * ROW_MULTIPLE)) * ROW_MULTIPLE
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def indivisible(shape: tuple[int, ...], **multiples: int) -> str | None:
    """Why a shape does not fit: rows or columns that are no multiple of what is given."""
    for dimension, index in (("rows", 0), ("columns", 1)):
        multiple = multiples.get(dimension, 1)
        if shape[index] % multiple:
            return f"its {shape[index]} {dimension} are no multiple of {multiple}"
    return None
