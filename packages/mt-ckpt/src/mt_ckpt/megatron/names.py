"""Names of parameters in Megatron-Core's files, and the canonical ones.

They differ in few things: Transformer Engine keeps a norm inside the linear layer that follows it; experts stand one
by one instead of stacked; layers are numbered within the file; some tensors are stored twice; a few have other names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mt_ckpt.megatron.versions import Conventions

EXTRA_STATE = "_extra_state"
"""Extra state of Transformer Engine's FP8 scaling; holds no weight."""
LATENT_NORMS: Mapping[str, str] = {
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
}
FUSED_NORMS: Mapping[str, str] = {
    "self_attention.linear_qkv": "input_layernorm",
    **LATENT_NORMS,
    "mlp.linear_fc1": "pre_mlp_layernorm",
    "mixer.in_proj": "norm",
}
"""Linear layer -> the norm before it, which Transformer Engine's layers, and torch_dist whatever the layers, keep as
the linear layer's `layer_norm_weight` and `layer_norm_bias`."""
POSITION_DUPLICATES: Mapping[str, str] = {"position_embeddings.weight": "embedding.position_embeddings.weight"}
OUTPUT_DUPLICATES: Mapping[str, str] = {
    "lm_head.output_layer.weight": "output_layer.weight",
    "lm_head.output_layer.bias": "output_layer.bias",
}
DUPLICATES: Mapping[str, str] = {**POSITION_DUPLICATES, **OUTPUT_DUPLICATES}
"""What Megatron's T5 stores twice -> the name that stays."""
RENAMED: Mapping[str, str] = {
    f"decoder.final_norm.{leaf}": f"decoder.final_layernorm.{leaf}" for leaf in ("weight", "bias")
}
"""Names of models with Mamba layers -> canonical."""
STREAM_HEAD: Mapping[str, str] = {
    "hc_head_fn": "hyper_head.weight",
    "hc_head_base": "hyper_head.bias",
    "hc_head_scale": "hyper_head.scale",
}
"""Parameters of the sum of residual streams behind the last layer, or in a depth of prediction -> canonical."""
INNER, CONNECTION = ".inner_layer.", "hyper_connection."
"""In models with Mamba layers, a layer is kept within its connection with residual streams."""
_HYBRID = {canonical: stored for stored, canonical in RENAMED.items()}
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
EXPERTS = ".mlp.experts."
MTP = "mtp.layers."
BEFORE_MLP = "pre_mlp_layernorm"
CONVOLUTION, PREDICTION = ".mixer.conv1d.", ".mtp_model_layer."
DIST_RENAMED: Mapping[str, str] = {PREDICTION: ".transformer_layer."}
"""`Style.renamed` of the `torch_dist` format, the same in all versions."""
_LAYER = re.compile(r"^(encoder|decoder)\.layers\.(\d+)\.")
_WITHIN = re.compile(r"^(decoder\.layers\.\d+)\.(?!hyper_connection\.)")
# What stands before the modules of a layer, in a stack or in a depth of multi-token prediction.
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
    # DDP, Float16Module and older wrappers each add one "module.".
    while name.startswith("module."):
        name = name.removeprefix("module.")
    # First to one form of the names: the tables below have only that.
    for pattern, newer in _OLDER:
        name = pattern.sub(newer, name)
    # mlp.linear_fc1.layer_norm_weight -> pre_mlp_layernorm.weight
    for linear, norm in FUSED_NORMS.items():
        name = name.replace(f".{linear}.layer_norm_", f".{norm}.")
    name = DUPLICATES.get(name, name)
    name = _with_ending(RENAMED.get(name, name), STREAM_HEAD).replace(INNER, ".")
    for form in _EXPERT_FORMS:
        if match := form.fullmatch(name):
            return StoredName(f"{match['stem']}.{match['leaf']}", int(match["expert"]))
    return StoredName(name.replace(".mlp.experts.experts.", EXPERTS))


_STREAM_HEAD = {canonical: stored for stored, canonical in STREAM_HEAD.items()}


def _with_ending(name: str, endings: Mapping[str, str]) -> str:
    """The name with the ending of a module's parameter replaced that stands in the table."""
    for ending, other in endings.items():
        if name.endswith(f".{ending}"):
            return name.removesuffix(ending) + other
    return name


@dataclass(frozen=True)
class Style:
    """How a checkpoint names the parameters of a model.

    fused: norms stand under the linear layers behind them: where such a layer is ("beside"), even in layers whose
    feed-forward is experts ("always"), or not at all ("never"). hybrid: the model is one of those with Mamba layers.
    parameters: all, canonical. apart: norms that no linear layer has, however others are. renamed: part of a canonical
    name -> part of the stored one.
    """

    fused: Literal["never", "beside", "always"]
    hybrid: bool
    parameters: Collection[str] = field(repr=False)
    apart: Collection[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    _norms: Mapping[str, str] = field(init=False, repr=False)
    _connected: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        connected = any(f".{CONNECTION}" in name for name in self.parameters)
        object.__setattr__(self, "_connected", self.hybrid and connected)
        object.__setattr__(self, "_norms", dict(self._fused_norms()) if self.fused != "never" else {})

    def _fused_norms(self) -> Iterable[tuple[str, str]]:
        """(canonical norm, the linear layer that has it)"""
        modules = {name.rpartition(".")[0] for name in self.parameters}
        for stem in {match[0] for name in self.parameters if (match := _STEM.match(name))}:
            for linear, norm in FUSED_NORMS.items():
                if norm in self.apart:
                    continue
                # torch_dist files a norm under mlp.linear_fc1 even where the feed-forward is experts, which have no
                # such layer.
                experts = norm == BEFORE_MLP and self.fused == "always" and f"{stem}mlp.router" in modules
                if stem + norm in modules and (experts or stem + linear in modules):
                    yield stem + norm, stem + linear

    def stored(self, name: str) -> str:
        """The name in the file, the layer's number as it is."""
        module, _, leaf = name.rpartition(".")
        if module in self._norms:
            name = f"{self._norms[module]}.layer_norm_{leaf}"
        elif self.hybrid:
            name = _HYBRID.get(name, name)
        name = _with_ending(name, _STREAM_HEAD)
        if self._connected:
            name = _WITHIN.sub(rf"\1{INNER}", name)
        for canonical, stored in self.renamed.items():
            name = name.replace(canonical, stored)
        return name


def torch_renamed(version: Conventions) -> Mapping[str, str]:
    """`Style.renamed` of the `torch` format."""
    return {CONVOLUTION: f".mixer.{version.convolution}", PREDICTION: f".{version.prediction_layer}."}


def duplicates(version: Conventions, *, distributed: bool) -> Mapping[str, str]:
    """What a version's T5 stores twice, in `torch_dist` or in `torch`."""
    positions = POSITION_DUPLICATES if version.position_table_twice else {}
    outputs = OUTPUT_DUPLICATES if version.output_bias_twice or not distributed else {}
    return {**positions, **outputs}


def norms_apart(version: Conventions) -> Collection[str]:
    """`Style.apart` of a version."""
    return () if version.latent_norms_fused else tuple(LATENT_NORMS.values())


def layer_of(name: str) -> tuple[str, int] | None:
    """("decoder", 3) for a parameter of a layer, else None."""
    match = _LAYER.match(name)
    return (match[1], int(match[2])) if match else None


def renumbered(name: str, offsets: Mapping[str, int]) -> str:
    """`name` with the number of its layer raised by the offset of its stack."""
    layer = layer_of(name)
    if layer is None or not offsets.get(layer[0]):
        return name
    stack, number = layer
    return _LAYER.sub(f"{stack}.layers.{number + offsets[stack]}.", name)


def layer_counts(names: Iterable[str]) -> dict[str, int]:
    """Stack -> number of layers that the names number."""
    counts: dict[str, int] = {}
    for name in names:
        if layer := layer_of(name):
            counts[layer[0]] = max(counts.get(layer[0], 0), layer[1] + 1)
    return counts
