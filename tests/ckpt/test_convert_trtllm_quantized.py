"""Quantized TensorRT-LLM checkpoints: what its layers and kernels make of the files, by formulas of this file alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.ckpt.convert_cases import GPT2

from mt_ckpt.convert import convert
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import CheckpointError, ConfigError

SHAPE = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 101, "ffn_hidden_size": 256}
LLAMA: dict[str, Any] = {"family": "llama", **SHAPE, "num_query_groups": 2, "max_position_embeddings": 64}
GPT: dict[str, Any] = {**GPT2, **SHAPE}
LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def written(make_model, host, tmp_path: Path) -> Callable[..., tuple[dict[str, Any], list[Tensors], list[Tensors]]]:
    """(config.json, quantized tensors of each rank, those of the same conversion without --quantize)"""

    def write(scheme: str, tp: int, keys: dict[str, Any]) -> tuple[dict[str, Any], list[Tensors], list[Tensors]]:
        source = make_model(**keys)
        folders = []
        for quantize in (scheme, None):
            folders.append(tmp_path / f"trt-{quantize}")
            options = ConvertOptions(target_tensor_parallel_size=tp, dtype="bf16", quantize=quantize)
            convert(source, folders[-1], saver="trtllm", options=options, host=host)
        ranks = [[load_file(folder / f"rank{rank}.safetensors") for rank in range(tp)] for folder in folders]
        return json.loads((folders[0] / "config.json").read_text()), ranks[0], ranks[1]

    return write


# -- what the kernels read ----------------------------------------------------------------------------

ROWS = {8: [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]}
ROWS[4] = [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27]
ROWS[4] += [4, 5, 12, 13, 20, 21, 28, 29, 6, 7, 14, 15, 22, 23, 30, 31]
REGISTER = {8: [0, 2, 1, 3], 4: [0, 2, 4, 6, 1, 3, 5, 7]}


def kernel_codes(packed: torch.Tensor, bits: int, layout: str) -> np.ndarray:
    """Codes [out, in] of int8 [in, out * bits / 8], place by place."""
    inputs, out = packed.shape[0], packed.shape[1] * 8 // bits
    data = packed.numpy().view(np.uint8).reshape(-1)
    codes = data if bits == 8 else np.stack([data & 15, data >> 4], 1).reshape(-1)
    n, k = np.meshgrid(np.arange(out), np.arange(inputs), indexing="ij")
    if layout == "sm100":
        found = codes[n * inputs + k].astype(int)
        return np.where(found >= 1 << bits - 1, found - (1 << bits), found)
    fragment = len(ROWS[bits])
    moved = k // fragment * fragment + np.argsort(ROWS[bits])[k % fragment]
    place = n * inputs + moved
    if layout == "sm80":
        together = 16 // bits
        tile = n // together * (inputs // 64) + moved // 64
        place = (tile * together + n % together) * 64 + moved % 64
    register = len(REGISTER[bits])
    place = place // register * register + np.argsort(REGISTER[bits])[place % register]
    return codes[place].astype(int) - (1 << bits - 1)


@pytest.mark.parametrize(
    ("scheme", "tp"), [("w8a16", 2), ("w4a16", 1), ("w4a16-sm90", 2), ("w8a16-sm90", 1), ("w4a16-sm100", 1)]
)
def test_weight_only(written, scheme: str, tp: int) -> None:
    """A rank quantizes its part: the scale of an output is of the inputs that the rank has."""
    config, ranks, plain = written(scheme, tp, LLAMA)
    bits, layout = int(scheme[1]), scheme.partition("-")[2] or "sm80"
    assert config["quantization"]["quant_algo"] == f"W{bits}A16"
    for tensors, whole in zip(ranks, plain, strict=True):
        for layer in range(2):
            for linear in LINEARS:
                name = f"transformer.layers.{layer}.{linear}"
                weight = whole[f"{name}.weight"].float().numpy()
                scale = tensors[f"{name}.per_channel_scale"]
                assert (scale.dtype, tuple(scale.shape)) == (torch.bfloat16, (len(weight),))
                step = np.abs(weight).max(1) / 2.0 ** (bits - 1)
                np.testing.assert_allclose(scale.float().numpy(), step, rtol=2**-8)
                codes = kernel_codes(tensors[f"{name}.weight"], bits, layout)
                np.testing.assert_array_equal(
                    codes, np.clip(np.round(weight / step[:, None]), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
                )
        assert_others_unchanged(tensors, whole, ("per_channel_scale",))


def assert_others_unchanged(tensors: Tensors, whole: Tensors, added: tuple[str, ...]) -> None:
    linear = {f"transformer.layers.{layer}.{name}.weight" for layer in range(2) for name in LINEARS}
    left = {name for name in tensors if not name.endswith(added)} - linear
    assert left == whole.keys() - linear
    assert all(torch.equal(tensors[name], whole[name]) for name in left)


@pytest.mark.parametrize(("tp", "keys"), [(2, LLAMA), (1, GPT)])
def test_awq(written, tp: int, keys: dict[str, Any]) -> None:
    """int8 [out / 2, in]: the even output in the low half. Groups of 64 inputs."""
    config, ranks, plain = written("awq-g64", tp, keys)
    expected = {"quant_algo": "W4A16_AWQ", "group_size": 64, "pre_quant_scale": False, "has_zero_point": False}
    assert config["quantization"].items() >= expected.items()
    for tensors, whole in zip(ranks, plain, strict=True):
        for linear in [linear for linear in LINEARS if f"transformer.layers.1.{linear}.weight" in whole]:
            name = f"transformer.layers.1.{linear}"
            weight, packed = whole[f"{name}.weight"].float(), tensors[f"{name}.weight"]
            scale = tensors[f"{name}.weights_scaling_factor"]
            assert (packed.dtype, scale.dtype) == (torch.int8, torch.bfloat16)
            assert scale.shape == (len(weight), weight.shape[1] // 64)
            halves = torch.stack([packed << 4 >> 4, packed >> 4], 1).flatten(0, 1)  # signed: int8 shifts keep the sign
            values = halves.float() * scale.float().repeat_interleave(64, 1)
            # Half a step, and what the rounded scale makes of seven.
            assert ((values - weight).abs() <= scale.float().repeat_interleave(64, 1) * 0.535).all()


@pytest.mark.parametrize(("tp", "keys"), [(2, LLAMA), (2, GPT)])
def test_smoothquant(written, tp: int, keys: dict[str, Any]) -> None:
    """Scales of outputs are of the whole matrix, also where ranks have parts of the inputs."""
    config, ranks, plain = written("int8", tp, keys)
    assert config["quantization"]["quant_algo"] == "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"
    for linear in [linear for linear in LINEARS if f"transformer.layers.0.{linear}.weight" in plain[0]]:
        name = f"transformer.layers.0.{linear}"
        cut = linear in ("attention.dense", "mlp.proj")
        scales = [tensors[f"{name}.per_channel_scale"] for tensors in ranks]
        for tensors, whole, scale in zip(ranks, plain, scales, strict=True):
            weight = whole[f"{name}.weight"].float()
            assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (1, len(weight)))
            codes = tensors[f"{name}.weight"]
            assert (codes.dtype, codes.shape) == (torch.int8, weight.shape)
            assert ((codes.float() * scale.T - weight).abs() <= scale.T * 0.501).all()
            smoother = tensors.get(f"{name}.smoother")
            assert (smoother is None) == (not cut)
            assert smoother is None or torch.equal(smoother, torch.ones(1, weight.shape[1]))
        assert not cut or torch.equal(scales[0], scales[1])


def test_fp8_by_row_with_a_cache_in_fp8(written) -> None:
    config, ranks, plain = written("fp8-kv8", 2, LLAMA)
    quantization = config["quantization"]
    assert (quantization["quant_algo"], quantization["kv_cache_quant_algo"]) == ("FP8_PER_CHANNEL_PER_TOKEN", "FP8")
    for tensors, whole in zip(ranks, plain, strict=True):
        name = "transformer.layers.1.mlp.gate"
        weight, codes = whole[f"{name}.weight"].float(), tensors[f"{name}.weight"]
        scale = weight.abs().amax(1) / 448
        assert codes.dtype == torch.float8_e4m3fn
        torch.testing.assert_close(tensors[f"{name}.per_channel_scale"], scale)
        torch.testing.assert_close(codes.float() * scale[:, None], weight, rtol=2**-4, atol=float(scale.max()) * 2**-9)
        assert tensors["transformer.layers.1.attention.kv_cache_scaling_factor"].tolist() == [1.0]
        assert_others_unchanged(tensors, whole, ("per_channel_scale", "kv_cache_scaling_factor"))


# -- scales of activations, from a calibrated folder ----------------------------------------------------


def write_modelopt(folder: Path, hf: Path, *, without: str = "") -> None:
    """The folder `hf` in ModelOpt's FP8, with scales of inputs and of the cache that grow from tensor to tensor."""
    folder.mkdir()
    tensors: Tensors = {}
    for number, (name, tensor) in enumerate(sorted(load_file(hf / "model.safetensors").items())):
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().max() / 448
            module = name.removesuffix(".weight")
            tensors[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            tensors |= {f"{module}.weight_scale": scale, f"{module}.input_scale": torch.tensor(float(number + 1))}
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[f"{name.removesuffix('.weight')}.{name.split('.')[-2][0]}_scale"] = torch.tensor(0.25 * number)
    save_file({name: tensor for name, tensor in tensors.items() if name != without}, folder / "model.safetensors")
    config = json.loads((hf / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
def test_fp8_with_the_scales_of_a_calibrated_folder(make_model, host, tmp_path: Path) -> None:
    convert(make_model(**LLAMA), tmp_path / "hf", saver="hf", options=ConvertOptions(dtype="bf16"), host=host)
    write_modelopt(tmp_path / "fp8", tmp_path / "hf")
    options = ConvertOptions(quantize="fp8-static-kv8", target_tensor_parallel_size=2)
    convert(tmp_path / "fp8", tmp_path / "trt", saver="trtllm", options=options, host=host)
    config = json.loads((tmp_path / "trt" / "config.json").read_text())["quantization"]
    assert (config["quant_algo"], config["kv_cache_quant_algo"]) == ("FP8", "FP8")
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    for rank in range(2):
        tensors = load_file(tmp_path / "trt" / f"rank{rank}.safetensors")
        for layer in range(2):
            ours, theirs = f"transformer.layers.{layer}.", f"model.layers.{layer}."
            # One scale for what shares its inputs, the largest of its parts.
            inputs = {
                "attention.qkv": [f"self_attn.{x}_proj" for x in "qkv"],
                "attention.dense": ["self_attn.o_proj"],
                "mlp.fc": ["mlp.gate_proj", "mlp.up_proj"],
                "mlp.gate": ["mlp.gate_proj", "mlp.up_proj"],
                "mlp.proj": ["mlp.down_proj"],
            }
            for linear, modules in inputs.items():
                scale = tensors[f"{ours}{linear}.activation_scaling_factor"]
                assert scale.tolist() == [max(float(stored[f"{theirs}{m}.input_scale"]) for m in modules)]
                assert tensors[f"{ours}{linear}.weights_scaling_factor"].shape == (1,)
            cache = [float(stored[f"{theirs}self_attn.{x}_proj.{x}_scale"]) for x in "kv"]
            assert tensors[f"{ours}attention.kv_cache_scaling_factor"].tolist() == [max(1.0, *cache)]
            # A matrix by itself keeps the codes that it came with.
            part = slice(rank * 128, (rank + 1) * 128)
            codes = stored[f"{theirs}mlp.down_proj.weight"].float()[:, part]
            scale = stored[f"{theirs}mlp.down_proj.weight_scale"]
            made = tensors[f"{ours}mlp.proj.weight"].float() * tensors[f"{ours}mlp.proj.weights_scaling_factor"]
            torch.testing.assert_close(made, codes * scale, rtol=2**-4, atol=float(scale) * 2**-9)


@pytest.mark.slow
def test_missing_and_impossible_scales_of_inputs(make_model, host, tmp_path: Path) -> None:
    convert(make_model(**LLAMA), tmp_path / "hf", saver="hf", options=ConvertOptions(dtype="bf16"), host=host)
    name = "model.layers.1.mlp.up_proj.input_scale"
    write_modelopt(tmp_path / "missing", tmp_path / "hf", without=name)
    options = ConvertOptions(quantize="fp8-static")
    with pytest.raises(ConfigError, match=r"says nothing of the inputs of decoder.layers.1.mlp.linear_fc1.weight"):
        convert(tmp_path / "missing", tmp_path / "x", saver="trtllm", options=options, host=host)
    write_modelopt(tmp_path / "nan", tmp_path / "hf")
    tensors = load_file(tmp_path / "nan" / "model.safetensors")
    save_file({**tensors, name: torch.tensor(float("nan"))}, tmp_path / "nan" / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}: a scale of activations is one number above 0"):
        convert(tmp_path / "nan", tmp_path / "x", saver="trtllm", options=options, host=host)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("keys", "scheme", "words"),
    [
        (LLAMA, "w4a16-g64", "w4a16-g64: not a scheme of TensorRT-LLM's checkpoints; it can be fp8, fp8-static, int8"),
        (LLAMA, "fp8-static", "the source says nothing of the inputs of decoder.layers.0.self_attention.linear_qkv"),
        (GPT, "fp8", "rounds the inputs of FP8_PER_CHANNEL_PER_TOKEN in an RMSNorm, and model.normalization=LayerNorm"),
        ({**LLAMA, "ffn_hidden_size": 96}, "w8a16", "mlp.fc.weight of a rank cannot be quantized: its 96 rows are no"),
        ({**LLAMA, "num_attention_heads": 2}, "awq", "awq takes the size of its groups, such as awq-g64"),
    ],
)
def test_refusals(make_model, host, tmp_path: Path, keys: dict[str, Any], scheme: str, words: str) -> None:
    options = ConvertOptions(quantize=scheme, target_tensor_parallel_size=1 + (scheme == "awq"))
    with pytest.raises(ConfigError) as caught:
        convert(make_model(**keys), tmp_path / "x", saver="trtllm", options=options, host=host)
    assert words in str(caught.value)
    assert not (tmp_path / "x").exists()
