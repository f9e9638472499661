"""Quantized weights are read as the values that their formats define, and refused where their parts do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ckpt.quantized import packers
from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.quantized import weights
from mt_ckpt.quantized.codes import decode_e2m1, encode_e2m1, pack_bits, unpack_bits
from mt_ckpt.quantized.methods import dequantized
from mt_core.errors import CheckpointError, ConfigError


class Stored:
    """Tensors in memory (an ExternalTensors)."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.infos = {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def ct(layout: str, targets: list[str] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": targets or ["Linear"], "weights": {"type": "int", **weights}}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    return {"quantization_config": {**config, "ignore": ["lm_head"]}}


def method(name: str, **keys: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": name, **keys}}


FP8 = method("fp8", weight_block_size=[16, 8])
GPTQ = method("gptq", bits=4, group_size=16)
GROUPS = {"strategy": "group", "group_size": 16}
W4 = ct("pack-quantized", num_bits=4, **GROUPS)
NVFP4 = ct("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
MODELOPT = {"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4"}}}
CASES: dict[str, tuple[dict[str, Any], packers.Packed]] = {
    "fp8": (FP8, packers.fp8_blocks(32, 24, (16, 8))),
    "fp8, cut blocks": (FP8, packers.fp8_blocks(37, 27, (16, 8))),
    "fp8, exponents": (FP8, packers.fp8_blocks(37, 27, (16, 8), exponents=torch.float8_e8m0fnu)),
    "fp8, exponents as uint8": (FP8, packers.fp8_blocks(20, 8, (16, 8), exponents=torch.uint8)),
    **{
        f"gptq, {bits} bits": (
            method("gptq", bits=bits, group_size=16),
            packers.gptq(32, 64, bits, 16, version=1, ordered=True),
        )
        for bits in (2, 3, 4, 8)
    },
    "gptq_v2, groups in any order": (
        method("gptq", bits=4, group_size=16, checkpoint_format="gptq_v2", desc_act=True),
        packers.gptq(16, 32, 4, 16, version=2, ordered=False),
    ),
    "awq": (method("awq", bits=4, group_size=16, version="gemm"), packers.awq(24, 32, 16)),
    **{
        f"pack-quantized, {bits} bits": (
            ct("pack-quantized", num_bits=bits, **GROUPS),
            packers.pack_quantized(9, 48, bits, 16, zeros=False),
        )
        for bits in (2, 3, 4, 5, 8)
    },
    "pack-quantized, 3 bits as earlier": (
        ct("pack-quantized", num_bits=3, **GROUPS),
        packers.pack_quantized(9, 96, 3, 16, zeros=False, in_words=True),
    ),
    "pack-quantized, zero points": (
        ct("pack-quantized", num_bits=4, symmetric=False, **GROUPS),
        packers.pack_quantized(9, 32, 4, 16, zeros=True),
    ),
    "pack-quantized, groups in any order": (
        ct("pack-quantized", num_bits=4, actorder="group", **GROUPS),
        packers.pack_quantized(9, 32, 4, 16, zeros=False, order=True),
    ),
    "nvfp4 of compressed-tensors": (NVFP4, packers.nvfp4(6, 32, inverse=True)),
    "nvfp4 of ModelOpt": (MODELOPT, packers.nvfp4(6, 32, inverse=False)),
    "bitsandbytes": (method("bitsandbytes", load_in_4bit=True), packers.nested_nf4(7, 33)),
    **{
        f"mlx, {bits} bits": ({"quantization": {"bits": bits, "group_size": 32}}, packers.mlx_affine(5, 64, bits, 32))
        for bits in (3, 4, 8)
    },
}


def stored(parts: dict[str, Tensor], module: str = "a.b") -> Stored:
    return Stored({f"{module}.{name}": part for name, part in parts.items()})


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("slice_elements", [weights.SLICE, 100])
def test_the_values_are_those_of_the_format(name: str, slice_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one go, and a few rows at a time."""
    for module in (weights, *(sys_modules := _modules_with_slices())):
        monkeypatch.setattr(module, "SLICE", slice_elements)
    assert sys_modules
    external, (parts, values) = CASES[name]
    tensors, plain = dequantized(stored(parts), external)
    assert list(tensors.infos) == ["a.b.weight"]
    assert tensors.infos["a.b.weight"] == TensorInfo(tuple(values.shape), values.dtype)
    assert torch.equal(tensors.read("a.b.weight"), values)
    assert plain == {}


def _modules_with_slices() -> list[Any]:
    from mt_ckpt.quantized import bitsandbytes, gptq

    return [bitsandbytes, gptq]


def test_packed_codes_come_back() -> None:
    for bits in range(1, 9):
        codes = torch.randint(0, 1 << bits, (3, 45), dtype=torch.uint8)
        packed = pack_bits(codes, bits)
        assert packed.shape == (3, -(-45 * bits // 32))
        assert torch.equal(unpack_bits(packed, bits, 45), codes)


def test_ties_are_rounded_to_even_codes() -> None:
    values = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -7.0]
    )
    expected = torch.tensor([0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    assert torch.equal(decode_e2m1(encode_e2m1(values)), torch.cat((expected, -expected)))


def test_a_group_is_found_by_name_then_pattern_then_class() -> None:
    parts, _ = packers.pack_quantized(8, 32, 4, 16, zeros=False)
    config = W4["quantization_config"]
    wrong = {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 8, "strategy": "group", "group_size": 32}}
    right = {"targets": [r"re:a\..*"], "weights": {"type": "int", "num_bits": 4, **GROUPS}}
    groups = {"config_groups": {"group_0": wrong, "group_1": right}}
    tensors, _ = dequantized(stored(parts), {"quantization_config": {**config, **groups}})
    assert tensors.infos["a.b.weight"].shape == (8, 32)


def test_what_the_model_does_not_compute_with_is_left_out() -> None:
    parts, values = packers.nvfp4(6, 32, inverse=True)
    scales = {"input_global_scale": torch.ones(1), "k_scale": torch.ones(1)}
    tensors, _ = dequantized(stored({**parts, **scales}), NVFP4)
    assert list(tensors.infos) == ["a.b.weight"]
    assert torch.equal(tensors.read("a.b.weight"), values)


def test_scales_of_inputs_are_merged_into_the_weight() -> None:
    parts, values = packers.nvfp4(6, 32, inverse=False)
    inputs = torch.rand(32) + 0.5
    tensors, _ = dequantized(stored({**parts, "pre_quant_scale": inputs}), MODELOPT)
    assert torch.allclose(tensors.read("a.b.weight").float(), values.float() * inputs, rtol=1e-2)


def test_rules_of_gptq_give_modules_bits_of_their_own() -> None:
    parts, values = packers.gptq(32, 64, 8, 32, version=1, ordered=True)
    config = method("gptq", bits=4, group_size=16, dynamic={"+:a\\..*": {"bits": 8, "group_size": 32}, "-:lm_head": {}})
    tensors, _ = dequantized(stored(parts), config)
    assert torch.equal(tensors.read("a.b.weight"), values)


def test_mlx_gives_modules_settings_of_their_own() -> None:
    parts, values = packers.mlx_affine(5, 64, 8, 32)
    config = {"quantization": {"bits": 4, "group_size": 64, "a.b": {"bits": 8, "group_size": 32}, "gate": False}}
    tensors, _ = dequantized(stored(parts), config)
    assert torch.equal(tensors.read("a.b.weight"), values)


# -- refused ---------------------------------------------------------------------------------------------------


def without(name: str, role: str) -> dict[str, Tensor]:
    return {key: value for key, value in CASES[name][1][0].items() if key != role}


def changed(name: str, role: str, value: Any) -> dict[str, Tensor]:
    parts = dict(CASES[name][1][0])
    parts[role] = value(parts[role])
    return parts


def with_nan(scale: Tensor) -> Tensor:
    flat = scale.float().flatten().clone()
    flat[-1] = float("nan")
    return flat.reshape(scale.shape).to(scale.dtype)


MISSING = [
    ("fp8", "weight_scale_inv", "a.b.weight is quantized, but a.b.weight_scale_inv is missing"),
    ("fp8", "weight", "a.b.weight_scale_inv is the scale of a.b.weight, which is missing"),
    ("pack-quantized, zero points", "weight_zero_point", "a.b.weight_zero_point is missing"),
    ("nvfp4 of compressed-tensors", "weight_global_scale", "a.b.weight_global_scale is missing"),
    ("nvfp4 of ModelOpt", "weight_scale_2", "a.b.weight_scale_2 is missing"),
    ("gptq, 4 bits", "scales", "a.b.scales is missing"),
    ("bitsandbytes", "weight.absmax", "a.b.weight.absmax is missing"),
    ("mlx, 4 bits", "biases", "a.b.biases is missing"),
]


def test_awq_with_zero_points_needs_them() -> None:
    config = {"quantization_config": {**CASES["awq"][0]["quantization_config"], "zero_point": True}}
    with pytest.raises(CheckpointError, match=r"a\.b is quantized, but a\.b\.qzeros is missing"):
        dequantized(stored(without("awq", "qzeros")), config)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_without_a_scale_are_refused(dtype: torch.dtype) -> None:
    """compressed-tensors finds its weights by their scales."""
    external = next(external for name, (external, _) in CASES.items() if name == "nvfp4 of compressed-tensors")
    parts = {**CASES["nvfp4 of compressed-tensors"][1][0], "a.c.weight": torch.ones(4, 32).to(dtype)}
    with pytest.raises(CheckpointError, match=r"a\.c\.weight is .*, but the checkpoint has no scale for it"):
        dequantized(stored(parts), external)


@pytest.mark.parametrize(("name", "role", "message"), MISSING)
def test_a_missing_part_is_named(name: str, role: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        dequantized(stored(without(name, role)), CASES[name][0])


MISSHAPEN = [
    ("fp8", "weight_scale_inv", lambda scale: scale.T.contiguous(), r"shape \[3, 2\]; for .* it is \[2, 3\]"),
    ("fp8", "weight_scale_inv", lambda scale: scale.to(torch.int32), "is int32; this format has float32"),
    ("pack-quantized, 4 bits", "weight_scale", lambda scale: scale[:, :1], r"shape \[9, 1\]; for .* it is \[9, 3\]"),
    ("pack-quantized, 4 bits", "weight_shape", lambda shape: shape.flip(0), r"says \[48, 9\]"),
    (
        "pack-quantized, zero points",
        "weight_zero_point",
        lambda zeros: zeros.long(),
        "zero_point is int64; this format",
    ),
    (
        "nvfp4 of compressed-tensors",
        "weight_global_scale",
        lambda scale: scale.int(),
        "global_scale is int32; this format",
    ),
    ("nvfp4 of ModelOpt", "weight_scale", lambda scale: scale[:3], r"shape \[3, 2\]"),
    ("gptq, 4 bits", "qzeros", lambda zeros: zeros[:, :-1], "a.b.qzeros has the shape"),
    ("gptq, 4 bits", "qweight", lambda codes: codes.flatten(), "a.b.qweight has the shape"),
    ("awq", "qweight", lambda codes: codes.flatten(), "a.b.qweight has the shape"),
    ("awq", "scales", lambda scale: scale.T.contiguous(), "a.b.scales has the shape"),
    ("mlx, 4 bits", "scales", lambda scale: scale[:1], "a.b.scales has the shape"),
    ("mlx, 4 bits", "biases", lambda bias: bias.int(), "a.b.biases is int32; this format has float16"),
    ("bitsandbytes", "weight.absmax", lambda largest: largest[1:], "a.b.weight.absmax has the shape"),
]


@pytest.mark.parametrize(("name", "role", "change", "message"), MISSHAPEN)
def test_a_part_of_another_shape_or_dtype_is_refused(name: str, role: str, change: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        dequantized(stored(changed(name, role, change)), CASES[name][0])


BAD_SCALES = [
    ("fp8", "weight_scale_inv", with_nan, "not finite"),
    ("fp8", "weight_scale_inv", lambda scale: -scale, "a scale of -"),
    ("fp8", "weight_scale_inv", lambda scale: scale * 0, "a scale of 0; scales of this format are positive"),
    ("fp8, exponents as uint8", "weight_scale_inv", lambda scale: scale | 255, "not finite"),
    ("pack-quantized, 4 bits", "weight_scale", with_nan, "not finite"),
    ("gptq, 4 bits", "scales", lambda scale: -scale, "a.b.scales: has a scale of -"),
    ("nvfp4 of compressed-tensors", "weight_global_scale", lambda scale: 1 / scale, "the inverse of what nvfp4"),
    ("nvfp4 of ModelOpt", "weight_scale_2", lambda scale: 1 / scale, "the inverse of what nvfp4"),
    ("mlx, 4 bits", "biases", with_nan, "a.b.biases: has scales that are not finite"),
]


@pytest.mark.parametrize(("name", "role", "change", "message"), BAD_SCALES)
def test_scales_that_are_none_are_refused_before_and_while_weights_are_read(
    name: str, role: str, change: Any, message: str
) -> None:
    tensors, _ = dequantized(stored(changed(name, role, change)), CASES[name][0])
    assert isinstance(tensors, weights.DequantizedTensors)
    with pytest.raises(CheckpointError, match=message):
        tensors.require_scales()
    with pytest.raises(CheckpointError, match=message):
        tensors.read("a.b.weight")


REFUSED = [
    (method("hqq"), "quant_method='hqq' is not supported; it can be awq"),
    (method("fp8", fmt="e5m2"), "fmt='e5m2'"),
    (method("gptq", bits=4, checkpoint_format="marlin"), "checkpoint_format='marlin'"),
    (method("gptq", bits=5), "bits=5 of GPTQ"),
    (method("awq", version="gemv"), "version='gemv' of AWQ"),
    (method("modelopt", quant_algo="W4A16_AWQ"), "quant_algo='W4A16_AWQ'"),
    (ct("marlin-24", num_bits=4), "'marlin-24' of sparse matrices"),
    (ct("pack-quantized", num_bits=4, strategy="token"), "strategy='token'"),
    (ct("unheard-of", num_bits=4), "format='unheard-of' is not known; it can be pack-quantized"),
    ({"quantization": {"bits": 7, "group_size": 64}}, "quantization.bits=7 of MLX"),
]


@pytest.mark.parametrize(("external", "message"), REFUSED)
def test_an_unknown_kind_is_refused_by_name(external: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dequantized(Stored({}), external)


def test_quantized_modules_that_no_group_is_for_are_refused() -> None:
    parts, _ = packers.pack_quantized(8, 32, 4, 16, zeros=False)
    with pytest.raises(CheckpointError, match="lm_head is quantized, but quantization_config.ignore names it"):
        dequantized(stored(parts, "lm_head"), W4)
    with pytest.raises(CheckpointError, match="no group of quantization_config.config_groups is for it"):
        dequantized(stored(parts), ct("pack-quantized", ["re:c.*"], num_bits=4, **GROUPS))


def test_a_weight_that_is_there_twice_is_refused() -> None:
    parts, values = packers.pack_quantized(8, 32, 4, 16, zeros=False)
    with pytest.raises(CheckpointError, match="a.b.weight is in the checkpoint twice"):
        dequantized(stored({**parts, "weight": values}), W4)
