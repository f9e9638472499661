"""What each tensor of a model is stored as, how many bits a weight takes, and what rounding has cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mt_ckpt.files.stored_formats import StoredFormat, SupportsStoredFormats
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.errors import CheckpointError

BLOCK = 1 << 22
LAYER = re.compile(r"(?<=\.)[0-9]+(?=\.)")


@dataclass(frozen=True)
class LayerFormat:
    """One parameter. error: Euclidean norm of the difference to the original over the original's; None: not compared.
    largest_error: the largest difference of one number."""

    name: str
    format: str
    quantized: bool
    shape: tuple[int, ...]
    num_bytes: int
    error: float | None = None
    largest_error: float | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / max(1, self.numel)


@dataclass(frozen=True)
class FormatGroup:
    """The same parameter of several layers. error: the largest of theirs."""

    name: str
    format: str
    count: int
    numel: int
    num_bytes: int
    error: float | None

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / max(1, self.numel)


def layer_formats(
    reader: CheckpointReader,
    original: CheckpointReader | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> list[LayerFormat]:
    """The model's parameters. original: the same model before it was quantized, in any format.

    Raises CheckpointError for an original without one of the parameters, or with one of another shape.
    """
    stored, shapes = _stored(reader), reader.shapes()
    names = [name for name in shapes if name.startswith(MODEL)]
    if original is not None:
        _require_same_model(shapes, original.shapes(), names)
    formats: list[LayerFormat] = []
    for name in names:
        error, largest = (None, None) if original is None else _errors(reader.read(name), original.read(name))
        form, parameter = stored[name], name.removeprefix(MODEL)
        fields = (form.format, form.quantized, tuple(shapes[name]), form.num_bytes, error, largest)
        formats.append(LayerFormat(parameter, *fields))
        progress(name)
    return formats


def _stored(reader: CheckpointReader) -> Mapping[str, StoredFormat]:
    if isinstance(reader, SupportsStoredFormats):
        return reader.stored_formats()
    shapes = reader.shapes()
    return {
        name: StoredFormat(str(dtype).removeprefix("torch."), math.prod(shapes[name]) * dtype.itemsize, False)
        for name, dtype in reader.dtypes().items()
    }


def _require_same_model(
    shapes: Mapping[str, tuple[int, ...]], others: Mapping[str, tuple[int, ...]], names: Iterable[str]
) -> None:
    for name in names:
        if name not in others:
            raise CheckpointError(f"the original has no {name}: it is another model")
        if tuple(others[name]) != tuple(shapes[name]):
            raise CheckpointError(
                f"{name} has the shape {list(shapes[name])}, and {list(others[name])} in the original: it is another "
                "model"
            )


def _errors(quantized: Tensor, original: Tensor) -> tuple[float, float]:
    squared, total, largest = 0.0, 0.0, 0.0
    for ours, theirs in zip(quantized.reshape(-1).split(BLOCK), original.reshape(-1).split(BLOCK), strict=True):
        exact = theirs.double()
        gap = ours.double() - exact
        squared, total = squared + gap.square().sum().item(), total + exact.square().sum().item()
        largest = max(largest, gap.abs().max().item()) if gap.numel() else largest
    return math.sqrt(squared / total) if total else math.sqrt(squared), largest


def grouped(formats: Iterable[LayerFormat]) -> list[FormatGroup]:
    """Parameters of all layers together, where they are stored alike."""
    groups: dict[tuple[str, str], list[LayerFormat]] = {}
    for entry in formats:
        groups.setdefault((LAYER.sub("*", entry.name), entry.format), []).append(entry)
    return [_group(name, form, members) for (name, form), members in groups.items()]


def _group(name: str, form: str, members: list[LayerFormat]) -> FormatGroup:
    errors = [entry.error for entry in members if entry.error is not None]
    numel, num_bytes = sum(entry.numel for entry in members), sum(entry.num_bytes for entry in members)
    return FormatGroup(name, form, len(members), numel, num_bytes, max(errors, default=None))
