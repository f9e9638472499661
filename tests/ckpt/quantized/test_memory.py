"""Dequantizing holds a tensor or two, whatever the model's size. Files are sparse: zeros on no disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tests.ckpt.test_convert_memory import growth

from mt_core.testing import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with /proc"),
]

HIDDEN, EXPERT, EXPERTS, LAYERS = 1024, 512, 48, 3
BLOCK = 128
"""The proportions of DeepSeek-V3: nearly all weights are experts, the largest canonical tensor is those of a layer."""


def write_sparse_deepseek(folder: Path) -> int:
    """In FP8 blocks: weights are zeros of no bytes on the disk. Returns the bytes of the largest tensor."""
    folder.mkdir()
    latent = {"q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
    heads = 8
    config = {"model_type": "deepseek_v3", "vocab_size": 2048, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": 2048, **latent}
    config |= {"moe_intermediate_size": EXPERT, "n_routed_experts": EXPERTS, "num_experts_per_tok": 4}
    config |= {"n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 4, "topk_group": 2, "dtype": "bfloat16"}
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))
    attention = {
        "q_a_proj": (256, HIDDEN),
        "q_b_proj": (heads * 128, 256),
        "kv_a_proj_with_mqa": (128 + 64, HIDDEN),
        "kv_b_proj": (heads * 128, 128),
        "o_proj": (HIDDEN, heads * 64),
    }
    parts = {"gate_proj": (EXPERT, HIDDEN), "up_proj": (EXPERT, HIDDEN), "down_proj": (HIDDEN, EXPERT)}
    names: dict[str, str] = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        matrices = {f"{prefix}self_attn.{name}.weight": shape for name, shape in attention.items()}
        for place in ("shared_experts", *(f"experts.{expert}" for expert in range(EXPERTS))):
            matrices |= {f"{prefix}mlp.{place}.{name}.weight": shape for name, shape in parts.items()}
        plain = {f"{prefix}{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        plain |= {f"{prefix}self_attn.q_a_layernorm.weight": (256,), f"{prefix}self_attn.kv_a_layernorm.weight": (128,)}
        plain |= {
            f"{prefix}mlp.gate.weight": (EXPERTS, HIDDEN),
            f"{prefix}mlp.gate.e_score_correction_bias": (EXPERTS,),
        }
        names |= dict.fromkeys(
            write_blocks(folder / f"model-{layer}.safetensors", matrices, plain), f"model-{layer}.safetensors"
        )
    ends = {
        "model.embed_tokens.weight": (2048, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (2048, HIDDEN),
    }
    names |= dict.fromkeys(write_blocks(folder / "model-ends.safetensors", {}, ends), "model-ends.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return 2 * EXPERTS * 2 * EXPERT * HIDDEN


def write_blocks(file: Path, matrices: dict[str, tuple[int, ...]], plain: dict[str, tuple[int, ...]]) -> list[str]:
    header, position = {}, 0
    scales = {f"{name}_scale_inv": tuple(-(-size // BLOCK) for size in shape) for name, shape in matrices.items()}
    kinds = (("F32", 4, scales), ("BF16", 2, plain), ("F8_E4M3", 1, matrices))
    for dtype, size, tensors in kinds:
        for name, shape in tensors.items():
            end = position + size * torch.Size(shape).numel()
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
            position = end
    text = json.dumps(header).encode()
    ones = torch.ones(sum(torch.Size(shape).numel() for shape in scales.values())).numpy().tobytes()
    file.write_bytes(len(text).to_bytes(8, "little") + text + ones)
    os.truncate(file, 8 + len(text) + position)
    return list(header)


@pytest.mark.parametrize("saver", ["hf", "mt"])
def test_peak_memory_of_experts_in_fp8_blocks(tmp_path: Path, saver: str) -> None:
    """0.25 GB in FP8, 0.5 in bf16; the largest tensor is 0.1. 4 s."""
    largest = write_sparse_deepseek(tmp_path / "m")
    (grown,) = run_ranks(1, growth, tmp_path / "m", tmp_path / "out", saver, None)
    # Beside two tensors: values that wait to be written, the libraries, mapped pages of the files.
    assert grown < 2 * largest + 100 * 10**6
    assert grown > largest / 2  # so that something was measured
