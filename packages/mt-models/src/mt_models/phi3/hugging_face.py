"""Phi-3 and Phi-4 in Hugging Face's format, whose files hold q, k and v, and gate and up, in one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.name_map import GroupedQKV, NameMap, Same
from mt_models.blocks.hugging_face_decoder import (
    OURS,
    PRE_NORMS,
    ROPE_KEYS,
    THEIRS,
    decoder_fields,
    decoder_name_map,
    export_rope,
    export_shape,
    import_rope_and_share,
    norm_rules,
    rope_table,
)
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.phi3.config import Phi3Config

ORIGINAL = "original_max_position_embeddings"


def name_map(config: Phi3Config) -> NameMap:
    qkv = GroupedQKV(
        f"{OURS}self_attention.linear_qkv.weight",
        f"{THEIRS}self_attn.qkv_proj.weight",
        groups=config.query_groups,
        heads=config.num_attention_heads,
    )
    same = {
        "self_attention.linear_proj": "self_attn.o_proj",
        "mlp.linear_fc1": "mlp.gate_up_proj",  # gate rows first
        "mlp.linear_fc2": "mlp.down_proj",
    }
    rules = [Same(f"{OURS}{ours}.weight", f"{THEIRS}{theirs}.weight") for ours, theirs in same.items()]
    return decoder_name_map(config, [*norm_rules(PRE_NORMS), qkv, *rules])


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    table = rope_table(external, partial_rotary_factor=external.get("partial_rotary_factor", 1.0))
    # The first files called it by other names.
    if table["rope_type"] in ("su", "yarn"):
        table["rope_type"] = "longrope"
    if table["rope_type"] == "longrope":
        # The class takes it from beside the table.
        table[ORIGINAL] = external.get(ORIGINAL, 4096)
    return import_rope_and_share({"rope_parameters": table}, 1.0)


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Phi3Config.model_validate(model)
    return {
        **export_shape(config),
        **export_rope(config),
        "partial_rotary_factor": config.rotary_percent,
        ORIGINAL: config.original_max_position_embeddings or config.max_position_embeddings,
    }


PHI3 = ConfigMap(
    architecture="phi3",
    fields=(
        *decoder_fields(tied=False, epsilon=1e-5, positions=4096),
        Field("num_key_value_heads", "num_query_groups"),
        Field("head_dim", "kv_channels"),
        Field("sliding_window", "sliding_window"),
        Field("resid_pdrop", "residual_dropout", float, default=0.0),
    ),
    fixed=(
        Fixed("hidden_act", ("silu", "swish")),
        Fixed("attention_bias", (False,), written=False),
        Fixed("mlp_bias", (False,), written=False),
        Fixed("lm_head_bias", (False,), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        "embd_pdrop": "the class has no dropout on embeddings",
        "interpolate_factor": "of training code; the class does not read it",
        "full_attn_mod": "of training code; the class does not read it",
    },
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, "partial_rotary_factor", ORIGINAL),
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="phi3",
    model_types={"phi3": PHI3},
    name_map=name_map,
    copies=tied_output,
    architectures={"phi3": "Phi3ForCausalLM"},
)
