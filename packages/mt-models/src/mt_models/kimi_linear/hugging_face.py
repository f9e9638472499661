"""Kimi Linear in Hugging Face's format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    FULL,
    OURS,
    PRE_NORMS,
    ROPE_KEYS,
    THEIRS,
    decoder_fields,
    decoder_name_map,
    feed_forward_rules,
    norm_rules,
)
from mt_models.blocks.hugging_face_delta_net import LINEAR, Blocks, export_kinds, import_kinds
from mt_models.blocks.hugging_face_moe import (
    BIAS_KEY,
    MOE_IGNORED,
    SILU,
    ExpertNames,
    expert_rules,
    export_bias,
    group_scores,
    import_bias,
    import_groups,
    shared_experts,
)
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.deepseek import hugging_face as deepseek
from mt_models.hugging_face import IGNORED, HuggingFaceFamily, require_value
from mt_models.kimi_linear.config import KimiLinearConfig

KIND = "kimi_linear"
MOE = "block_sparse_moe."
NAMES = ExpertNames(
    router=f"{MOE}gate.weight",
    gate=f"{MOE}experts.{{e}}.w1.weight",
    up=f"{MOE}experts.{{e}}.w3.weight",
    down=f"{MOE}experts.{{e}}.w2.weight",
    shared=f"{MOE}shared_experts",
    expert_bias=f"{MOE}gate.e_score_correction_bias",
)


# -- tensors -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfHeads(Rule):
    """[heads] here, [1, 1, heads, 1] there."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].flatten()

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.reshape(1, 1, -1, 1)]


def name_map(config: KimiLinearConfig) -> NameMap:
    rules: list[Rule] = []
    for number, linear in enumerate(config.linear_layers):
        block = delta_rules(config) if linear else deepseek.latent_rules(config)
        layer = (*norm_rules(PRE_NORMS), *block, *_feed_forward(config, number))
        rules += [rule.for_layer(number) for rule in layer]
    return decoder_name_map(config, rules)


LOW_RANK_GATE = {"gate_down_proj.weight": "g_a_proj.weight", "gate_up_proj.weight": "g_b_proj.weight"}


def delta_rules(
    config: KimiLinearConfig,
    rates: Callable[[str, str], Rule] = OfHeads,
    gate: Mapping[str, str] = LOW_RANK_GATE,
) -> list[Rule]:
    """rates: makes the rule of A_log. gate: our names of the gate of the output -> theirs."""
    ours, theirs = f"{OURS}self_attention.", f"{THEIRS}self_attn."
    width, heads = config.linear_key_size, config.linear_num_key_heads
    same = {
        "forget_down_proj.weight": "f_a_proj.weight",
        "forget_up_proj.weight": "f_b_proj.weight",
        **gate,
        "dt_bias": "dt_bias",
        "out_norm.weight": "o_norm.weight",
        "out_proj.weight": "o_proj.weight",
    }
    projections = tuple(f"{theirs}{name}_proj.weight" for name in "qkvb")
    convolutions = tuple(f"{theirs}{name}_conv1d.weight" for name in "qkv")
    return [
        Blocks(f"{ours}in_proj.weight", projections, sizes=(width, width, width, heads)),
        Blocks(f"{ours}conv1d.weight", convolutions, sizes=(width, width, width)),
        rates(f"{ours}A_log", f"{theirs}A_log"),
        *(Same(ours + canonical, theirs + external) for canonical, external in same.items()),
    ]


def _feed_forward(config: KimiLinearConfig, number: int) -> list[Rule]:
    if config.moe is not None and MoEOptions(config).layers[number]:
        return expert_rules(MoEOptions(config), NAMES, always_biased=True)
    return feed_forward_rules()


def spelling(config: KimiLinearConfig, name: str) -> str:
    """transformers renames dense feed-forwards in saving as if they were mixtures of experts."""
    return re.sub(r"(?<=\.)block_sparse_moe\.(?=(gate|up|down)_proj\.)", "mlp.", name)


# -- configuration -----------------------------------------------------------------------------------

TABLE = "linear_attn_config"
SPELLINGS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
DELTA_KEYS = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim"}
DELTA_KEYS |= {"linear_conv_kernel_dim": "short_conv_kernel_size"}
"""Keys of newer files -> those of `linear_attn_config`, which counts where a file has both."""
DEFAULTS = {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    heads = external.get("num_attention_heads", 32)
    if external.get("num_key_value_heads") not in (None, heads):
        raise ConfigError(
            f"num_key_value_heads={external['num_key_value_heads']} is not supported; it can be "
            f"num_attention_heads={heads}"
        )
    table = external.get(TABLE) or {}
    sizes = {key: table.get(name, external.get(key, DEFAULTS[key])) for key, name in DELTA_KEYS.items()}
    kinds = {"layer_types": layer_kinds(external, table)}
    values = {
        "linear_num_key_heads": sizes["linear_num_heads"],
        "linear_num_value_heads": sizes["linear_num_heads"],
        "linear_key_head_dim": sizes["linear_head_dim"],
        "linear_value_head_dim": sizes["linear_head_dim"],
        "linear_conv_kernel_dim": sizes["linear_conv_kernel_dim"],
        "linear_attention_freq": import_kinds(kinds, external["num_hidden_layers"]),
    }
    if float(external.get("rms_norm_eps", 1e-5)) != deepseek.NORM_EPSILON:
        values["latent_norm_epsilon"] = deepseek.NORM_EPSILON
    return {**values, **import_experts(external)}


def layer_kinds(external: Mapping[str, Any], table: Mapping[str, Any]) -> Sequence[Any]:
    """The kind of each layer: `layer_types`, else the lists of the table, counted from 1, else every fourth from 4."""
    layers = external["num_hidden_layers"]
    if (kinds := external.get("layer_types")) is not None:
        return kinds
    if "full_attn_layers" not in table or "kda_layers" not in table:
        return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(layers)]
    full, linear = set(table["full_attn_layers"]), set(table["kda_layers"])
    if full & linear or full | linear != set(range(1, layers + 1)):
        raise ConfigError(
            f"{TABLE} has full_attn_layers={sorted(full)} and kda_layers={sorted(linear)}; each layer from 1 to "
            f"num_hidden_layers={layers} has to be in one of the two"
        )
    return [FULL if layer + 1 in full else LINEAR for layer in range(layers)]


def import_experts(external: Mapping[str, Any]) -> dict[str, Any]:
    """`moe` where a layer has experts."""
    fields = {
        "n_routed_experts": external.get("num_experts", 256),
        "num_experts_per_tok": external.get("num_experts_per_token", 8),
        "n_shared_experts": external.get("num_shared_experts", 1),
        "moe_intermediate_size": external.get("moe_intermediate_size", 1024),
        "num_hidden_layers": external["num_hidden_layers"],
        "aux_loss_alpha": 0.0001,
    }
    for key in ("first_k_dense_replace", deepseek.KINDS, "routed_scaling_factor"):
        if external.get(key) is not None:
            fields[key] = external[key]
    layers = fields["num_hidden_layers"]
    if not any(deepseek.sparse_layers(fields, dense=1, layers=layers)):
        return {}
    several = fields["num_experts_per_tok"] > 1
    if bool(external.get("moe_renormalize", True)) != several:
        raise ConfigError(
            f"moe_renormalize={external.get('moe_renormalize', True)} is not supported; it can be {several}, since "
            f"num_experts_per_token={fields['num_experts_per_tok']}"
        )
    moe = deepseek.import_moe(fields, dense=1, shared=1, layers=layers, scale=2.446)
    groups = {"n_group": external.get("num_expert_group", 1), "topk_group": external.get("topk_group", 1)}
    moe |= {"moe_router_score_function": "sigmoid", **import_bias(external), **import_groups(groups, score_topk=2)}
    return {"moe": moe}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = KimiLinearConfig.model_validate(model)
    require_value(config, "normalization", ("RMSNorm",), KIND)
    require_value(config, "untie_embeddings_and_output_weights", (True,), KIND)
    require_value(config, "latent_epsilon", (deepseek.NORM_EPSILON,), KIND)
    table = export_table(config)
    return {
        **{key: table[name] for key, name in DELTA_KEYS.items()},
        TABLE: table,
        "layer_types": export_kinds(config),
        # Its default would have to be within the vocabulary, and keep the row of that token from being trained.
        "pad_token_id": None,
        "num_key_value_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_size,
        **export_experts(config),
    }


def export_table(config: KimiLinearConfig) -> dict[str, Any]:
    """`linear_attn_config`: sizes of Kimi delta attention, and the layers of both kinds, counted from 1."""
    kinds = export_kinds(config)
    numbers = {
        kind: [layer + 1 for layer, layer_kind in enumerate(kinds) if layer_kind == kind] for kind in (FULL, LINEAR)
    }
    return {
        "num_heads": config.linear_num_key_heads,
        "head_dim": config.linear_key_head_dim,
        "short_conv_kernel_size": config.linear_conv_kernel_dim,
        "full_attn_layers": numbers[FULL],
        "kda_layers": numbers[LINEAR],
    }


def export_experts(config: KimiLinearConfig, kind: str = KIND, **expressed: tuple[Any, ...]) -> dict[str, Any]:
    """expressed: options of model.moe that the format `kind` can express beside those of this one."""
    if config.moe is None:
        return deepseek.export_kinds(config)
    moe = MoEOptions(config)
    moe.require(
        kind,
        **deepseek.EXPRESSED,
        **expressed,
        moe_router_score_function=("sigmoid",),
        moe_router_enable_expert_bias=ANY,
        moe_router_group_score_topk=group_scores(moe, 2),
    )
    return {
        **export_bias(moe),
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.topk,
        "num_shared_experts": shared_experts(moe, kind),
        "moe_intermediate_size": moe.ffn_size,
        "moe_renormalize": moe.topk > 1,
        "routed_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
        "num_expert_group": moe["moe_router_num_groups"] or 1,
        "topk_group": moe["moe_router_group_topk"] or 1,
        **deepseek.export_kinds(config),
    }


NO_POSITIONS = "of rotary positions, which the class has not"
KIMI_LINEAR = ConfigMap(
    architecture=KIND,
    fields=(
        *(
            replace(entry, theirs=SPELLINGS.get(entry.theirs, entry.theirs))
            for entry in decoder_fields(tied=False, positions=1048576, epsilon=1e-5)
            if entry.theirs != "tie_word_embeddings"
        ),
        *(Field(entry.theirs, entry.ours, default=entry.default) for entry in deepseek.FIELDS),
    ),
    fixed=(
        SILU,
        Fixed("attention_bias", (False,)),
        Fixed("tie_word_embeddings", (False,)),
        Fixed("mla_use_nope", (True,)),
        Fixed("moe_router_activation_func", ("sigmoid",)),
        Fixed("moe_layer_freq", (1,)),
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        **dict.fromkeys((*ROPE_KEYS, "rope_interleave"), NO_POSITIONS),
        "head_dim": "the class computes it from other fields",
        "num_nextn_predict_layers": "of layers that predict further tokens, which the class has not; their tensors are "
        "refused by name",
        "qk_head_dim": "the sum of other fields",
        "use_grouped_topk": "the class has groups by num_expert_group",
        "topk_method": "the class has one way to choose experts",
        "scoring_func": "the class has sigmoid scores; moe_router_activation_func says it in published files",
    },
    import_extra=import_extra,
    import_extra_keys=(
        TABLE, *DELTA_KEYS, "layer_types", "num_key_value_heads", deepseek.KINDS, "first_k_dense_replace", BIAS_KEY,
        "num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size", "moe_renormalize",
        "routed_scaling_factor", "num_expert_group", "topk_group",
    ),
    export_extra=export_extra,
    spellings=SPELLINGS,
)  # fmt: skip

HUGGING_FACE = HuggingFaceFamily(
    family="kimi_linear",
    model_types={KIND: KIMI_LINEAR},
    name_map=name_map,
    spelling=spelling,
    architectures={KIND: "KimiLinearForCausalLM"},
)
