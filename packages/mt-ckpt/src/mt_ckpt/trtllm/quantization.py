"""Quantized linear layers of TensorRT-LLM checkpoints: names, shapes and dtypes as its convert_checkpoint and ModelOpt
write them, and the order in which kernels of integer weights and 16-bit inputs read their weights.

The order depends on the GPU: the loader of TensorRT-LLM takes int8 weights of weight-only checkpoints as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mt_ckpt.quantized.codes import E4M3_MAX
from mt_ckpt.quantized.grids import Fp8Grid, IntegerGrid, full_range, in_groups
from mt_ckpt.quantized.quantizer import indivisible
from mt_core.errors import ConfigError

TILE = 64
"""Inputs of one output that follow one another where outputs are interleaved."""
ACTIVATION_BITS = 16


@dataclass(frozen=True)
class KernelOrder:
    """permutes: whether inputs are in the order of the tensor cores' fragments, and codes unsigned. interleaves:
    whether tiles of several outputs are next to one another."""

    permutes: bool
    interleaves: bool


ORDERS = {"sm80": KernelOrder(True, True), "sm90": KernelOrder(True, False), "sm100": KernelOrder(False, False)}
"""sm80: Ampere, Ada (sm89) and RTX Blackwell (sm120). sm90: Hopper. sm100: Blackwell of data centres (sm103)."""


def pack_for_kernel(codes: Tensor, bits: int, order: KernelOrder) -> Tensor:
    """Codes [out, in], int8 of `bits`, as the kernels read them: int8 [in, out * bits / 8].

    The shape is only a name for so many bytes: outputs come first, each (or each few, interleaved) with all its inputs.
    """
    out, inputs = codes.shape
    if order.permutes:
        # Fragments: of 128 bits of inputs, taken as [a, 4, 2], the middle axis comes first.
        fragments = codes.unflatten(1, (-1, ACTIVATION_BITS // bits, 4, 2))
        codes = fragments.transpose(2, 3).flatten(1)
    if order.interleaves:
        # [out / n, n, in / TILE, TILE] -> tiles of n outputs in turn
        tiles = codes.unflatten(0, (-1, ACTIVATION_BITS // bits)).unflatten(2, (-1, TILE))
        codes = tiles.transpose(1, 2)
    flat = codes.reshape(-1)
    if order.permutes:
        flat = _interleaved_registers(flat, bits) + (1 << bits - 1)
    stored = flat.view(torch.uint8) & (1 << bits) - 1
    if bits == 4:
        stored = stored[0::2] | stored[1::2] << 4
    return stored.view(torch.int8).reshape(inputs, out * bits // 8)


def _interleaved_registers(flat: Tensor, bits: int) -> Tensor:
    """Codes of each 32 bits, those at even places before those at odd ones."""
    return flat.unflatten(0, (-1, 32 // bits // 2, 2)).transpose(1, 2).flatten()


Encoded = dict[str, list[Tensor]]
"""Name within the layer, such as per_channel_scale -> what each tensor-parallel rank has of it."""


@dataclass(frozen=True)
class Linear:
    """What each rank has of a weight, [out, in]. cut_inputs: whether ranks have parts of the inputs, and of one output
    all together. input_scale: one number, of inputs in FP8; None: not known."""

    parts: Sequence[Tensor]
    cut_inputs: bool
    input_scale: float | None = None


class LinearScheme(Protocol):
    @property
    def algorithm(self) -> str:
        """`quantization.quant_algo` of config.json."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """Other keys of `quantization` that are not their defaults."""
        ...

    @property
    def needs_input_scales(self) -> bool: ...

    @property
    def rms_norm_only(self) -> bool:
        """Whether its kernels take the inputs of a matrix from an RMSNorm."""
        ...

    def objection(self, shape: tuple[int, ...]) -> str | None:
        """Why what a rank has of a weight cannot be quantized; None: it can."""
        ...

    def encode(self, linear: Linear) -> Encoded:
        """The layer's tensors, also of weights on the meta device."""
        ...


class _Defaults:
    settings: Mapping[str, Any] = {}
    needs_input_scales = False
    rms_norm_only = False

    def objection(self, shape: tuple[int, ...]) -> str | None:
        return None


@dataclass(frozen=True)
class WeightOnly(_Defaults):
    """int8 or int4 with a scale for each output, in the order of the kernels."""

    bits: int
    order: KernelOrder

    @property
    def algorithm(self) -> str:
        return f"W{self.bits}A16"

    def objection(self, shape: tuple[int, ...]) -> str | None:
        # The layers pad otherwise, and expect padded weights.
        return indivisible(shape, rows=TILE, columns=TILE)

    def encode(self, linear: Linear) -> Encoded:
        half = 1 << self.bits - 1
        encoded: Encoded = {"weight": [], "per_channel_scale": []}
        for part in linear.parts:
            # Codes are of the scale before it is rounded to the model's dtype, as TensorRT-LLM's own are.
            scale = part.float().abs().amax(1) / half
            codes = (part.float() / _nonzero(scale)[:, None]).round_().clamp_(-half, half - 1).to(torch.int8)
            encoded["weight"].append(pack_for_kernel(codes, self.bits, self.order))
            encoded["per_channel_scale"].append(scale.to(part.dtype))
        return encoded


@dataclass(frozen=True)
class Awq(_Defaults):
    """int4 in groups of inputs, two outputs in a byte; the loader brings it into the order of its kernels."""

    group: int
    algorithm: str = "W4A16_AWQ"

    @property
    def settings(self) -> Mapping[str, Any]:  # type: ignore[override]
        # Factors of inputs are folded into the layers before, so that there is no pre_quant_scale.
        return {"group_size": self.group}

    def objection(self, shape: tuple[int, ...]) -> str | None:
        multiple = max(TILE, self.group)
        return indivisible(shape, rows=multiple, columns=multiple)

    def encode(self, linear: Linear) -> Encoded:
        grid = IntegerGrid(4, self.group)
        encoded: Encoded = {"weight": [], "weights_scaling_factor": []}
        for part in linear.parts:
            groups = in_groups(part.float(), self.group)
            scales = full_range(grid, groups, part.dtype, 0.0)
            codes = grid.codes(groups, scales).flatten(1).view(torch.uint8)
            # int8 [out / 2, in]: its loader takes int8 and no uint8 for packed.
            packed = codes[0::2] & 15 | codes[1::2] << 4
            encoded["weight"].append(packed.view(torch.int8))
            encoded["weights_scaling_factor"].append(scales.scale)
        return encoded


@dataclass(frozen=True)
class SmoothQuant(_Defaults):
    """int8 with a scale for each output; inputs are rounded token by token. Factors of inputs are 1 where the layers
    have them: those that calibration has found are folded into the layers before."""

    algorithm: str = "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"

    def encode(self, linear: Linear) -> Encoded:
        grid, largest = IntegerGrid(8, None), _largest_of_outputs(linear)
        encoded: Encoded = {"weight": [], "per_channel_scale": []}
        for part, most in zip(linear.parts, largest, strict=True):
            scales = grid.scales(-most[:, None], most[:, None], torch.float32, 0.0)
            encoded["weight"].append(grid.codes(part.float()[:, None], scales)[:, 0])
            encoded["per_channel_scale"].append(scales.scale.reshape(1, -1))
        if linear.cut_inputs:
            encoded["smoother"] = [torch.ones(1, part.shape[1], device=part.device) for part in linear.parts]
        return encoded


@dataclass(frozen=True)
class Fp8Rows(_Defaults):
    """e4m3 with a scale for each output; inputs are rounded token by token."""

    algorithm: str = "FP8_PER_CHANNEL_PER_TOKEN"
    rms_norm_only: bool = True

    def encode(self, linear: Linear) -> Encoded:
        grid = Fp8Grid(None)
        encoded: Encoded = {"weight": [], "per_channel_scale": []}
        for part, most in zip(linear.parts, _largest_of_outputs(linear), strict=True):
            scales = grid.scales(-most[:, None], most[:, None], torch.float32, 0.0)
            encoded["weight"].append(grid.codes(part.float()[:, None], scales)[:, 0])
            encoded["per_channel_scale"].append(scales.scale[:, 0])
        return encoded


@dataclass(frozen=True)
class Fp8(_Defaults):
    """e4m3 with a scale for the matrix and one for its inputs, which the source has from its calibration."""

    algorithm: str = "FP8"
    needs_input_scales: bool = True

    def encode(self, linear: Linear) -> Encoded:
        # Of all ranks together, as the engine may join layers.
        most = torch.stack([part.float().abs().amax() for part in linear.parts]).amax()
        scale = _nonzero(most / E4M3_MAX)
        weights = [(part.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn) for part in linear.parts]
        input_scale = torch.full((1,), linear.input_scale or 1.0, device=scale.device)
        number = len(weights)
        return {
            "weight": weights,
            "weights_scaling_factor": [scale.reshape(1)] * number,
            "activation_scaling_factor": [input_scale] * number,
        }


def _largest_of_outputs(linear: Linear) -> list[Tensor]:
    """[out] of each rank: magnitudes of whole rows, also where a rank has a part of them."""
    each = [part.float().abs().amax(1) for part in linear.parts]
    return [torch.stack(each).amax(0)] * len(each) if linear.cut_inputs else each


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))


# -- schemes ------------------------------------------------------------------------------------------

KV_CACHE, KV_SUFFIX = "kv8", "-kv8"
GROUP = 128
AWQ = re.compile("awq(?:-g([0-9]+))?")
FIXED: Mapping[str, LinearScheme] = {
    "fp8": Fp8Rows(),
    "fp8-static": Fp8(),
    "int8": SmoothQuant(),
    **{f"w{bits}a16": WeightOnly(bits, ORDERS["sm80"]) for bits in (8, 4)},
    **{f"w{bits}a16-{name}": WeightOnly(bits, order) for bits in (8, 4) for name, order in ORDERS.items()},
}


@dataclass(frozen=True)
class Quantization:
    """What --quantize asks for. linear: None leaves weights as they are. kv_cache: whether keys and values are kept in
    FP8."""

    name: str
    linear: LinearScheme | None = None
    kv_cache: bool = False

    def settings(self) -> dict[str, Any]:
        """`quantization` of config.json."""
        algorithm = None if self.linear is None else self.linear.algorithm
        chosen = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8" if self.kv_cache else None}
        return {**chosen, **(DEFAULTS if self.linear else {}), **(self.linear.settings if self.linear else {})}


DEFAULTS: Mapping[str, Any] = {
    "group_size": GROUP,
    "smoothquant_val": 0.5,
    "clamp_val": None,
    "use_meta_recipe": False,
    "has_zero_point": False,
    "pre_quant_scale": False,
    # null: embeddings, the LM head and routers, and the last norm where norms round.
    "exclude_modules": None,
}
NOT_QUANTIZED = Quantization("")


def quantization_named(name: str) -> Quantization:
    """Raises ConfigError for a scheme that is not known."""
    if name == KV_CACHE:
        return Quantization(name, None, True)
    scheme = name.removesuffix(KV_SUFFIX)
    if match := AWQ.fullmatch(scheme):
        linear: LinearScheme | None = Awq(int(match[1] or GROUP))
    else:
        linear = FIXED.get(scheme)
    if linear is None:
        raise ConfigError(
            f"--quantize {name}: not a scheme of TensorRT-LLM's checkpoints; it can be {', '.join(FIXED)}, awq, awq "
            f"followed by the size of its groups, such as awq-g64, each with {KV_SUFFIX} behind it for a key-value "
            f"cache in FP8, and {KV_CACHE} for that alone"
        )
    return Quantization(name, linear, name != scheme)
