"""Parameters of a Mamba mixer, which torch_dist keeps as the tensors that they are packed from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_ckpt.megatron.pieces import Piece
from mt_core.errors import CheckpointError
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
        return [Rows(None, 0, layout.shape[0] if layout.shape else 1)]
    sizes = layout.splits[0].block_sizes(layout.shape[0])
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [Rows(*row) for row in zip(sections, firsts, sizes, strict=True)]


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
