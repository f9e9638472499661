"""Checkpoints as Megatron would write them, made by torch.save from whole tensors and cut by hand."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAYERS, HIDDEN, HEADS, FFN, VOCAB, POSITIONS = 4, 16, 4, 24, 40, 8
ROWS_IN_TWO = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias", "mlp.linear_fc1.bias")
COLUMNS = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")
ROWS = (*ROWS_IN_TWO, "mlp.linear_fc1.weight", "word_embeddings.weight", "output_layer.weight")


def arguments(**changes: Any) -> Namespace:
    values: dict[str, Any] = {
        "num_layers": LAYERS,
        "encoder_num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": FFN,
        "max_position_embeddings": POSITIONS,
        "seq_length": POSITIONS,
        "padded_vocab_size": VOCAB,
        "make_vocab_size_divisible_by": 8,
        "position_embedding_type": "learned_absolute",
        "add_bias_linear": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "norm_epsilon": 1e-5,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "params_dtype": torch.float32,
        "consumed_train_samples": 12,
        **changes,
    }
    return Namespace(**values)


def gpt(layers: int = LAYERS, *, seed: int = 0) -> dict[str, Tensor]:
    """A GPT with biases and tied embeddings, by canonical names, in the order in which Megatron makes parameters."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {
        "embedding.word_embeddings.weight": random(VOCAB, HIDDEN),
        "embedding.position_embeddings.weight": random(POSITIONS, HIDDEN),
    }
    for layer in range(layers):
        stem = f"decoder.layers.{layer}."
        tensors |= {
            f"{stem}input_layernorm.weight": random(HIDDEN),
            f"{stem}input_layernorm.bias": random(HIDDEN),
            f"{stem}self_attention.linear_proj.weight": random(HIDDEN, HIDDEN),
            f"{stem}self_attention.linear_proj.bias": random(HIDDEN),
            f"{stem}self_attention.linear_qkv.weight": random(3 * HIDDEN, HIDDEN),
            f"{stem}self_attention.linear_qkv.bias": random(3 * HIDDEN),
            f"{stem}pre_mlp_layernorm.weight": random(HIDDEN),
            f"{stem}pre_mlp_layernorm.bias": random(HIDDEN),
            f"{stem}mlp.linear_fc1.weight": random(FFN, HIDDEN),
            f"{stem}mlp.linear_fc1.bias": random(FFN),
            f"{stem}mlp.linear_fc2.weight": random(HIDDEN, FFN),
            f"{stem}mlp.linear_fc2.bias": random(HIDDEN),
        }
    return tensors | {"decoder.final_layernorm.weight": random(HIDDEN), "decoder.final_layernorm.bias": random(HIDDEN)}


def part_of_rank(name: str, tensor: Tensor, rank: int, size: int) -> Tensor:
    """Rank `rank` of `size` tensor-parallel ranks' part of a parameter without gates."""
    if name.endswith(ROWS):
        return tensor.chunk(size, 0)[rank].clone()
    return tensor.chunk(size, 1)[rank].clone() if name.endswith(COLUMNS) else tensor


def run_of(tensors: Mapping[str, Tensor], layers: Sequence[int], *, first: bool, last: bool) -> dict[str, Tensor]:
    """The parameters of some layers, numbered from 0; a last run that is not the first has a copy of the words."""
    found = {}
    for name, tensor in tensors.items():
        if name.startswith("decoder.layers."):
            number, _, rest = name.removeprefix("decoder.layers.").partition(".")
            if int(number) in layers:
                found[f"decoder.layers.{layers.index(int(number))}.{rest}"] = tensor
        elif first if name.startswith("embedding.") else last:
            found[name] = tensor
    if last and not first:
        found["output_layer.weight"] = tensors["embedding.word_embeddings.weight"]
    return found


def save_rank(folder: Path, rank: str, content: Mapping[str, Any], iteration: int = 5) -> Path:
    """Write one rank's file, and the tracker. content: beside what every file has."""
    file = folder / f"iter_{iteration:07d}" / rank / "model_optim_rng.pt"
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"checkpoint_version": 3.0, "iteration": iteration, **content}, file)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return file
