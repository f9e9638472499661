"""Files of torch.save that hold named tensors and nothing else, as `pytorch_model.bin` does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mt_ckpt.pickles.torch_file import StoredTensor, open_torch_file
from mt_ckpt.safetensors_files import TensorInfo
from mt_core.errors import CheckpointError
from mt_core.paths import is_remote


class TorchFile:
    """A file whose content is a dictionary of tensors, which are read one at a time; nothing in it is executed.

    Raises CheckpointError for a file that is damaged, names code, or holds anything else.
    """

    def __init__(self, file: Path) -> None:
        if is_remote(file):
            raise CheckpointError(f"{file}: files of torch.save are read from disks only; copy the checkpoint to one")
        self._stored = _only_tensors(file, open_torch_file(file).value)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(stored.shape, stored.dtype) for name, stored in self._stored.items()}

    def same_storage(self, first: str, second: str) -> bool:
        """Whether two tensors are both there and are the same elements of one storage."""
        # Both tensors are equal StoredTensor values: the same bytes of the same file, shape and stride.
        return first in self._stored and self._stored[first] == self._stored.get(second)

    def read(self, name: str) -> Tensor:
        """One tensor on CPU, contiguous, in memory of its own."""
        return self._stored[name].read()


def _only_tensors(file: Path, content: Any) -> dict[str, StoredTensor]:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{file}: holds a {type(content).__name__}, expected named tensors")
    for name, value in content.items():
        if not isinstance(value, StoredTensor):
            kind = type(value).__name__
            raise CheckpointError(f"{file}: {name} is a {kind}, expected named tensors and nothing else")
    return dict(content)
