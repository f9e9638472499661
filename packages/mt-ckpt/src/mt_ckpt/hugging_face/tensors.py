"""The tensors of a model as Hugging Face and its relatives store them: under external names, in one or many files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from mt_ckpt.safetensors_files import TensorInfo
from mt_core.errors import CheckpointError


class ExternalTensors(Protocol):
    """Tensors under external names, read one at a time."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> Tensor:
        """The tensor on CPU, in memory of its own. Raises CheckpointError when its file is damaged."""
        ...


class TensorFile(Protocol):
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> Tensor: ...


class TensorFiles:
    """The tensors of several files together."""

    def __init__(self, files: Iterable[TensorFile]) -> None:
        self._file_of: dict[str, TensorFile] = {}
        infos: dict[str, TensorInfo] = {}
        for file in files:
            for name, info in file.tensors.items():
                if name in infos:
                    raise CheckpointError(f"tensor {name} is in two files")
                infos[name], self._file_of[name] = info, file
        self.infos: Mapping[str, TensorInfo] = infos

    def read(self, name: str) -> Tensor:
        return self._file_of[name].read(name)


class Renamed:
    """Other names for the same tensors. `names`: the new name -> the old one."""

    def __init__(self, tensors: ExternalTensors, names: Mapping[str, str]) -> None:
        self._tensors, self._names = tensors, names
        self.infos = {new: tensors.infos[old] for new, old in names.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors.read(self._names[name])
