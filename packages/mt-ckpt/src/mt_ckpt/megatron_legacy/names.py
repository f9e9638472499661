"""Names from before Megatron-Core, and Megatron-Core's.

A model is nested dictionaries: `language_model` with `embedding`, `encoder` (once `transformer`) and, untied,
`output_layer`; beside it the heads of BERT and the last pipeline stage's copy of the token embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mt_ckpt.megatron.names import OUTPUT
from mt_core.errors import CheckpointError

HEADS: Mapping[str, str] = {
    "word_embeddings_for_head.weight": OUTPUT,
    "lm_head.bias": "output_layer.bias",
    "lm_head.dense.weight": "lm_head.dense.weight",
    "lm_head.dense.bias": "lm_head.dense.bias",
    "lm_head.layernorm.weight": "lm_head.layer_norm.weight",
    "lm_head.layernorm.bias": "lm_head.layer_norm.bias",
    "lm_head.norm.weight": "lm_head.layer_norm.weight",
    "lm_head.norm.bias": "lm_head.layer_norm.bias",
    "binary_head.weight": "binary_head.weight",
    "binary_head.bias": "binary_head.bias",
    "language_model.pooler.dense.weight": "pooler.dense.weight",
    "language_model.pooler.dense.bias": "pooler.dense.bias",
    "language_model.output_layer.weight": OUTPUT,
}
"""Beside the embedding and the layers: old name -> new one. Of several old ones the first is written."""
LAYER_PARTS: Mapping[str, str] = {
    "input_layernorm": "input_layernorm",
    "input_norm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
"""Within a layer: old -> new. Of several old ones the first is written."""
STACK = "decoder"
_STACK = re.compile(r"^language_model\.(?:transformer|encoder)\.(?P<rest>.*)$")
_LAYER = re.compile(r"^layers\.(?P<number>\d+)\.(?P<part>.+)\.(?P<leaf>weight|bias)$")
_FINAL = re.compile(r"^final_(?:layer)?norm\.(?P<leaf>weight|bias)$")
_EMBEDDING = "language_model.embedding."


def to_core(old: str) -> str:
    """Megatron-Core's name, with layers in the stack `decoder`; unknown ones stay as they are."""
    # From outside in: heads and the embedding, then the stack, then layers in it.
    if old in HEADS:
        return HEADS[old]
    if old.startswith(_EMBEDDING):
        return old.removeprefix("language_model.")
    stack = _STACK.match(old)
    if stack is None:
        return old
    if final := _FINAL.match(stack["rest"]):
        return f"{STACK}.final_layernorm.{final['leaf']}"
    layer = _LAYER.match(stack["rest"])
    if layer is None or layer["part"] not in LAYER_PARTS:
        return old
    return f"{STACK}.layers.{layer['number']}.{LAYER_PARTS[layer['part']]}.{layer['leaf']}"


def is_bert(names: Iterable[str]) -> bool:
    """Whether core names have what only BERT has."""
    return any(name.startswith(("lm_head.", "binary_head.", "pooler.", "embedding.tokentype")) for name in names)


def as_encoder(name: str) -> str:
    """BERT's layers are its encoder."""
    return re.sub(rf"^{STACK}\.", "encoder.", name)


def to_old(core: str, *, copied: bool) -> tuple[str, ...]:
    """The keys on the way to a parameter, given Megatron-Core's name. copied: an LM head is the last stage's copy
    of the token embeddings. Raises CheckpointError for a parameter that the old models did not have."""
    if core == OUTPUT:
        return ("word_embeddings_for_head", "weight") if copied else ("language_model", "output_layer", "weight")
    for old, new in HEADS.items():
        if new == core:
            return _keys(old)
    if core.startswith("embedding."):
        _, table, leaf = core.split(".")
        return ("language_model", "embedding", table, leaf)
    # BERT's layers were called as GPT's.
    inner = re.sub(r"^(?:encoder|decoder)\.", "", core)
    if inner.startswith("final_layernorm."):
        return ("language_model", "encoder", inner)
    if match := _LAYER.match(inner):
        for old, new in LAYER_PARTS.items():
            if new == match["part"]:
                return ("language_model", "encoder", f"layers.{match['number']}.{old}.{match['leaf']}")
    raise CheckpointError(f"{core}: Megatron's models from before Megatron-Core have no such parameter")


def nested(values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Dictionaries within dictionaries, of values by the keys on the way to them."""
    root: dict[str, Any] = {}
    for keys, value in values.items():
        target = root
        for key in keys[:-1]:
            target = target.setdefault(key, {})
        target[keys[-1]] = value
    return root


def _keys(old: str) -> tuple[str, ...]:
    """Names within a head: its modules' parameters have dots in their keys."""
    parts = old.split(".")
    # language_model is a dictionary of its own; other heads stand beside it. What is within a module has dots in its
    # key.
    depth = 2 if parts[0] == "language_model" else 1
    return (*parts[:depth], ".".join(parts[depth:]))
