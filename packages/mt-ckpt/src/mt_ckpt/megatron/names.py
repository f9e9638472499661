"""Names of parameters in Megatron-Core's files, and the canonical ones.

They differ in few things: Transformer Engine keeps a norm inside the linear layer that follows it; experts stand one
by one instead of stacked; layers are numbered within the file; some tensors are stored twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

EXTRA_STATE = "_extra_state"
"""Of Transformer Engine's FP8 scaling; holds no weight."""
FUSED_NORMS: Mapping[str, str] = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Norms that Transformer Engine's layers, and torch_dist whatever the layers, keep under the next linear layer."""
DUPLICATES: Mapping[str, str] = {
    "position_embeddings.weight": "embedding.position_embeddings.weight",
    "lm_head.output_layer.bias": "output_layer.bias",
}
"""What Megatron's T5 stores twice -> the name that stays."""
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYER = re.compile(r"^(encoder|decoder)\.layers\.(\d+)\.")
_EXPERT_FORMS = (
    re.compile(r"(?P<stem>.*\.mlp\.experts)\.local_experts\.(?P<expert>\d+)\.(?P<leaf>linear_fc[12]\.(?:weight|bias))"),
    re.compile(r"(?P<stem>.*\.mlp\.experts)(?:\.experts)?\.(?P<expert>\d+)\.(?P<leaf>linear_fc[12]\.(?:weight|bias))"),
    re.compile(r"(?P<stem>.*\.mlp\.experts)(?:\.experts)?\.(?P<leaf>linear_fc[12]\.(?:weight|bias))(?P<expert>\d+)"),
)
"""One expert's tensor: of sequential experts, of torch_dist without stacking, of grouped ones."""


@dataclass(frozen=True)
class StoredName:
    """name: canonical, layers still numbered as in the file. expert: its number in the file, for an expert's tensor."""

    name: str
    expert: int | None = None


def parse(stored: str) -> StoredName:
    """What a tensor of a file is."""
    name = stored
    while name.startswith("module."):
        name = name.removeprefix("module.")
    for fused, plain in FUSED_NORMS.items():
        name = name.replace(fused, plain)
    name = DUPLICATES.get(name, name)
    for form in _EXPERT_FORMS:
        if match := form.fullmatch(name):
            return StoredName(f"{match['stem']}.{match['leaf']}", int(match["expert"]))
    return StoredName(name.replace(".mlp.experts.experts.", ".mlp.experts."))


def layer_of(name: str) -> tuple[str, int] | None:
    """("decoder", 3) for a parameter of a layer, else None."""
    match = _LAYER.match(name)
    return (match[1], int(match[2])) if match else None


def renumbered(name: str, offsets: Mapping[str, int]) -> str:
    """`name` with the number of its layer raised by the offset of its stack."""
    found = layer_of(name)
    if found is None or not offsets.get(found[0]):
        return name
    stack, number = found
    return _LAYER.sub(f"{stack}.layers.{number + offsets[stack]}.", name)


def layer_counts(names: Mapping[str, object]) -> dict[str, int]:
    """Stack -> number of layers that the names number."""
    counts: dict[str, int] = {}
    for name in names:
        if found := layer_of(name):
            counts[found[0]] = max(counts.get(found[0], 0), found[1] + 1)
    return counts
