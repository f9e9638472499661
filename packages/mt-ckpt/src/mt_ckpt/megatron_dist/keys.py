"""Keys of Megatron's distributed checkpoints, and the canonical names.

Layers that are all alike are stacked: `decoder.layers.mlp.linear_fc2.weight` has one more dimension in front, a layer
each. Otherwise the number stands in the key. Experts of a layer are stacked behind that, under `experts.experts`. Every
norm stands under the linear layer that follows it, as with Transformer Engine, if Megatron's own layers wrote it. The
packed parameters of a Mamba mixer are kept apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mt_ckpt.megatron import names
from mt_ckpt.megatron.pieces import Entry, Piece
from mt_ckpt.megatron_dist.index import ChunkedTensor
from mt_core.errors import CheckpointError, ConfigError
from mt_core.nn.layout import ParameterLayout

_STACKED = re.compile(r"^(encoder|decoder)\.layers\.(?!\d)")
_OF_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?optimizer\.")
# +?: the shortest state, up to the first dot; states have no dots, the keys of parameters do.
_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(?P<state>[a-z_0-9]+?)\.(?P<key>.*)$")
STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "param": "main", "fp32_param": "main"}
"""Name of an optimizer's state in keys -> canonical."""


@dataclass(frozen=True)
class Layer:
    """One layer of a stacked tensor."""

    tensor: ChunkedTensor
    number: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self) -> Tensor:
        begin, end = [self.number, *(0 for _ in self.shape)], [self.number + 1, *self.shape]
        # [0]: the dimension of layers is dropped, [1, ...] -> [...].
        return self.tensor.read_slice(begin, end)[0]


@dataclass(frozen=True)
class Key:
    """What a key names: a state of the optimizer or, with state None, the weights; and of which model key."""

    state: str | None
    model_key: str


def parse(key: str) -> Key | None:
    """None: something else than a tensor of the shape of a parameter."""
    if match := _STATE.match(key):
        state = STATES.get(match["state"])
        return Key(state or match["state"], match["key"])
    # Flat buckets, which `reshardable` reads, and FP8 states.
    if _OF_OPTIMIZER.match(key) or names.EXTRA_STATE in key:
        return None
    return Key(None, key)


def entries_of(model_key: str, tensor: ChunkedTensor) -> Iterator[Entry]:
    """The parameters that a tensor is, or is a stack of."""
    parsed = names.parse(model_key)
    stacked = _STACKED.match(parsed.name)
    if stacked is None:
        yield Entry({}, parsed.name, parsed.expert, tensor)
        return
    stack = stacked[1]
    for number in range(tensor.shape[0]):
        name = parsed.name.replace(f"{stack}.layers.", f"{stack}.layers.{number}.", 1)
        yield Entry({}, name, parsed.expert, Layer(tensor, number))


# -- writing -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a parameter goes: a key, and the number of its layer if layers are stacked."""

    key: str
    layer: int | None


def place_of(name: str, style: names.Style, *, stacked: bool) -> Place:
    """The key of a canonical parameter."""
    key = style.stored(name).replace(names.EXPERTS, ".mlp.experts.experts.")
    layer = names.layer_of(key)
    if layer is None or not stacked:
        return Place(key, None)
    stack, number = layer
    return Place(key.replace(f"{stack}.layers.{number}.", f"{stack}.layers.", 1), number)


def are_alike(parameters: Iterable[str]) -> bool:
    """Whether all layers of each stack have the same parameters, so that they can be stacked."""
    kinds: dict[tuple[str, int], set[str]] = {}
    for name in parameters:
        if layer := names.layer_of(name):
            # split(".", 3)[3]: behind "decoder.layers.3."
            kinds.setdefault(layer, set()).add(name.split(".", 3)[3])
    by_stack: dict[str, list[set[str]]] = {}
    for (stack, _), members in kinds.items():
        by_stack.setdefault(stack, []).append(members)
    return all(all(members == group[0] for members in group) for group in by_stack.values())


# -- packed parameters of a Mamba mixer, which torch_dist keeps apart --------------------------------

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
    pieces: dict[str, Piece] = {}
    for name, piece in tensors.items():
        if match := _SECTION.fullmatch(name):
            packed.setdefault(match["whole"], {})[match["section"]] = piece
        else:
            pieces[name] = piece
    return pieces | {name: Packed(_ordered(name, parts)) for name, parts in packed.items()}


def _ordered(name: str, parts: Mapping[str, Piece]) -> list[Piece]:
    wanted = sections_of(name)
    if set(parts) != set(wanted):
        raise CheckpointError(f"{name}: has the sections {_listed(parts)}, not {_listed(wanted)}")
    return [parts[section] for section in wanted]


def _listed(sections: Iterable[str]) -> str:
    return ", ".join(sorted(sections))
