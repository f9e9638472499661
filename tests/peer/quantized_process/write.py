"""Writes matrices with the packages that define formats of quantized weights, and what these dequantize them to.

    python write.py FOLDER

For each format: NAME.safetensors (as a checkpoint has it), NAME.json (its config.json) and NAME.expected.safetensors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Written = tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, torch.Tensor]]
"""(stored tensors, config.json, dequantized tensors)"""
OUT, IN = 96, 256


def weight(dtype: torch.dtype = torch.bfloat16, rows: int = OUT, columns: int = IN) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.05).to(dtype)


# -- compressed-tensors -----------------------------------------------------------------------------------


def compressed(
    layout: str, arguments: dict[str, Any], dtype: torch.dtype = torch.bfloat16, seed_rows: int = OUT
) -> Written:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    w = weight(dtype, seed_rows)
    state: dict[str, torch.Tensor] = {"weight": w}
    low, high = bounds(w, args)
    whole = None
    if args.strategy == "tensor_group":
        whole = generate_gparam(w.min(), w.max())
        state["weight_global_scale"] = whole.reshape(1)
    scale, zero = calculate_qparams(low, high, args, global_scale=whole)
    state["weight_scale"], state["weight_zero_point"] = scale, zero
    packer = BaseCompressor.get_value_from_registry(layout)
    stored = packer.compress(state, scheme)
    expected = packer.decompress(dict(stored), scheme)["weight"]
    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
    config = {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed"}
    config |= {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return prefixed(stored), {"quantization_config": config}, {"m.weight": expected}


def prefixed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"m.{name}": torch.as_tensor(value).contiguous() for name, value in state.items() if value is not None}


def bounds(w: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if args.strategy == "tensor":
        return w.min().reshape(1), w.max().reshape(1)
    if args.strategy == "channel":
        return w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    if args.strategy == "block":
        height, width = args.block_structure
        rows, columns = -(-w.shape[0] // height), -(-w.shape[1] // width)
        cells = [
            [w[r * height : (r + 1) * height, c * width : (c + 1) * width] for c in range(columns)] for r in range(rows)
        ]
        return tuple(torch.stack([torch.stack([f(x) for x in row]) for row in cells]) for f in (torch.min, torch.max))  # type: ignore[return-value]
    grouped = w.unflatten(1, (-1, args.group_size))
    return grouped.amin(-1), grouped.amax(-1)


def of_compressed_tensors() -> Iterator[tuple[str, Callable[[], Written]]]:
    whole = {"type": "int", "strategy": "group", "group_size": 64}
    for bits in (2, 3, 4, 5, 6, 7, 8):
        yield f"ct-pack-{bits}", lambda bits=bits: compressed("pack-quantized", {**whole, "num_bits": bits})
    for bits in (3, 4, 8):
        asymmetric = {**whole, "num_bits": bits, "symmetric": False}
        yield f"ct-pack-asym-{bits}", lambda a=asymmetric: compressed("pack-quantized", a)
    channel = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False}
    yield "ct-pack-channel", lambda: compressed("pack-quantized", channel, torch.float16, 90)
    for strategy in ("tensor", "channel"):
        yield (
            f"ct-int-{strategy}",
            lambda s=strategy: compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": s}),
        )
        yield (
            f"ct-float-{strategy}",
            lambda s=strategy: compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": s}),
        )
    block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 48]}
    yield "ct-float-block", lambda: compressed("float-quantized", block)
    yield (
        "ct-naive-asym",
        lambda: compressed(
            "naive-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
        ),
    )
    four = {"num_bits": 4, "type": "float"}
    nv = {**four, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    yield "ct-nvfp4", lambda: compressed("nvfp4-pack-quantized", nv)
    mx = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    for bits, layout in ((4, "mxfp4-pack-quantized"), (6, "mxfp6-pack-quantized"), (8, "mxfp8-quantized")):
        yield f"ct-{layout.partition('-')[0]}", lambda b=bits, n=layout: compressed(n, {**mx, "num_bits": b})


# -- transformers' FP8 --------------------------------------------------------------------------------------


def fp8(
    rows: int, columns: int, block: tuple[int, int], exponents: torch.dtype | None, packed: bool = False
) -> Written:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    w = weight(torch.float32, rows, columns)
    cells = w.reshape(rows // block[0], block[0], columns // block[1], block[1])
    scale = cells.abs().amax((1, 3)) / 448.0
    if exponents is not None:
        scale = torch.exp2(scale.log2().ceil())
    codes = (cells / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
    stored = scale if exponents is None else (scale.log2() + 127).to(torch.uint8).view(exponents)
    if packed:
        codes = torch.randint(
            -128, 128, (rows, columns // 2), dtype=torch.int8, generator=torch.Generator().manual_seed(1)
        )
    expected = Fp8Dequantize(None)._dequantize_one(codes, stored, torch.bfloat16)
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return {"m.weight": codes, "m.weight_scale_inv": stored}, {"quantization_config": config}, {"m.weight": expected}


def of_transformers() -> Iterator[tuple[str, Callable[[], Written]]]:
    yield "fp8-blocks", lambda: fp8(256, 384, (128, 128), None)
    yield "fp8-ue8m0", lambda: fp8(256, 384, (128, 128), torch.float8_e8m0fnu)
    yield "fp8-uint8", lambda: fp8(256, 384, (128, 128), torch.uint8)
    yield "mxfp8", lambda: fp8(64, 96, (1, 32), torch.uint8)
    yield "fp4-experts", lambda: fp8(64, 96, (1, 32), torch.float8_e8m0fnu, packed=True)


# -- bitsandbytes -----------------------------------------------------------------------------------------------


def four_bits(kind: str, nested: bool, rows: int = OUT, columns: int = IN, block: int = 64) -> Written:
    import bitsandbytes.functional as bnb

    packed, state = bnb.quantize_4bit(
        weight(torch.bfloat16, rows, columns), blocksize=block, quant_type=kind, compress_statistics=nested
    )
    expected = bnb.dequantize_4bit(packed, state)
    parts = {f"m.weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return {"m.weight": packed, **parts}, {"quantization_config": config}, {"m.weight": expected}


def int8() -> Written:
    import bitsandbytes.functional as bnb

    codes, largest, _ = bnb.int8_vectorwise_quant(weight(torch.float16))
    expected = bnb.int8_vectorwise_dequant(codes, largest).to(torch.float16)
    stored = {"m.weight": codes, "m.SCB": largest, "m.weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}, "dtype": "float16"}
    return stored, config, {"m.weight": expected}


def of_bitsandbytes() -> Iterator[tuple[str, Callable[[], Written]]]:
    for kind in ("nf4", "fp4"):
        yield f"bnb-{kind}", lambda kind=kind: four_bits(kind, nested=False)
        yield f"bnb-{kind}-nested", lambda kind=kind: four_bits(kind, nested=True)
    yield "bnb-nf4-odd", lambda: four_bits("nf4", nested=True, rows=33, columns=35)
    yield "bnb-int8", int8


# -- ModelOpt ------------------------------------------------------------------------------------------------------


def modelopt_nvfp4() -> Written:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    w = weight()
    q, scale, second = NVFP4QTensor.quantize(w, 16)
    expected = q.dequantize(dtype=torch.bfloat16, scale=scale, double_scale=second, block_sizes={-1: 16})
    stored = {"m.weight": q._quantized_data, "m.weight_scale": scale, "m.weight_scale_2": second.reshape(()).float()}
    config = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    return {k: v.contiguous() for k, v in stored.items()}, {"hf_quant_config.json": config}, {"m.weight": expected}


def modelopt_fp8() -> Written:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    w = weight(torch.float32)
    q, scale = FP8QTensor.quantize(w)
    expected = q.dequantize(dtype=torch.float32, scale=scale).to(torch.bfloat16)
    stored = {"m.weight": q._quantized_data, "m.weight_scale": scale.reshape(()).float()}
    stored["m.input_scale"] = torch.tensor(0.5)
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    return stored, config, {"m.weight": expected}


def of_modelopt() -> Iterator[tuple[str, Callable[[], Written]]]:
    yield "modelopt-nvfp4", modelopt_nvfp4
    yield "modelopt-fp8", modelopt_fp8


# -- torchao -------------------------------------------------------------------------------------------------------


def torchao(make: Callable[[Any], Any], dtype: torch.dtype = torch.bfloat16) -> Written:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    layer = torch.nn.Sequential(torch.nn.Linear(IN, OUT, bias=False, dtype=dtype))
    layer[0].weight.data.copy_(weight(dtype))
    quantize_(layer, make(None))
    state = {"m.weight": layer[0].weight.data, "m.bias": torch.zeros(OUT, dtype=dtype)}
    stored, metadata = flatten_tensor_state_dict(state)
    expected = layer[0].weight.dequantize()
    config = {"quantization_config": {"quant_method": "torchao"}, "dtype": str(dtype).removeprefix("torch.")}
    return {**stored, "__metadata__": metadata}, config, {"m.weight": expected, "m.bias": state["m.bias"]}


def of_torchao() -> Iterator[tuple[str, Callable[[], Written]]]:
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerAxis,
        PerGroup,
    )

    yield "ao-int8", lambda: torchao(lambda _: Int8WeightOnlyConfig())
    yield "ao-float8", lambda: torchao(lambda _: Float8WeightOnlyConfig())
    yield "ao-int4-groups", lambda: torchao(lambda _: IntxWeightOnlyConfig(torch.int4, PerGroup(32)))
    yield "ao-int3-rows", lambda: torchao(lambda _: IntxWeightOnlyConfig(torch.int3, PerAxis(0)))


def ao_class(name: str) -> Written:
    import torchao.prototype.mx_formats.mx_tensor as mx
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    w = weight()
    if name == "nvfp4":
        q = NVFP4Tensor.to_nvfp4(w, per_tensor_scale=per_tensor_amax_to_scale(w.abs().max()))
    else:
        q = mx.MXTensor.to_mx(w, torch.float8_e4m3fn if name == "mxfp8" else torch.float4_e2m1fn_x2, 32)
    stored, metadata = flatten_tensor_state_dict({"m.weight": q})
    config = {"quantization_config": {"quant_method": "torchao"}, "dtype": "bfloat16"}
    return {**stored, "__metadata__": metadata}, config, {"m.weight": q.dequantize(torch.bfloat16)}


def of_torchao_classes() -> Iterator[tuple[str, Callable[[], Written]]]:
    for name in ("nvfp4", "mxfp8", "mxfp4"):
        yield f"ao-{name}", lambda name=name: ao_class(name)


# -- MLX --------------------------------------------------------------------------------------------------------------


def mlx(bits: int, group: int, mode: str, dtype: str = "bfloat16") -> Written:
    import mlx.core as mx
    import numpy as np

    w = mx.array(weight(torch.float32).numpy()).astype(getattr(mx, dtype))
    parts = mx.quantize(w, group_size=group, bits=bits, mode=mode)
    expected = mx.dequantize(*parts, group_size=group, bits=bits, mode=mode)
    stored = {"m.weight": torch.from_numpy(np.array(parts[0]))}
    for name, part in zip(("scales", "biases"), parts[1:], strict=False):
        stored[f"m.{name}"] = tensor_of(part)
    config = {"quantization": {"group_size": group, "bits": bits, "mode": mode}}
    return stored, config, {"m.weight": tensor_of(expected)}


def tensor_of(array: Any) -> torch.Tensor:
    import mlx.core as mx
    import numpy as np

    if array.dtype == mx.uint8:
        return torch.from_numpy(np.array(array))
    return torch.from_numpy(np.array(array.astype(mx.float32))).to(getattr(torch, str(array.dtype).rpartition(".")[2]))


def of_mlx() -> Iterator[tuple[str, Callable[[], Written]]]:
    for bits in (2, 3, 4, 5, 6, 8):
        yield f"mlx-{bits}", lambda bits=bits: mlx(bits, 64, "affine")
    yield "mlx-fp16", lambda: mlx(4, 32, "affine", "float16")
    yield "mlx-mxfp4", lambda: mlx(4, 32, "mxfp4")
    yield "mlx-nvfp4", lambda: mlx(4, 16, "nvfp4")
    yield "mlx-mxfp8", lambda: mlx(8, 32, "mxfp8")


SOURCES = (of_compressed_tensors, of_transformers, of_bitsandbytes, of_modelopt, of_torchao, of_torchao_classes, of_mlx)


def main(folder: Path) -> None:
    failed: dict[str, str] = {}
    for source in SOURCES:
        try:
            makers = list(source())
        except ImportError as error:
            failed[source.__name__] = str(error)
            continue
        for name, make in makers:
            try:
                stored, config, expected = make()
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
                continue
            metadata = stored.pop("__metadata__", None)
            save_file(
                {key: value.contiguous().clone() for key, value in stored.items()},
                folder / f"{name}.safetensors",
                metadata=metadata,
            )
            save_file(
                {key: value.contiguous().clone() for key, value in expected.items()},
                folder / f"{name}.expected.safetensors",
            )
            (folder / f"{name}.json").write_text(json.dumps(config))
    print(json.dumps(failed))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
