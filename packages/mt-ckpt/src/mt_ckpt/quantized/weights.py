"""A weight that is stored in several tensors, and what a checkpoint of such weights looks like without quantization."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from mt_ckpt.files.external_tensors import ExternalTensors
from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.files.stored_formats import StoredFormat
from mt_core.errors import CheckpointError

SLICE = 1 << 22
"""Elements that are dequantized at once."""
LARGE_BYTES = 4 << 20
"""Tensors from here on are in huge pages where the system has them."""
LARGEST_WEIGHT = 65504.0
"""The largest number of fp16: no weight is larger."""
CODES = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
Range = Literal["positive", "not negative", "finite"]
Parts = Mapping[str, Tensor]
"""Role, such as `weight_scale` -> the stored tensor"""


@dataclass(frozen=True)
class QuantizedWeight:
    """name: what an unquantized file calls the tensor. info: its shape and dtype there.

    parts: role -> stored name. fill: writes the values into a tensor of that shape and dtype. scales: the parts that
    are factors, with the range that theirs are in. format: for people.
    """

    name: str
    info: TensorInfo
    parts: Mapping[str, str]
    fill: Callable[[Tensor, Parts], None]
    format: str
    scales: Mapping[str, Range] = field(default_factory=dict)
    largest: Callable[[Parts], float] | None = None
    """The largest magnitude that the scales allow, of formats whose factors are easily confused with their inverse."""


@dataclass(frozen=True)
class Claims:
    """What a scheme takes of a checkpoint's tensors. unused: stored tensors that are no weights, such as scales of
    activations and of the key-value cache."""

    weights: list[QuantizedWeight]
    unused: set[str] = field(default_factory=set)


class Scheme(Protocol):
    """A kind of quantization, with the settings of a checkpoint's configuration."""

    def claims(self, tensors: ExternalTensors) -> Claims:
        """Raises CheckpointError for tensors that are missing or have another shape or dtype. No tensor of weights or
        scales is read."""
        ...


class DequantizedTensors:
    """The tensors as an unquantized file has them (an ExternalTensors)."""

    def __init__(self, tensors: ExternalTensors, claims: Claims) -> None:
        """Raises CheckpointError for a name that is there twice."""
        self.stored, self.weights = tensors, {weight.name: weight for weight in claims.weights}
        taken = {part for weight in claims.weights for part in weight.parts.values()} | claims.unused
        plain = {name: info for name, info in tensors.infos.items() if name not in taken}
        if both := sorted(set(plain) & set(self.weights)):
            raise CheckpointError(f"{both[0]} is in the checkpoint twice: as it is, and quantized")
        require_no_codes(plain)
        self.infos = {**plain, **{name: weight.info for name, weight in self.weights.items()}}

    def read(self, name: str) -> Tensor:
        """The tensor, dequantized. Raises CheckpointError for scales that are none."""
        weight = self.weights.get(name)
        if weight is None:
            return self.stored.read(name)
        parts = self.read_parts(weight)
        values = empty(weight.info)
        weight.fill(values, parts)
        return values

    def read_parts(self, weight: QuantizedWeight) -> Parts:
        """The parts of a weight as they are stored. Raises CheckpointError for scales that are none."""
        parts = {role: self.stored.read(part) for role, part in weight.parts.items()}
        require_scales(weight, parts)
        return parts

    def require_scales(self) -> None:
        """Read all scales, and no weights. Raises CheckpointError that names the first that is none."""
        for weight in self.weights.values():
            require_scales(weight, {role: self.stored.read(weight.parts[role]) for role in weight.scales})


def require_no_codes(plain: Mapping[str, TensorInfo]) -> None:
    """Raises CheckpointError for a weight that nobody dequantizes, since its scales are not there."""
    for name, info in plain.items():
        if name.endswith(".weight") and info.dtype in CODES:
            kind = str(info.dtype).removeprefix("torch.")
            raise CheckpointError(f"{name} is {kind}, but the checkpoint has no scale for it")


def require_scales(weight: QuantizedWeight, parts: Parts) -> None:
    for role, expected in weight.scales.items():
        name, scale = weight.parts[role], parts[role]
        values = scale.float() if scale.dtype != torch.uint8 else (scale != 255).float()  # E8M0: 255 is NaN
        if not values.isfinite().all() or (scale.dtype == torch.uint8 and not values.all()):
            raise CheckpointError(f"{name}: has scales that are not finite")
        lowest = values.min().item() if values.numel() else 1.0
        if (expected == "positive" and lowest <= 0 and scale.dtype != torch.uint8) or (
            expected == "not negative" and lowest < 0
        ):
            raise CheckpointError(f"{name}: has a scale of {lowest:g}; scales of this format are {expected}")
    if weight.largest is not None and (largest := weight.largest(parts)) > LARGEST_WEIGHT:
        raise CheckpointError(
            f"{', '.join(weight.parts[role] for role in weight.scales)}: with these scales {weight.name} may be "
            f"as large as {largest:g}; the global scale is the inverse of what {weight.format} has (compressed-tensors "
            "divides by weight_global_scale, ModelOpt multiplies by weight_scale_2)"
        )


# -- what schemes share ------------------------------------------------------------------------------


def row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Rows that are dequantized at once."""
    step = max(1, SLICE // max(1, columns))
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def matrices(values: Tensor, parts: Parts, stacked: Iterable[str]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Each matrix of a stack [..., rows, columns] with its parts; `stacked` are the roles that have the same leading
    dimensions."""
    if values.ndim == 2:
        yield values, dict(parts)
        return
    for index in range(values.shape[0]):
        matrix_parts = {role: part[index] if role in stacked else part for role, part in parts.items()}
        yield from matrices(values[index], matrix_parts, stacked)


def require(tensors: ExternalTensors, weight: str, name: str) -> TensorInfo:
    """Raises CheckpointError for a part that is not there."""
    info = tensors.infos.get(name)
    if info is None:
        raise CheckpointError(f"{weight} is quantized, but {name} is missing in the checkpoint")
    return info


def require_shape(name: str, info: TensorInfo, *shapes: tuple[int, ...], of: str) -> None:
    """Raises CheckpointError for a part of another shape than its weight needs."""
    if info.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(f"{name} has the shape {list(info.shape)}; for {of} it is {expected}")


def require_matrix(name: str, info: TensorInfo) -> None:
    if len(info.shape) != 2:
        raise CheckpointError(f"{name} has the shape {list(info.shape)}; packed weights are matrices")


def require_dtype(name: str, info: TensorInfo, *dtypes: torch.dtype) -> None:
    if info.dtype not in dtypes:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CheckpointError(f"{name} is {str(info.dtype).removeprefix('torch.')}; this format has {expected}")


def format_of(tensors: ExternalTensors, name: str) -> StoredFormat:
    """How a tensor is stored, by its name in an unquantized file."""
    if isinstance(tensors, DequantizedTensors) and name in tensors.weights:
        weight = tensors.weights[name]
        num_bytes = sum(tensors.stored.infos[part].num_bytes for part in weight.parts.values())
        return StoredFormat(weight.format, num_bytes, True)
    info = tensors.infos[name]
    return StoredFormat(str(info.dtype).removeprefix("torch."), info.num_bytes, False)


def modules_with(tensors: ExternalTensors, suffix: str) -> Iterator[str]:
    """Names of what stands before `suffix` in the names of tensors."""
    return (name.removesuffix(suffix) for name in tensors.infos if name.endswith(suffix))


def empty(info: TensorInfo) -> Tensor:
    """A tensor without values. A large one is in huge pages: faults for 512 small pages in place of one cost as much as
    dequantizing into them."""
    if info.num_bytes < LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(info.shape, dtype=info.dtype)
    # Private: shared memory, which is the default, has settings of its own.
    memory = mmap.mmap(-1, info.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=info.dtype).view(info.shape)
