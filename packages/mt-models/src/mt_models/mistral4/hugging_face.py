"""Mistral 4 in Hugging Face's format: the text model, also under the names that it has beside an image tower.

Experts are written in one tensor, as the class saves them; files that have them one by one are read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule
from mt_models.blocks.hugging_face_decoder import (
    PRE_NORMS,
    ROPE_KEYS,
    decoder_fields,
    decoder_name_map,
    export_scaling,
    feed_forward_rules,
    import_rope,
    norm_rules,
    rope_table,
)
from mt_models.blocks.hugging_face_moe import (
    MOE_IGNORED,
    SILU,
    expert_rules,
    first_dense,
    shared_experts,
    written_packed,
)
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.deepseek import hugging_face as deepseek
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value, tied_output
from mt_models.mistral4.config import Mistral4Config

KIND = "mistral4"


def name_map(config: Mistral4Config) -> NameMap:
    sparse = [config.moe is not None] * config.num_layers if config.moe is None else MoEOptions(config).layers
    rules: list[Rule] = []
    for number, has_experts in enumerate(sparse):
        experts = written_packed(expert_rules(MoEOptions(config), deepseek.NAMES)) if has_experts else None
        layer = (*norm_rules(PRE_NORMS), *deepseek.latent_rules(config), *(experts or feed_forward_rules()))
        rules += [rule.for_layer(number) for rule in layer]
    names = decoder_name_map(config, rules)
    return NameMap(names.rules, 0, names.ignored | TOWER)


TOWER = frozenset(
    f"{prefix}{part}.*" for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)
"""Tensors of the image tower of Mistral Small 4, which this family does not have."""


# -- configuration -----------------------------------------------------------------------------------

BETA, SHARE, POSITIONS = "llama_4_scaling_beta", "partial_rotary_factor", "max_position_embeddings"
ORIGINAL = "original_max_position_embeddings"
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    ORIGINAL: 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}
"""What a file without a table means."""
DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 36,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "aux_loss_alpha": 0.0001,
}
"""Defaults of the class, and a coefficient for training, which it has not."""


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    stated = {**DEFAULTS, **{key: value for key, value in external.items() if value is not None}}
    heads = external.get("num_attention_heads", 32)
    if external.get("num_key_value_heads") not in (None, heads):
        raise ConfigError(
            f"num_key_value_heads={external['num_key_value_heads']} is not supported; it can be "
            f"num_attention_heads={heads}"
        )
    whole = external.get("qk_nope_head_dim", 64) + external.get("qk_rope_head_dim", 64)
    if external.get("head_dim") not in (None, whole):
        raise ConfigError(
            f"head_dim={external['head_dim']} is not supported; it can be qk_nope_head_dim + qk_rope_head_dim = {whole}"
        )
    values = _import_rope(external)
    if float(external.get("rms_norm_eps", deepseek.NORM_EPSILON)) != deepseek.NORM_EPSILON:
        values["latent_norm_epsilon"] = deepseek.NORM_EPSILON
    if stated["first_k_dense_replace"] >= stated["num_hidden_layers"]:
        return values
    moe = deepseek.import_moe(stated, dense=0, shared=1, layers=36, scale=1.0)
    # Without the sum over the chosen ones, scores are those of the softmax over all experts.
    return {**values, "moe": moe if external.get("norm_topk_prob", True) else {**moe, "moe_router_pre_softmax": True}}


def _import_rope(external: Mapping[str, Any]) -> dict[str, Any]:
    if all(external.get(key) is None for key in ("rope_parameters", "rope_scaling")):
        external = {**external, "rope_parameters": DEFAULT_ROPE}
    table = rope_table(external)
    table.pop(POSITIONS, None)  # repeats the field beside the table
    rotated, plain = external.get("qk_rope_head_dim", 64), external.get("qk_nope_head_dim", 64)
    share = table.pop(SHARE, None)
    if share is not None and int((rotated + plain) * share) != rotated:
        raise ConfigError(
            f"{SHARE}={share} does not fit qk_rope_head_dim={rotated} and qk_nope_head_dim={plain}; it can be "
            f"{rotated / (rotated + plain)}, or be left out"
        )
    if table["rope_type"] != "yarn" or ORIGINAL not in table or table.get(BETA) is None:
        raise ConfigError(
            f"rope_parameters={table} is not supported; the class needs rope_type yarn, {ORIGINAL} and {BETA}"
        )
    beta = float(table.pop(BETA))
    return {**import_rope({"rope_parameters": table}), "query_scaling_beta": beta}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Mistral4Config.model_validate(model)
    require_value(config, "normalization", ("RMSNorm",), KIND)
    require_value(config, "rope_scaling_type", ("yarn",), KIND)
    if config.latent_epsilon != deepseek.NORM_EPSILON:
        raise ConfigError(
            f"norms of latents with {config.latent_epsilon} cannot be written as a Hugging Face {KIND}; set "
            f"model.latent_norm_epsilon={deepseek.NORM_EPSILON}"
        )
    table = {"rope_theta": config.rotary_base, BETA: config.query_scaling_beta, **(export_scaling(config) or {})}
    return {
        "rope_parameters": {**table, SHARE: config.qk_pos_emb_head_dim / config.head_dim},
        "num_key_value_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_size,
        **_export_experts(config),
    }


def _export_experts(config: Mistral4Config) -> dict[str, Any]:
    if config.moe is None:
        return {"first_k_dense_replace": config.num_layers}
    moe = MoEOptions(config)
    expressed = {key: legal for key, legal in deepseek.EXPRESSED.items() if "group" not in key}
    moe.require(KIND, **expressed, moe_router_pre_softmax=ANY)
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "n_shared_experts": shared_experts(moe, KIND),
        "moe_intermediate_size": moe.ffn_size,
        "norm_topk_prob": not moe["moe_router_pre_softmax"],
        "routed_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
        "first_k_dense_replace": first_dense(moe, KIND),
    }


SIZES = {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64}
MISTRAL4 = ConfigMap(
    architecture=KIND,
    fields=(
        *decoder_fields(tied=False, positions=1048576),
        *(Field(field.theirs, field.ours, default=SIZES.get(field.theirs, field.default)) for field in deepseek.FIELDS),
    ),
    fixed=(
        SILU,
        Fixed("attention_bias", (False,)),
        # The class has no windows, and does not read it.
        Fixed("sliding_window", (None,), written=False),
        Fixed("rope_interleave", (True,)),
        # Groups are ranked by probabilities there, by logits here.
        Fixed("n_group", (1, None)),
        Fixed("topk_group", (1, None)),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        "qk_head_dim": "the sum of other fields",
    },
    import_extra=import_extra,
    import_extra_keys=(
        *ROPE_KEYS, "num_key_value_heads", "head_dim", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
        "moe_intermediate_size", "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace",
    ),
    export_extra=export_extra,
    spellings={"num_local_experts": "n_routed_experts"},
)  # fmt: skip

HUGGING_FACE = HuggingFaceFamily(
    family=KIND,
    model_types={KIND: MISTRAL4},
    name_map=name_map,
    spelling=deepseek.spelling,
    copies=tied_output,
    architectures={KIND: "Mistral4ForCausalLM"},
)
