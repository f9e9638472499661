"""External tensors of which the matrices of linear layers are quantized on the way to their file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.hugging_face.outputs import Outputs
from mt_ckpt.quantized.calibrated import CalibratedWeight, CalibratedWeights
from mt_ckpt.quantized.mxfp4_experts import BLOCKS, SCALES
from mt_ckpt.quantized.quantizer import Quantizer, encode, largest_of, pack_weight
from mt_ckpt.quantized.write_compressed_tensors import PACKED, SCALE, MxQuantizer
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
            why += "; mxfp4-experts is how GPT-OSS has them" if "experts are in one" in why else ""
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


# -- the experts of GPT-OSS in MXFP4, as its published files have them ------------------------------
#
# `X_blocks` [E, out, in / 32, 16] and `X_scales` [E, out, in / 32], both uint8, stand for the matrices X [E, in, out]:
# two numbers of E2M1 a byte, the first in the low bits, and an exponent (E8M0) for 32. What was in MXFP4 before is so
# again without a loss: every number of a block is one of the grid by its new exponent, too.

MXFP4_EXPERTS = "mxfp4-experts"
STACKED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
MX_GROUP = 32
NOT_CONVERTED = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
"""What the published configuration names as not converted."""


class Mxfp4Experts:
    """What `Outputs` is, with blocks and scales in the place of experts."""

    def __init__(self, outputs: Outputs) -> None:
        """Raises ConfigError for a model without such experts, and for sizes that blocks do not divide."""
        self._outputs = outputs
        experts = [name for name in outputs.infos if name.endswith(STACKED) and len(outputs.infos[name].shape) == 3]
        if not experts:
            raise ConfigError(
                f"--quantize {MXFP4_EXPERTS} is for models whose experts are in one tensor, as those of GPT-OSS; "
                "mxfp4 is for others"
            )
        self._weight_of: dict[str, str] = {}
        infos: dict[str, TensorInfo] = {}
        for name, info in outputs.infos.items():
            parts = _expert_parts(name, info) if name in experts else {name: info}
            infos |= parts
            self._weight_of |= dict.fromkeys(parts, name)
        self.infos: Mapping[str, TensorInfo] = infos
        self.settings: Mapping[str, Any] = {
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": list(NOT_CONVERTED)}
        }

    def made_of(self, name: str) -> str:
        return self._outputs.made_of(self._weight_of[name])

    def values(self, names: Iterable[str]) -> Iterator[Tensor]:
        """The tensors `names` in their order. Blocks and scales of one weight that follow one another are made once."""
        weight, parts = "", dict[str, Tensor]()
        for name in names:
            if self._weight_of[name] != weight:
                parts = {}  # before the next is read
                weight = self._weight_of[name]
                matrices = self._outputs.parts_of(self._outputs.made_of(weight))[weight]
                parts = {weight: matrices} if name == weight else encoded_experts(weight, matrices)
            yield parts[name]


def _expert_parts(name: str, info: TensorInfo) -> dict[str, TensorInfo]:
    experts, columns, rows = info.shape
    if columns % MX_GROUP:
        raise ConfigError(
            f"--quantize {MXFP4_EXPERTS}: {name} has {columns} inputs, which are no multiple of {MX_GROUP}"
        )
    groups = (experts, rows, columns // MX_GROUP)
    return {
        name + BLOCKS: TensorInfo((*groups, MX_GROUP // 2), torch.uint8),
        name + SCALES: TensorInfo(groups, torch.uint8),
    }


def encoded_experts(name: str, matrices: Tensor) -> dict[str, Tensor]:
    """matrices: [E, in, out]"""
    encoded = {
        part: torch.empty(info.shape, dtype=info.dtype) for part, info in _expert_parts(name, _info(matrices)).items()
    }
    quantizer = MxQuantizer(MXFP4_EXPERTS, 4)
    for expert, matrix in enumerate(matrices):  # what is made on the way is one expert's
        parts = encode(quantizer, matrix.t().contiguous())
        encoded[name + BLOCKS][expert].copy_(parts[PACKED].view_as(encoded[name + BLOCKS][expert]))
        encoded[name + SCALES][expert].copy_(parts[SCALE])
    return encoded


def _info(tensor: Tensor) -> TensorInfo:
    return TensorInfo(tuple(tensor.shape), tensor.dtype)
