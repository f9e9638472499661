"""Granite-MoE in Hugging Face's format, whose files hold the experts of a layer in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.name_map import NameMap, Same
from mt_models.blocks.hugging_face_decoder import (
    OURS,
    PRE_NORMS,
    ROPE_KEYS,
    THEIRS,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    export_rope,
    import_rope,
    norm_rules,
)
from mt_models.blocks.hugging_face_moe import MOE_IGNORED, SILU, export_balance, import_balance
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.granite.hugging_face import FACTORS
from mt_models.granite_moe.config import GraniteMoeConfig
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output

EXPERTS = {
    "mlp.router.weight": "block_sparse_moe.router.layer.weight",
    "mlp.experts.linear_fc1.weight": "block_sparse_moe.input_linear.weight",
    "mlp.experts.linear_fc2.weight": "block_sparse_moe.output_linear.weight",
}
IN_MEMORY = {
    "mlp.router.weight": "block_sparse_moe.router.weight",
    "mlp.experts.linear_fc1.weight": "block_sparse_moe.experts.gate_up_proj",
    "mlp.experts.linear_fc2.weight": "block_sparse_moe.experts.down_proj",
}
"""Names of the same tensors in models of transformers since 5.24."""
MOE_KEYS = ("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef")


def name_map(config: GraniteMoeConfig) -> NameMap:
    # input_linear [experts, 2 ffn, hidden], gate rows first, output_linear
    # [experts, hidden, ffn]: the canonical layout.
    experts = [
        Same(f"{OURS}{ours}", f"{THEIRS}{theirs}", others=(Same(f"{OURS}{ours}", f"{THEIRS}{IN_MEMORY[ours]}"),))
        for ours, theirs in EXPERTS.items()
    ]
    return decoder_name_map(config, [*norm_rules(PRE_NORMS), *attention_rules(config), *experts])


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    moe = {
        "num_experts": external.get("num_local_experts", 8),
        "moe_router_topk": external.get("num_experts_per_tok", 2),
        **import_balance(external, default=0.001),
    }
    return {**import_rope(external), "moe": moe}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = GraniteMoeConfig.model_validate(model)
    moe = MoEOptions(config)
    moe.require("granitemoe", moe_ffn_hidden_size=ANY, moe_router_topk=ANY)
    return {
        **export_rope(config),
        **export_balance(moe),
        "num_key_value_heads": config.query_groups,
        "attention_multiplier": config.attention_multiplier or config.head_dim**-0.5,
        "intermediate_size": moe.ffn_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
    }


GRANITE_MOE = ConfigMap(
    architecture="granitemoe",
    fields=(
        *decoder_fields(tied=False, positions=2048),
        Field("num_key_value_heads", "num_query_groups"),
        *FACTORS,
    ),
    fixed=(SILU, Fixed("attention_bias", (False,)), *NOT_A_CHOICE),
    ignored={**IGNORED, **MOE_IGNORED},
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, *MOE_KEYS),
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="granite_moe",
    model_types={"granitemoe": GRANITE_MOE},
    name_map=name_map,
    copies=tied_output,
    architectures={"granitemoe": "GraniteMoeForCausalLM"},
)
