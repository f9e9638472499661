"""Tensors of torchtitan that hold several of Hugging Face's: fused queries, keys and values, and stacked experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from mt_ckpt.hugging_face.tensors import ExternalTensors
from mt_ckpt.safetensors_files import TensorInfo
from mt_core.errors import CheckpointError

FUSED = re.compile(r"layers\.(\d+)\.attention\.qkv_linear\.wqkv\.weight")
"""[key-value heads * (queries of one + 2) * D, hidden]: of each key-value head its queries, then the key, the value."""
EXPERTS = re.compile(r"layers\.(\d+)\.moe\.experts\.(w[123])(?:_EFD|_EDF)?")
"""w1 and w3: [experts, width, hidden], w2: [experts, hidden, width]."""
EXPERT_BIAS = re.compile(r"layers\.\d+\.moe\.expert_bias(?:_E)?")
WITH_EXPERTS = ("qwen3_moe", "deepseek_v3")
"""Model types whose experts torchtitan stacks so and Hugging Face names one by one."""
EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class StoredTensors(ExternalTensors, Protocol):
    def read_first(self, name: str, first: int) -> Tensor:
        """Element `first` of the leading dimension."""
        ...


@dataclass(frozen=True)
class _Part:
    shape: tuple[int, ...]
    stored: str
    read: Callable[[], Tensor]


class WithParts:
    """Tensors under Hugging Face's names, together with the parts of those that hold several (an ExternalTensors)."""

    def __init__(self, whole: ExternalTensors, stored: StoredTensors, external: Mapping[str, Any]) -> None:
        self._whole = whole
        self._parts = dict(_parts(stored, external))
        parts = {name: TensorInfo(part.shape, stored.infos[part.stored].dtype) for name, part in self._parts.items()}
        if twice := sorted(parts.keys() & whole.infos.keys()):
            raise CheckpointError(
                f"tensor {self._parts[twice[0]].stored} holds {twice[0]}, which is also there by itself"
            )
        self.infos: Mapping[str, TensorInfo] = {**whole.infos, **parts}

    def read(self, name: str) -> Tensor:
        return self._parts[name].read() if name in self._parts else self._whole.read(name)


def is_of_several(name: str, model_type: str | None) -> bool:
    """Whether a tensor holds several, in models of this type."""
    with_experts = model_type in WITH_EXPERTS and EXPERTS.fullmatch(name) is not None
    return with_experts or FUSED.fullmatch(name) is not None


def require_unused_bias(stored: StoredTensors, name: str) -> None:
    """Raises CheckpointError for a bias by which the router chooses experts, of a model that has no place for it."""
    if stored.read(name).any():
        raise CheckpointError(
            f"tensor {name} is not zero: the router was trained with a bias on its choice of experts, which models of "
            "this model_type do not have"
        )


def _parts(stored: StoredTensors, external: Mapping[str, Any]) -> Iterator[tuple[str, _Part]]:
    for name, info in stored.infos.items():
        if match := FUSED.fullmatch(name):
            yield from _of_attention(stored, name, f"model.layers.{match[1]}.self_attn", external)
        elif match := EXPERTS.fullmatch(name):
            if len(info.shape) != 3:
                raise CheckpointError(f"tensor {name} has shape {list(info.shape)}, not [experts, rows, columns]")
            for expert in range(info.shape[0]):
                own = f"model.layers.{match[1]}.mlp.experts.{expert}.{EXPERT_NAMES[match[2]]}.weight"
                yield own, _Part(info.shape[1:], name, partial(stored.read_first, name, expert))


def _of_attention(
    stored: StoredTensors, name: str, module: str, external: Mapping[str, Any]
) -> Iterator[tuple[str, _Part]]:
    heads = int(external["num_attention_heads"])
    groups = int(external.get("num_key_value_heads") or heads)
    rows, hidden = stored.infos[name].shape
    if heads % groups or rows % (heads + 2 * groups):
        raise CheckpointError(
            f"tensor {name} has {rows} rows, which are not {heads} heads of queries and {groups} of keys and of values"
        )
    # Queries of one key-value head; elements of a head.
    of_one, size = heads // groups, rows // (heads + 2 * groups)
    kinds = {"q_proj": slice(0, of_one), "k_proj": slice(of_one, of_one + 1), "v_proj": slice(of_one + 1, of_one + 2)}
    for kind, taken in kinds.items():
        count = groups * (taken.stop - taken.start)
        read = partial(_heads, stored, name, groups, size, taken)
        yield f"{module}.{kind}.weight", _Part((count * size, hidden), name, read)


def _heads(stored: StoredTensors, name: str, groups: int, size: int, taken: slice) -> Tensor:
    # [groups, of_one + 2, size, hidden] -> [groups * taken, size, hidden] -> [groups * taken * size, hidden]
    return stored.read(name).unflatten(0, (groups, -1, size))[:, taken].flatten(0, 2).contiguous()
