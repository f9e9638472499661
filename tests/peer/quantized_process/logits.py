"""Logits that the readers of quantized folders compute, in fp32.

    python logits.py OUT FOLDER...

Writes the logits of the token ids 1 to 24 of each folder under its name into the safetensors file OUT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

IDS = list(range(1, 25))


def of_mlx(folder: Path) -> torch.Tensor:
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    return torch.from_numpy(np.array(model(mx.array([IDS])).astype(mx.float32)))


def of_transformers(folder: Path, method: str) -> torch.Tensor:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config

    # The weights alone: inputs are not quantized.
    kind = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}.get(method, CompressedTensorsConfig)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=kind(dequantize=True)
    ).eval()
    with torch.no_grad():
        return model.float()(torch.tensor([IDS])).logits


def main(out: Path, folders: list[Path]) -> None:
    logits = {}
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        method = config["quantization_config"].get("quant_method", "mlx")
        logits[folder.name] = (
            of_mlx(folder) if method in ("mlx", "awq") else of_transformers(folder, method)
        ).contiguous()
    save_file(logits, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
