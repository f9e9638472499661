"""Tensors as a program that is not mt stores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo


class ExternalTensors(Protocol):
    """Tensors under external names, read one at a time."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> Tensor:
        """The tensor on CPU, in memory of its own. Raises CheckpointError when its file is damaged."""
        ...
