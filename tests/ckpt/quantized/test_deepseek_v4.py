"""DeepSeek-V4 as it is published: matrices in FP8 blocks, experts in FP4, `.scale` beside each, exponents as scales."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.ckpt.family_cases import compressed
from torch import Tensor

from mt_ckpt.convert import convert
from mt_ckpt.files.checksum_file import CHECKSUMS
from mt_ckpt.hugging_face.reader import open_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.plugins import PluginHost
from mt_models.deepseek_v4.config import DeepseekV4Config
from mt_models.deepseek_v4.hugging_face import HUGGING_FACE

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = torch.cat((VALUES, -VALUES))
MATRICES = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "e_proj", "h_proj")


def in_fp8(weight: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """codes, scales, values"""
    rows, columns = weight.shape
    exponents = torch.randint(118, 124, (-(-rows // block), -(-columns // block)), dtype=torch.uint8)
    scales = torch.exp2(exponents.float() - 127)
    wide = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, exponents.view(torch.float8_e8m0fnu), codes.float() * wide


def in_fp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = weight.shape
    exponents = torch.randint(120, 126, (rows, columns // 32), dtype=torch.uint8)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
    scales = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    return packed, exponents.view(torch.float8_e8m0fnu), VALUES[codes.long()] * scales


def publish(folder: Path) -> dict[str, Tensor]:
    """Quantizes what is published so, in a folder of plain tensors; returns the values."""
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name in list(tensors):
        parts = name.split(".")
        if parts[-1] != "weight" or parts[-2] not in MATRICES or "compressor" in parts:
            continue
        weight = tensors[name].float()
        is_routed = "experts" in parts
        codes, scales, value = in_fp4(weight) if is_routed else in_fp8(weight, 128)
        tensors |= {name: codes, name.removesuffix("weight") + "scale": scales}
        values[name] = value.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    config |= {"expert_dtype": "fp4", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return values


@pytest.mark.slow
def test_a_published_folder_becomes_the_model_of_its_values(make_model, host: PluginHost, tmp_path: Path) -> None:
    """0.5 s: a conversion."""
    torch.manual_seed(0)
    keys = compressed(hidden_size=64, moe_intermediate_size=32).keys
    keys = {key: value for key, value in keys.items() if "implementation" not in key}
    model = HUGGING_FACE.read_config({"model_type": "deepseek_v4", **keys, "num_nextn_predict_layers": 1})
    plain = make_model(dtype=torch.bfloat16, **model)
    convert(plain, tmp_path / "hf", saver="hf", options=ConvertOptions(), host=host)
    (tmp_path / "hf" / CHECKSUMS).unlink()  # as others write it
    values = publish(tmp_path / "hf")
    assert len(values) > 100
    reader = open_checkpoint(tmp_path / "hf", host)
    names = HUGGING_FACE.name_map(DeepseekV4Config.model_validate(model))
    checked = 0
    for rule in names.rules:
        if all(source in values for source in rule.sources):
            expected = rule.import_value([values[source] for source in rule.sources])
            assert torch.equal(reader.read(f"model.{rule.ours}"), expected), rule.ours
            checked += 1
    # Five projections, routed and shared experts of each layer; an indexer; the two of the prediction.
    assert checked == 4 * (5 + 4) + 1 + 2
