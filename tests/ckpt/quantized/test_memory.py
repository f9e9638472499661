"""Dequantizing holds a tensor or two, whatever the model's size. Files are sparse: zeros on no disk."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.ckpt.test_convert_memory import growth

from mt_core.testing import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with /proc"),
]

BLOCK = 128


@dataclass(frozen=True)
class DeepseekShape:
    """The proportions of DeepSeek-V3: nearly all weights are experts; the largest canonical tensor is those of a
    layer."""

    hidden: int = 1024
    expert: int = 512
    experts: int = 48
    layers: int = 3
    vocab: int = 2048
    heads: int = 8
    q_lora: int = 256
    kv_lora: int = 128
    head: int = 64
    """Features of a head: values, queries and keys without rotation."""


def write_sparse_deepseek(folder: Path, shape: DeepseekShape = DeepseekShape()) -> int:
    """In FP8 blocks: weights are zeros of no bytes on the disk. Returns the bytes of the largest tensor."""
    folder.mkdir()
    hidden, expert, experts, heads = shape.hidden, shape.expert, shape.experts, shape.heads
    latent = {"q_lora_rank": shape.q_lora, "kv_lora_rank": shape.kv_lora, "qk_rope_head_dim": 64}
    latent |= {"qk_nope_head_dim": shape.head, "v_head_dim": shape.head}
    config = {"model_type": "deepseek_v3", "vocab_size": shape.vocab, "hidden_size": hidden}
    config |= {"num_hidden_layers": shape.layers, "intermediate_size": 2 * hidden, **latent}
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    config |= {"moe_intermediate_size": expert, "n_routed_experts": experts, "num_experts_per_tok": 4}
    config |= {"n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 4, "topk_group": 2, "dtype": "bfloat16"}
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))
    attention = {
        "q_a_proj": (shape.q_lora, hidden),
        "q_b_proj": (heads * (shape.head + 64), shape.q_lora),
        "kv_a_proj_with_mqa": (shape.kv_lora + 64, hidden),
        "kv_b_proj": (heads * 2 * shape.head, shape.kv_lora),
        "o_proj": (hidden, heads * shape.head),
    }
    parts = {"gate_proj": (expert, hidden), "up_proj": (expert, hidden), "down_proj": (hidden, expert)}
    names: dict[str, str] = {}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        matrices: dict[str, tuple[int, ...]] = {
            f"{prefix}self_attn.{name}.weight": sizes for name, sizes in attention.items()
        }
        for place in ("shared_experts", *(f"experts.{number}" for number in range(experts))):
            matrices |= {f"{prefix}mlp.{place}.{name}.weight": sizes for name, sizes in parts.items()}
        plain: dict[str, tuple[int, ...]] = {
            f"{prefix}{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")
        }
        plain[f"{prefix}self_attn.q_a_layernorm.weight"] = (shape.q_lora,)
        plain[f"{prefix}self_attn.kv_a_layernorm.weight"] = (shape.kv_lora,)
        plain |= {
            f"{prefix}mlp.gate.weight": (experts, hidden),
            f"{prefix}mlp.gate.e_score_correction_bias": (experts,),
        }
        names |= dict.fromkeys(
            write_blocks(folder / f"model-{layer}.safetensors", matrices, plain), f"model-{layer}.safetensors"
        )
    ends = {
        "model.embed_tokens.weight": (shape.vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (shape.vocab, hidden),
    }
    names |= dict.fromkeys(write_blocks(folder / "model-ends.safetensors", {}, ends), "model-ends.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return 2 * hidden * max(experts * 2 * expert, shape.vocab)


def write_blocks(file: Path, matrices: dict[str, tuple[int, ...]], plain: dict[str, tuple[int, ...]]) -> list[str]:
    header, position = {}, 0
    scales = {f"{name}_scale_inv": tuple(-(-size // BLOCK) for size in sizes) for name, sizes in matrices.items()}
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
    # hf to hf: experts are read and written one by one, though all of a layer are one tensor in between.
    largest = largest // 48 if saver == "hf" else largest
    # Beside two tensors: values that wait to be written, the libraries, mapped pages of the files.
    assert grown < 2 * largest + 100 * 10**6
    assert grown > largest / 2  # so that something was measured
