"""Casts a matrix with torchao, as its recipes of training do.

    python training_casts.py FOLDER

Reads x.safetensors; writes casts.safetensors with the bytes of numbers and scales.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale


def main() -> None:
    folder = Path(sys.argv[1])
    x = load_file(folder / "x.safetensors")["x"]
    found = {}
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        scale, data = to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL)
        found |= {f"{name}.scale": scale.view(torch.uint8), f"{name}.data": data.view(torch.uint8)}
    scale, data = nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.float().abs().max()))
    found |= {"e2m1.scale": scale.view(torch.uint8), "e2m1.data": data.view(torch.uint8)}
    save_file({name: value.contiguous() for name, value in found.items()}, folder / "casts.safetensors")


if __name__ == "__main__":
    main()
