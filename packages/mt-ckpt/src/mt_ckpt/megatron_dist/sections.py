"""Parameters of a Mamba mixer, which torch_dist keeps as the tensors that they are packed from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mt_ckpt.megatron.pieces import Piece
from mt_core.errors import CheckpointError, ConfigError
from mt_core.nn.layout import ParameterLayout

PACKED: Mapping[str, tuple[str, ...]] = {
    ".mixer.in_proj.weight": ("z", "x", "B", "C", "dt"),
    ".mixer.conv1d.weight": ("x", "B", "C"),
    ".mixer.conv1d.bias": ("x", "B", "C"),
}
"""End of a parameter's name -> what its rows are, in order. Each is a tensor with that behind the parameter's key."""
_SECTION = re.compile(r"(?P<whole>.*\.mixer\.(?:in_proj\.weight|conv1d\.weight|conv1d\.bias))\.(?P<section>\w+)")


@dataclass(frozen=True)
class Packed:
    """Tensors one behind the other, by rows."""

    parts: Sequence[Piece]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self) -> Tensor:
        # [rows of all sections, ...]
        return torch.cat([part.read() for part in self.parts])


@dataclass(frozen=True)
class Rows:
    """section: what is behind the key of the parameter; None: all of it. first, count: its rows."""

    section: str | None
    first: int
    count: int


def rows_of(name: str, layout: ParameterLayout) -> list[Rows]:
    """The tensors that a parameter is kept as."""
    sections = sections_of(name)
    if not sections:
        return [whole(layout)]
    # The sizes are those of the layout by which tensor ranks cut the packed matrix, section by section.
    sizes = layout.splits[0].block_sizes(layout.shape[0])
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [Rows(*row) for row in zip(sections, firsts, sizes, strict=True)]


def whole(layout: ParameterLayout) -> Rows:
    return Rows(None, 0, layout.shape[0] if layout.shape else 1)


def require_one_rank(parameters: Iterable[str], tensor_parallel: int, version: str) -> None:
    """Raises ConfigError for a mixer that several ranks hold, of a version that does not keep its sections apart: the
    tensors are what the ranks have, one behind the other."""
    if tensor_parallel > 1 and any(sections_of(name) for name in parameters):
        raise ConfigError(
            f"--target-megatron-version {version}: torch_dist holds a Mamba mixer as its tensor parallel ranks cut it "
            f"before 0.9, which is written for --target-tensor-parallel-size 1 only, not {tensor_parallel}; "
            "--saver megatron writes it"
        )


def require_sections(folder: Path, weights: Mapping[str, Piece], tensor_parallel: int) -> None:
    """The same of a checkpoint that is read. Raises CheckpointError."""
    name = next((name for name, piece in weights.items() if sections_of(name) and not isinstance(piece, Packed)), None)
    if tensor_parallel > 1 and name is not None:
        raise CheckpointError(
            f"{folder}: {name} is not divided into sections, as Megatron-Core 0.8 wrote it; of a run with "
            f"tensor_model_parallel_size={tensor_parallel} its rows are in the order of the ranks, which is not read"
        )


def sections_of(name: str) -> tuple[str, ...]:
    return next((sections for end, sections in PACKED.items() if name.endswith(end)), ())


def pack(tensors: Mapping[str, Piece]) -> dict[str, Piece]:
    """Canonical name -> piece, of pieces that may be sections. Raises CheckpointError when a section is missing."""
    packed: dict[str, dict[str, Piece]] = {}
    found: dict[str, Piece] = {}
    for name, piece in tensors.items():
        if match := _SECTION.fullmatch(name):
            packed.setdefault(match["whole"], {})[match["section"]] = piece
        else:
            found[name] = piece
    return found | {name: Packed(_ordered(name, parts)) for name, parts in packed.items()}


def _ordered(name: str, parts: Mapping[str, Piece]) -> list[Piece]:
    wanted = sections_of(name)
    if set(parts) != set(wanted):
        raise CheckpointError(f"{name}: has the sections {_listed(parts)}, not {_listed(wanted)}")
    return [parts[section] for section in wanted]


def _listed(sections: Iterable[str]) -> str:
    return ", ".join(sorted(sections))
