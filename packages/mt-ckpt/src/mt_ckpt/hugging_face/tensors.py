"""The tensors of a model as Hugging Face and its relatives store them: under external names, in one or many files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mt_ckpt.files.external_tensors import ExternalTensors
from mt_ckpt.files.safetensors import TensorInfo
from mt_core.errors import CheckpointError


class TensorFile(Protocol):
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> Tensor: ...


class TensorFiles:
    """The tensors of several files together."""

    def __init__(self, files: Iterable[TensorFile]) -> None:
        self._file_of: dict[str, TensorFile] = {}
        self.metadata: dict[str, str] = {}
        """What the headers of safetensors files say beside their tensors, of all files together."""
        infos: dict[str, TensorInfo] = {}
        for file in files:
            self.metadata.update(getattr(file, "metadata", {}))
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


def with_elements(tensors: ExternalTensors) -> ExternalTensors:
    """The same without tensors that have no elements, which transformers writes for a layer of width 0, such as the
    shared experts of a model that has none: they add nothing to what is computed."""
    names = {name: name for name, info in tensors.infos.items() if 0 not in info.shape}
    return tensors if len(names) == len(tensors.infos) else Renamed(tensors, names)


# -- shapes that the rules of a name map give, by carrying them out on tensors without values -----------


def infer(function: Callable[[list[Tensor]], Sequence[Tensor]], inputs: Sequence[TensorInfo]) -> list[TensorInfo]:
    """Shapes and dtypes of what `function` makes of tensors of the given ones. Raises what torch raises."""
    empty = [torch.empty(info.shape, dtype=info.dtype, device="meta") for info in inputs]
    with _LightJoining():
        outputs = function(empty)
    return [TensorInfo(tuple(tensor.shape), tensor.dtype) for tensor in outputs]


class _LightJoining(TorchFunctionMode):
    """torch.cat and torch.stack of tensors without values, which in torch import its compiler: seconds and 200 MB."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Other functions are the meta device's own.
        if func is torch.cat:
            func = _concatenated
        elif func is torch.stack:
            func = _stacked
        return func(*args, **(kwargs or {}))


def _concatenated(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = tensors[0]
    dim %= first.ndim
    # Equal in all but the joined dimension.
    _require_same((x.dtype, *x.shape[:dim], -1, *x.shape[dim:][1:]) for x in tensors)
    size = sum(x.shape[dim] for x in tensors)
    return first.new_empty([*first.shape[:dim], size, *first.shape[dim:][1:]])


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = tensors[0]
    dim %= first.ndim + 1
    _require_same((x.dtype, *x.shape) for x in tensors)
    return first.new_empty([*first.shape[:dim], len(tensors), *first.shape[dim:]])


def _require_same(kinds: Iterable[tuple[Any, ...]]) -> None:
    """Raises RuntimeError, as torch does, for tensors that cannot be joined."""
    if len(distinct := set(kinds)) > 1:
        raise RuntimeError(f"tensors of the kinds {sorted(distinct, key=str)} cannot be joined")
