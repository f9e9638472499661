"""Tensors cut over several files, as model parallel training left them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mt_ckpt.hugging_face.reader import same_bits
from mt_ckpt.hugging_face.tensors import TensorFile
from mt_ckpt.safetensors_files import TensorInfo
from mt_core.errors import CheckpointError

CutAlong = Callable[[str, tuple[int, ...]], int | None]
"""(name, shape of a part) -> the dimension along which it is cut; None: every file holds the same whole tensor"""


class MergedShards:
    """The whole tensors of files that each hold a part of every one (an ExternalTensors).

    Raises CheckpointError when the files do not hold the same names.
    """

    def __init__(self, shards: Sequence[TensorFile], cut_along: CutAlong) -> None:
        names = set(shards[0].tensors)
        for number, shard in enumerate(shards):
            if different := sorted(names ^ set(shard.tensors)):
                raise CheckpointError(f"shards 0 and {number} do not hold the same tensors: {', '.join(different[:8])}")
        self._shards, self._cut_along = shards, cut_along
        self.infos: Mapping[str, TensorInfo] = {name: self._info(name) for name in shards[0].tensors}

    def read(self, name: str) -> Tensor:
        """One whole tensor. Raises CheckpointError when copies of one that is not cut differ."""
        dim = self._dim(name)
        if dim is None:
            # Norms are on every rank; copies that differ mean that the files are of different checkpoints.
            first, *others = (shard.read(name) for shard in self._shards)
            if not all(same_bits(first, other) for other in others):
                raise CheckpointError(f"{name}: the shards' copies of this tensor differ")
            return first
        return torch.cat([shard.read(name) for shard in self._shards], dim)

    def _dim(self, name: str) -> int | None:
        # One file holds whole tensors: `cut_along` could not tell a part from a whole.
        return self._cut_along(name, self._shards[0].tensors[name].shape) if len(self._shards) > 1 else None

    def _info(self, name: str) -> TensorInfo:
        parts = [shard.tensors[name] for shard in self._shards]
        dim = self._dim(name)
        if dim is None or len(parts) == 1:
            return parts[0]
        size = sum(part.shape[dim] for part in parts)
        shape = parts[0].shape
        return TensorInfo((*shape[:dim], size, *shape[dim + 1 :]), parts[0].dtype)
