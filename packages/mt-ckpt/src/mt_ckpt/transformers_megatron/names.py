"""Names of the layout and canonical ones, and how a tensor is cut over tensor-parallel ranks."""

from __future__ import annotations

import re

EMBEDDING = ("model", "language_model", "embedding")
ENCODER = ("model", "language_model", "encoder")
OLD_ENCODER = ("model", "language_model", "transformer")
"""What Megatron called it before."""
HEAD = ("model", "word_embeddings_for_head")
"""A copy of the word embeddings, on the last stage."""
WORDS, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"

IN_LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
OLD_ATTENTION = "attention."
"""What the tool's older files have for `self_attention.`"""
CUT_ALONG = {
    "self_attention.query_key_value.weight": 0,
    "self_attention.query_key_value.bias": 0,
    "self_attention.dense.weight": 1,
    "mlp.dense_h_to_4h.weight": 0,
    "mlp.dense_h_to_4h.bias": 0,
    "mlp.dense_4h_to_h.weight": 1,
}
"""Name within a layer -> the dimension that ranks share; the others are whole on every rank."""
FINAL_NORM = "final_layernorm"

_OURS = re.compile(r"decoder\.layers\.([0-9]+)\.(.+)\.(weight|bias)")
_THEIRS = re.compile(r"layers\.([0-9]+)\.(.+)\.(weight|bias)")


def layer_of(ours: str) -> tuple[int, str] | None:
    """(number, name within a layer there) of a canonical name; None for one outside the layers."""
    match = _OURS.fullmatch(ours)
    return (int(match[1]), f"{IN_LAYER[match[2]]}.{match[3]}") if match and match[2] in IN_LAYER else None


def canonical(theirs: str, first_layer: int) -> str | None:
    """The canonical name of an entry of the encoder; None for one that is unknown. first_layer: of the stage."""
    if theirs in (f"{FINAL_NORM}.weight", f"{FINAL_NORM}.bias"):
        return f"decoder.{theirs}"
    match = _THEIRS.fullmatch(theirs)
    if match is None:
        return None
    inside = match[2].replace(OLD_ATTENTION, "self_attention.", 1) if match[2].startswith(OLD_ATTENTION) else match[2]
    found = next((ours for ours, there in IN_LAYER.items() if there == inside), None)
    return found and f"decoder.layers.{first_layer + int(match[1])}.{found}.{match[3]}"


def cut_along(theirs: str) -> int | None:
    """The dimension along which an entry of the encoder is cut, None for whole ones."""
    match = _THEIRS.fullmatch(theirs)
    inside = f"{match[2]}.{match[3]}" if match else ""
    if inside.startswith(OLD_ATTENTION):
        inside = "self_" + inside
    return CUT_ALONG.get(inside)
