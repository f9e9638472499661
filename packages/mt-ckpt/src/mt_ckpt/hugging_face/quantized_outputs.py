"""External tensors of which the matrices of linear layers are quantized on the way to their file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.hugging_face.outputs import Outputs
from mt_ckpt.quantized.calibrated import CalibratedWeight, CalibratedWeights
from mt_ckpt.quantized.quantizer import Quantizer, encode, largest_of, pack_weight
from mt_core.errors import ConfigError

LINEAR, WEIGHT = "linear_", ".weight"
TABLES = ("embed", "wte", "wpe", "norm", "conv")
"""Parts of names of modules that are no linear layers, and that no reader quantizes."""
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
KEPT_BYTES = 64 << 20
"""Small parts that are kept until their place in the file comes."""


class QuantizedOutputs:
    """What `Outputs` is, with parts of quantized weights in the place of these."""

    def __init__(self, outputs: Outputs, quantizer: Quantizer, calibrated: CalibratedWeights | None = None) -> None:
        """calibrated: codes and scales of all matrices that are quantized; None: weights are rounded here.

        Raises ConfigError for a model whose matrices the scheme cannot hold.
        """
        self._outputs, self._quantizer, self._calibrated = outputs, quantizer, calibrated
        chosen = [name for name in outputs.infos if self._is_chosen(name)]
        if not chosen:
            raise ConfigError(f"--quantize {quantizer.name}: the model has no linear layers that it could be for")
        self.left = sorted({*_left(outputs, chosen), "lm_head"})
        """Modules with a matrix that stay as they are; lm_head may be one that the files do not have."""
        infos: dict[str, TensorInfo] = {}
        self._weight_of: dict[str, str] = {}
        for name, info in outputs.infos.items():
            parts = _named(name, quantizer.parts(info)) if name in chosen else {name: info}
            infos |= parts
            self._weight_of |= dict.fromkeys(parts, name)
        self.infos: Mapping[str, TensorInfo] = infos
        self._quantized = frozenset(chosen)

    def _is_chosen(self, name: str) -> bool:
        ours, info = self._outputs.made_of(name), self._outputs.infos[name]
        if not is_linear_weight(ours):
            return False
        why = "experts are in one tensor there" if len(info.shape) != 2 else self._quantizer.objection(info.shape)
        if self._outputs.is_transposed(name):
            why = "it is stored [in, out] there, by a class that is no linear layer"
        if why is None and not name.endswith(WEIGHT):
            why = "its name does not end with weight"
        if why is not None:
            hint = "; schemes with groups take their size, such as w4a16-g32" if "multiple" in why else ""
            raise ConfigError(f"--quantize {self._quantizer.name}: {name} cannot be quantized: {why}{hint}")
        return True

    def made_of(self, name: str) -> str:
        return self._outputs.made_of(self._weight_of[name])

    def values(self, names: Iterable[str]) -> Iterator[Tensor]:
        """The tensors `names` in their order. Files have larger elements first, so that parts of a weight are apart:
        small ones are kept, others are made again."""
        kept: dict[str, Tensor] = {}
        ours: str | None = None
        tensors: Mapping[str, Tensor] = {}
        names = list(names)
        due = set(names)
        for name in names:
            due.discard(name)
            if name in kept:
                yield kept.pop(name)
                continue
            weight = self._weight_of[name]
            if self.made_of(name) != ours:
                tensors = {}  # before the next is read
                ours = self.made_of(name)
                is_given = self._calibrated is not None and weight in self._quantized
                tensors = {} if is_given else self._outputs.parts_of(ours)
            if weight not in self._quantized:
                yield tensors[weight]
                continue
            parts = _named(weight, self._encoded(weight, tensors))
            wanted = parts.pop(name)
            room = KEPT_BYTES - sum(tensor.nbytes for tensor in kept.values())
            most = min(room, self._outputs.infos[weight].num_bytes // 8)
            kept |= {key: part for key, part in parts.items() if key in due and part.nbytes <= most}
            del parts
            yield wanted

    def _encoded(self, weight: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._calibrated is None:
            return encode(self._quantizer, tensors[weight].contiguous(), self._largest(weight, tensors))
        ours = self._outputs.made_of(weight)
        chosen = _exported(self._outputs, ours, self._calibrated.read(ours), weight)
        return pack_weight(self._quantizer, chosen.codes, chosen.scales, chosen.largest)

    def _largest(self, weight: str, tensors: Mapping[str, Tensor]) -> float | None:
        """The largest magnitude of the weights that a reader fuses with this one; None: it stands for itself."""
        if not self._quantizer.shares_largest:
            return None
        parent = _parent(weight)
        return max(largest_of(tensor) for name, tensor in tensors.items() if _parent(name) == parent)


def is_linear_weight(ours: str) -> bool:
    """Whether a canonical tensor is the matrix of a linear layer, or those of experts."""
    return ours.endswith(WEIGHT) and ours.split(".")[-2].startswith(LINEAR)


def _exported(outputs: Outputs, ours: str, canonical: CalibratedWeight, name: str) -> CalibratedWeight:
    """The rows of a canonical weight, of all experts or fused projections, that an external one consists of."""

    def rows(tensor: Tensor) -> Tensor:
        # As bytes: few operations take float8.
        plain = tensor.view(torch.uint8) if tensor.dtype in FLOAT8 else tensor
        return outputs.rows_of(ours, plain)[name].contiguous().view(tensor.dtype)

    return canonical.mapped(rows)


def _parent(name: str) -> str:
    """The module that holds the layer of a weight."""
    return name.rsplit(".", 2)[0]


def _named(weight: str, parts: Mapping[str, TensorInfo] | Mapping[str, Tensor]) -> dict[str, Any]:
    module = weight.removesuffix(WEIGHT)
    return {f"{module}.{name}": part for name, part in parts.items()}


def _left(outputs: Outputs, chosen: Iterable[str]) -> Iterator[str]:
    taken = set(chosen)
    for name, info in outputs.infos.items():
        module = name.removesuffix(WEIGHT)
        is_matrix = name.endswith(WEIGHT) and len(info.shape) == 2 and name not in taken
        if is_matrix and not any(part in module.rpartition(".")[2] for part in TABLES):
            yield module
