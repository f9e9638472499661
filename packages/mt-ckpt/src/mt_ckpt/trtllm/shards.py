"""What each tensor-parallel rank of a stage has of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Parts = dict[str, list[Tensor]]
"""Name in the files -> what each tensor-parallel rank has of it."""

TOP = {
    "embedding.word_embeddings.weight": "transformer.vocab_embedding.weight",
    "embedding.position_embeddings.weight": "transformer.position_embedding.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
}
NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_layernorm"}
ROWS_OF_INPUT = {"self_attention.linear_proj": "attention.dense", "mlp.linear_fc2": "mlp.proj"}
"""Cut along what comes in; their biases are added once and whole everywhere."""


def whole(name: str, tensor: Tensor, tp: int) -> Parts:
    return {name: [tensor] * tp}


def output_layer(tensor: Tensor, tp: int) -> Parts:
    """Rows of the vocabulary, padded with zeros to the same number on every rank."""
    return {"lm_head.weight": [_padded(part, -(-tensor.shape[0] // tp)) for part in _row_parts(tensor, tp)]}


def of_layer(name: str, prefix: str, tensor: Tensor, model: Any, gated: bool, tp: int) -> Parts:
    """The parts of a layer's parameter `name`, such as "mlp.linear_fc2.weight", under `prefix`."""
    stem, _, kind = name.rpartition(".")
    if stem in NORMS:
        return whole(f"{prefix}{NORMS[stem]}.{kind}", tensor, tp)
    if stem in ROWS_OF_INPUT:
        # Outputs of the ranks are added: a bias on each of them would count once per rank, so that the engine adds it
        # after the sum.
        parts = [tensor] * tp if kind == "bias" else list(tensor.chunk(tp, 1))
        return {f"{prefix}{ROWS_OF_INPUT[stem]}.{kind}": parts}
    if stem == "self_attention.linear_qkv":
        return {f"{prefix}attention.qkv.{kind}": _query_key_value(tensor, model, tp)}
    if stem == "mlp.linear_fc1" and gated:
        # The half that the activation acts on is `fc`, the other one `gate`.
        activated, other = tensor.chunk(2)
        return {
            f"{prefix}mlp.fc.{kind}": list(activated.chunk(tp)),
            f"{prefix}mlp.gate.{kind}": list(other.chunk(tp)),
        }
    if stem == "mlp.linear_fc1":
        return {f"{prefix}mlp.fc.{kind}": list(tensor.chunk(tp))}
    raise KeyError(name)


def _query_key_value(tensor: Tensor, model: Any, tp: int) -> list[Tensor]:
    """From rows grouped by key-value head to all queries, all keys, all values of each rank.

    With more ranks than key-value heads each head is on several ranks.
    """
    groups, per_group, size = model.query_groups, model.num_attention_heads // model.query_groups, model.head_dim
    # [groups, queries of one + 2, D, ...]
    grouped = tensor.unflatten(0, (groups, per_group + 2, size))
    # [heads * D, ...]; keys and values [groups * copies * D, ...]
    queries = grouped[:, :per_group].flatten(0, 2)
    # tp a multiple of the groups: the copies of a head are on neighbouring ranks.
    copies = max(tp // groups, 1)
    keys, values = (grouped[:, per_group + i].repeat_interleave(copies, 0).flatten(0, 1) for i in range(2))
    return [torch.cat(parts) for parts in zip(*(x.chunk(tp) for x in (queries, keys, values)), strict=True)]


def _row_parts(tensor: Tensor, parts: int) -> Sequence[Tensor]:
    # The last part may be shorter, or empty.
    size = -(-tensor.shape[0] // parts)
    return [tensor[min(i * size, len(tensor)) : (i + 1) * size] for i in range(parts)]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])]) if missing else tensor
