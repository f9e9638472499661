"""Whose names the tensors of a DCP folder have, and what Hugging Face calls them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mt_ckpt.meta.reader import FREQUENCIES
from mt_ckpt.meta.reader import IN_LAYER as META_IN_LAYER
from mt_ckpt.meta.reader import TOP as META_TOP
from mt_core.errors import CheckpointError

PREFIXES = ("", "model.", "app.model.")
"""Before the model's names: none, the key of the model in the saved dictionary, and that of torch's own examples."""


@dataclass(frozen=True)
class Naming:
    """Names of one program. top, in_layer: its name -> Hugging Face's, in_layer without layer and kind.

    layers: what layers are called. halves_rotated: model types whose queries and keys are in Hugging Face's order;
    those of the others are for the rotation of neighbouring channels. of_type: model type -> what `in_layer` has
    further or otherwise there; of names that end in neither weight nor bias, the whole name in the layer.
    """

    program: str
    layers: str
    top: Mapping[str, str]
    in_layer: Mapping[str, str]
    halves_rotated: frozenset[str]
    ignored: frozenset[str] = frozenset()
    of_type: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def mark(self) -> str:
        """The name of the embedding, by which the naming is recognized."""
        return next(name for name, theirs in self.top.items() if theirs == "model.embed_tokens.weight")

    def renamed(self, name: str, model_type: str | None) -> str:
        """Raises CheckpointError for a name that is not known of the program's models of this type."""
        in_layer = {**self.in_layer, **self.of_type.get(model_type or "", {})}
        # The last group is empty for names without a suffix, such as moe.expert_bias.
        match = re.fullmatch(rf"{self.layers}\.([0-9]+)\.(.+?)(\.weight|\.bias|)", name)
        if match and match[2] in in_layer:
            return f"model.layers.{match[1]}.{in_layer[match[2]]}{match[3]}"
        if name not in self.top:
            raise CheckpointError(
                f"tensor {name} is not known of the models of {self.program} with model_type={model_type}; export the "
                "checkpoint to Hugging Face's format there and convert that"
            )
        return self.top[name]


QWEN3_MOE = {"moe.router.gate": "mlp.gate"}
DEEPSEEK_V3 = {
    **QWEN3_MOE,
    "moe.expert_bias": "mlp.gate.e_score_correction_bias",
    "moe.expert_bias_E": "mlp.gate.e_score_correction_bias",
    "moe.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "moe.shared_experts.w2": "mlp.shared_experts.down_proj",
    "moe.shared_experts.w3": "mlp.shared_experts.up_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
}
TORCHTITAN = Naming(
    "torchtitan",
    "layers",
    {**META_TOP, "lm_head.weight": "lm_head.weight"},
    {
        **META_IN_LAYER,
        "attention.qkv_linear.wq": "self_attn.q_proj",
        "attention.qkv_linear.wk": "self_attn.k_proj",
        "attention.qkv_linear.wv": "self_attn.v_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
    },
    halves_rotated=frozenset({"qwen3", "qwen3_moe", "deepseek_v3"}),
    ignored=frozenset({FREQUENCIES, "freqs_cis"}),
    of_type={"qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK_V3},
)
OLMO_CORE = Naming(
    "OLMo-core",
    "blocks",
    {
        "embeddings.weight": "model.embed_tokens.weight",
        "lm_head.norm.weight": "model.norm.weight",
        "lm_head.w_out.weight": "lm_head.weight",
    },
    {
        "attention.w_q": "self_attn.q_proj",
        "attention.w_k": "self_attn.k_proj",
        "attention.w_v": "self_attn.v_proj",
        "attention.w_out": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
    },
    halves_rotated=frozenset({"llama", "qwen2", "qwen3"}),
)
NAMINGS = (TORCHTITAN, OLMO_CORE)


def naming_of(keys: Iterable[str]) -> tuple[Naming, str] | None:
    """The program that wrote these keys, and what stands before its names; None: maybe Hugging Face's names."""
    present = set(keys)
    # The marks differ (tok_embeddings.weight, embeddings.weight), so that at most one program matches.
    matches = [(naming, prefix) for naming in NAMINGS for prefix in PREFIXES if prefix + naming.mark in present]
    return matches[0] if matches else None
