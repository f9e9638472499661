"""Keys of Megatron's distributed checkpoints, and the canonical names.

Layers that are all alike are stacked: `decoder.layers.mlp.linear_fc2.weight` has one more dimension in front, a layer
each. Otherwise the number stands in the key. Experts of a layer are stacked behind that, under `experts.experts`. Every
norm stands under the linear layer that follows it, as with Transformer Engine, if Megatron's own layers wrote it. The
packed parameters of a Mamba mixer are kept apart, see `sections`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_ckpt.megatron import names
from mt_ckpt.megatron.pieces import Entry
from mt_ckpt.megatron_dist.index import ChunkedTensor

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
    found = names.layer_of(key)
    if found is None or not stacked:
        return Place(key, None)
    stack, number = found
    return Place(key.replace(f"{stack}.layers.{number}.", f"{stack}.layers.", 1), number)


def are_alike(parameters: Iterable[str]) -> bool:
    """Whether all layers of each stack have the same parameters, so that they can be stacked."""
    kinds: dict[tuple[str, int], set[str]] = {}
    for name in parameters:
        if found := names.layer_of(name):
            # split(".", 3)[3]: behind "decoder.layers.3."
            kinds.setdefault(found, set()).add(name.split(".", 3)[3])
    by_stack: dict[str, list[set[str]]] = {}
    for (stack, _), members in kinds.items():
        by_stack.setdefault(stack, []).append(members)
    return all(all(members == group[0] for members in group) for group in by_stack.values())
