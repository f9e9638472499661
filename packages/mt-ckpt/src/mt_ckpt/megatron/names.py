"""Names of parameters in Megatron-Core's files, and the canonical ones.

They differ in few things: Transformer Engine keeps a norm inside the linear layer that follows it; experts stand one
by one instead of stacked; layers are numbered within the file; some tensors are stored twice; a few have other names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

EXTRA_STATE = "_extra_state"
"""Of Transformer Engine's FP8 scaling; holds no weight."""
FUSED_NORMS: Mapping[str, str] = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
    "mixer.in_proj": "norm",
}
"""Linear layer -> the norm before it, which Transformer Engine's layers, and torch_dist whatever the layers, keep as
the linear layer's `layer_norm_weight` and `layer_norm_bias`."""
DUPLICATES: Mapping[str, str] = {
    "position_embeddings.weight": "embedding.position_embeddings.weight",
    "lm_head.output_layer.bias": "output_layer.bias",
}
"""What Megatron's T5 stores twice -> the name that stays."""
RENAMED: Mapping[str, str] = {
    "decoder.final_norm.weight": "decoder.final_layernorm.weight",
}
"""Of models with Mamba layers -> canonical."""
_HYBRID = {canonical: stored for stored, canonical in RENAMED.items()}
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
EXPERTS = ".mlp.experts."
MTP = "mtp.layers."
BEFORE_MLP = "pre_mlp_layernorm"
_LAYER = re.compile(r"^(encoder|decoder)\.layers\.(\d+)\.")
_STEM = re.compile(r"^(?:(?:encoder|decoder)\.layers\.\d+|mtp\.layers\.\d+\.mtp_model_layer)\.")
_OLDER = (
    (re.compile(r"^(mtp\.layers\.\d+)\.transformer_layer\."), r"\1.mtp_model_layer."),
    (re.compile(r"\.mixer\.conv1d_(weight|bias)$"), r".mixer.conv1d.\1"),
)
"""Names that versions of Megatron gave the same thing."""
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
    for pattern, newer in _OLDER:
        name = pattern.sub(newer, name)
    for linear, norm in FUSED_NORMS.items():
        name = name.replace(f".{linear}.layer_norm_", f".{norm}.")
    name = DUPLICATES.get(name, name)
    name = RENAMED.get(name, name)
    for form in _EXPERT_FORMS:
        if match := form.fullmatch(name):
            return StoredName(f"{match['stem']}.{match['leaf']}", int(match["expert"]))
    return StoredName(name.replace(".mlp.experts.experts.", EXPERTS))


@dataclass(frozen=True)
class Style:
    """How a checkpoint names the parameters of a model.

    fused: norms stand under the linear layers behind them: where such a layer is ("beside"), even in layers whose
    feed-forward is experts ("always"), or not at all ("never"). hybrid: the model is one of those with Mamba layers.
    parameters: all, canonical.
    """

    fused: Literal["never", "beside", "always"]
    hybrid: bool
    parameters: Collection[str] = field(repr=False)
    _norms: Mapping[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_norms", dict(self._fused_norms()) if self.fused != "never" else {})

    def _fused_norms(self) -> Iterable[tuple[str, str]]:
        """(canonical norm, the linear layer that has it)"""
        modules = {name.rpartition(".")[0] for name in self.parameters}
        for stem in {match[0] for name in self.parameters if (match := _STEM.match(name))}:
            for linear, norm in FUSED_NORMS.items():
                experts = norm == BEFORE_MLP and self.fused == "always" and f"{stem}mlp.router" in modules
                if stem + norm in modules and (experts or stem + linear in modules):
                    yield stem + norm, stem + linear

    def stored(self, name: str) -> str:
        """The name in the file, the layer's number as it is."""
        module, _, leaf = name.rpartition(".")
        if module in self._norms:
            return f"{self._norms[module]}.layer_norm_{leaf}"
        return _HYBRID.get(name, name) if self.hybrid else name


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


def layer_counts(names: Iterable[str]) -> dict[str, int]:
    """Stack -> number of layers that the names number."""
    counts: dict[str, int] = {}
    for name in names:
        if found := layer_of(name):
            counts[found[0]] = max(counts.get(found[0], 0), found[1] + 1)
    return counts
