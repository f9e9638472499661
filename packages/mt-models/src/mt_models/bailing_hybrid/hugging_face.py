"""Ling 3.0 in Hugging Face's format, `bailing_hybrid`: tensors under the names of published files.

transformers has other names in memory, with the convolutions and the experts of a layer each in one tensor; those are
read too. It ignores the limits of activations that Ling 3.0 Flash was trained with, which are applied here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.bailing_hybrid.config import BailingHybridConfig
from mt_models.blocks.hugging_face_decoder import (
    FULL,
    OURS,
    PRE_NORMS,
    ROPE_KEYS,
    THEIRS,
    decoder_fields,
    decoder_name_map,
    export_rope,
    feed_forward_rules,
    import_rope,
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

KIND = "bailing_hybrid"
NAMES = ExpertNames(expert_bias="mlp.gate.expert_bias")
ATTENTION = f"{THEIRS}attention."


# -- tensors -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfHeads(Rule):
    """[heads], also where a file has it as [1, 1, heads, 1]."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].flatten()

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor]


def name_map(config: BailingHybridConfig) -> NameMap:
    rules = [rule for number in range(config.num_layers) for rule in _layer_rules(config, number)]
    prediction = deepseek.prediction_rules(config, _layer_rules, final_norm="final_layernorm")
    names = decoder_name_map(config, [*rules, *prediction])
    embedding = Same("embedding.word_embeddings.weight", "model.word_embeddings.weight")
    others = [rule for rule in names.rules if rule.ours != embedding.ours]
    return NameMap([embedding, *others], 0, names.ignored | deepseek.unread_prediction(config))


def _layer_rules(config: BailingHybridConfig, number: int) -> list[Rule]:
    """Rules of layer `number`; the layers of multi-token prediction are numbered after the others."""
    block = _delta_rules(config) if config.linear_layers[number] else _latent_rules(config)
    return [rule.for_layer(number) for rule in (*norm_rules(PRE_NORMS), *block, *_feed_forward(config, number))]


def _delta_rules(config: BailingHybridConfig) -> list[Rule]:
    ours, width, heads = f"{OURS}self_attention.", config.linear_key_size, config.linear_num_key_heads
    same = {
        "forget_proj.weight": "f_proj.weight",
        "gate_proj.weight": "g_proj.weight",
        "dt_bias": "dt_bias",
        "out_norm.weight": "o_norm.weight",
        "out_proj.weight": "o_proj.weight",
    }
    projections = tuple(f"{ATTENTION}{name}_proj.weight" for name in "qkvb")
    convolutions = tuple(f"{ATTENTION}{name}_conv1d.weight" for name in "qkv")
    return [
        Blocks(f"{ours}in_proj.weight", projections, sizes=(width, width, width, heads)),
        Blocks(f"{ours}conv1d.weight", convolutions, sizes=(width, width, width)),
        OfHeads(f"{ours}A_log", f"{ATTENTION}A_log"),
        *(Same(ours + canonical, ATTENTION + external) for canonical, external in same.items()),
    ]


def _latent_rules(config: BailingHybridConfig) -> list[Rule]:
    gate = Same(f"{OURS}self_attention.linear_gate.weight", f"{THEIRS}self_attn.g_proj.weight")
    rules = (*deepseek.latent_rules(config), gate)
    return [replace(rule, theirs=_published(rule.sources[0], linear=False)) for rule in rules]


def _feed_forward(config: BailingHybridConfig, number: int) -> list[Rule]:
    if config.moe is not None and MoEOptions(config).layers[number]:
        return expert_rules(MoEOptions(config), NAMES, always_biased=True)
    return feed_forward_rules()


SPELLINGS = (
    (r"^model\.embed_tokens\.", "model.word_embeddings."),
    (r"\.self_attn\.", ".attention."),
    (r"\.forget_gate\.", "."),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.gate.expert_bias"),
)
"""From names of transformers to published ones, one after the other."""


def _published(name: str, *, linear: bool) -> str:
    """linear: whether it is of a layer of Kimi delta attention, whose output projection has a name of its own."""
    for pattern, instead in SPELLINGS:
        name = re.sub(pattern, instead, name)
    return re.sub(r"\.attention\.(dense|o_proj)\.", f".attention.{'o_proj' if linear else 'dense'}.", name)


def spelling(config: BailingHybridConfig, name: str) -> str:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    number = int(layer[1]) if layer else 0
    return _published(name, linear=number < config.num_layers and config.linear_layers[number])


def left_out_copies(config: BailingHybridConfig) -> dict[str, str]:
    names = {"model.embed_tokens.weight": "model.word_embeddings.weight"}
    copies = deepseek.prediction_copies(config)
    return {copy: names.get(original, original) for copy, original in copies.items()}


def held(external: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Without layers of multi-token prediction where a file has none."""
    return deepseek.held({"num_hidden_layers": 42, **external}, names)


# -- configuration -----------------------------------------------------------------------------------

EXPERTS: Mapping[str, Any] = {
    "first_k_dense_replace": 2,
    "num_experts": 512,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 768,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
}
"""Defaults of the class."""
IN_DEEPSEEK = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
BALANCE = {"aux_loss_alpha": 0.0001}
"""A coefficient for training, which the class has not."""
COUNT = "num_nextn_predict_layers"
GROUP, SHARE = "layer_group_size", "partial_rotary_factor"
DELTA_KEYS = {
    "linear_num_heads": ("num_attention_heads", 32),
    "linear_head_dim": ("head_dim", 128),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", 4),
}
"""Keys of files that transformers writes -> those of published ones, with the defaults of the class."""
LIMITS = {
    "expert_swiglu_limits": "expert_swiglu_limit_list",
    "shared_expert_swiglu_limits": "share_expert_swiglu_limit_list",
}


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    heads, layers = external.get("num_attention_heads", 32), external["num_hidden_layers"]
    if external.get("num_key_value_heads") not in (None, heads):
        raise ConfigError(
            f"num_key_value_heads={external['num_key_value_heads']} is not supported; it can be "
            f"num_attention_heads={heads}"
        )
    sizes = {key: external.get(key, external.get(name, default)) for key, (name, default) in DELTA_KEYS.items()}
    values = {
        **_import_rope(external),
        "linear_num_key_heads": sizes["linear_num_heads"],
        "linear_num_value_heads": sizes["linear_num_heads"],
        "linear_key_head_dim": sizes["linear_head_dim"],
        "linear_value_head_dim": sizes["linear_head_dim"],
        "linear_conv_kernel_dim": sizes["linear_conv_kernel_dim"],
        "linear_attention_freq": import_kinds({"layer_types": _kinds(external, layers)}, layers),
        **{ours: _import_limits(external, theirs) for ours, theirs in LIMITS.items()},
        **_import_experts(external),
    }
    if float(external.get("rms_norm_eps", 1e-6)) != deepseek.NORM_EPSILON:
        values["latent_norm_epsilon"] = deepseek.NORM_EPSILON
    if external.get("kda_safe_gate", True):
        values["linear_decay_lower_bound"] = float(external.get("kda_lower_bound", -5.0))
    return values


def _import_rope(external: Mapping[str, Any]) -> dict[str, Any]:
    values = import_rope(external, 6000000.0)
    rotated = external.get("qk_rope_head_dim", 64)
    if external.get("rotary_dim") not in (None, rotated):
        raise ConfigError(f"rotary_dim={external['rotary_dim']} is not supported; it can be qk_rope_head_dim={rotated}")
    if "rope_scaling_type" in values and external.get(SHARE) not in (None, 1.0):
        raise ConfigError(f"{SHARE}={external[SHARE]} is not supported with scaled frequencies; it can be left out")
    return values


def _kinds(external: Mapping[str, Any], layers: int) -> Sequence[Any]:
    """The kind of each layer. Raises ConfigError for layers behind the last whole group, of which programs differ on
    the kind."""
    if (kinds := external.get("layer_types")) is not None:
        return list(kinds)
    group = external.get(GROUP, 6)
    if layers % group:
        raise ConfigError(
            f"{GROUP}={group} does not divide num_hidden_layers={layers}, and programs differ on the kind of the "
            "layers behind the last whole group; say the kinds by layer_types"
        )
    return [LINEAR if (layer + 1) % group else FULL for layer in range(layers)]


def _import_limits(external: Mapping[str, Any], key: str) -> list[float] | None:
    """Null for lists without any limit. Raises ConfigError for limits of layers of multi-token prediction."""
    limits, layers = [float(limit or 0.0) for limit in external.get(key) or ()], external["num_hidden_layers"]
    if any(limits[layers:]) and external.get(COUNT):
        raise ConfigError(
            f"{key} has the limits {limits[layers:]} behind those of num_hidden_layers={layers}, which is not "
            "supported: layers of multi-token prediction have none"
        )
    limits, missing = limits[:layers], layers - len(limits)
    return limits + [0.0] * missing if any(limits) else None


def _import_experts(external: Mapping[str, Any]) -> dict[str, Any]:
    stated = {key: external[key] for key in (*EXPERTS, deepseek.KINDS) if external.get(key) is not None}
    _require_shared_width({**EXPERTS, **external})
    layers = external["num_hidden_layers"]
    with_defaults = {**EXPERTS, **BALANCE, **stated, "num_hidden_layers": layers}
    if deepseek.KINDS in stated:
        # The class reads the list alone, and writes its default of the number beside it.
        del with_defaults["first_k_dense_replace"]
    if not any(deepseek.sparse_layers(with_defaults, dense=2, layers=layers)):
        return {}
    with_defaults = {IN_DEEPSEEK.get(key, key): value for key, value in with_defaults.items()}
    _require_normalized(with_defaults)
    moe = deepseek.import_moe(with_defaults, dense=2, shared=1, layers=42, scale=2.5)
    moe |= {
        "moe_router_score_function": "sigmoid",
        **import_bias(external),
        **import_groups(with_defaults, score_topk=2),
    }
    return {"moe": moe}


def _require_normalized(external: Mapping[str, Any]) -> None:
    several = external["num_experts_per_tok"] > 1
    if bool(external["norm_topk_prob"]) != several:
        raise ConfigError(
            f"norm_topk_prob (or moe_renormalize)={external['norm_topk_prob']} is not supported; it can be {several}, "
            f"since num_experts_per_tok (or num_experts_per_token)={external['num_experts_per_tok']}"
        )


def _require_shared_width(external: Mapping[str, Any]) -> None:
    width, count = external["moe_intermediate_size"], external["num_shared_experts"]
    if external.get("moe_shared_expert_intermediate_size") not in (None, width, width * count):
        raise ConfigError(
            f"moe_shared_expert_intermediate_size={external['moe_shared_expert_intermediate_size']} is not supported; "
            f"it can be moe_intermediate_size={width}"
        )


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = BailingHybridConfig.model_validate(model)
    require_value(config, "normalization", ("RMSNorm",), KIND)
    require_value(config, "untie_embeddings_and_output_weights", (True,), KIND)
    require_value(config, "latent_epsilon", (deepseek.NORM_EPSILON,), KIND)
    kinds, bound = export_kinds(config), config.linear_decay_lower_bound
    every = config.linear_attention_freq
    return {
        **export_rope(config),
        # The class takes linear_head_dim from head_dim, and published code has no other key.
        "head_dim": config.linear_key_head_dim,
        "short_conv_kernel_size": config.linear_conv_kernel_dim,
        "linear_num_heads": config.linear_num_key_heads,
        "linear_head_dim": config.linear_key_head_dim,
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "layer_types": kinds,
        **({GROUP: every} if isinstance(every, int) and config.num_layers % every == 0 else {}),
        "kda_safe_gate": bound is not None,
        **({} if bound is None else {"kda_lower_bound": bound}),
        **{theirs: getattr(config, ours) for ours, theirs in LIMITS.items() if getattr(config, ours) is not None},
        # Its default would have to be within the vocabulary, and keep the row of that token from being trained.
        "pad_token_id": None,
        "num_key_value_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_size,
        **_export_experts(config),
    }


def _export_experts(config: BailingHybridConfig) -> dict[str, Any]:
    if config.moe is None:
        return deepseek.export_kinds(config)
    moe = MoEOptions(config)
    moe.require(
        KIND,
        **deepseek.EXPRESSED,
        moe_router_score_function=("sigmoid",),
        moe_router_enable_expert_bias=ANY,
        moe_router_group_score_topk=group_scores(moe, 2),
    )
    return {
        **export_bias(moe),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "num_shared_experts": shared_experts(moe, KIND),
        "moe_intermediate_size": moe.ffn_size,
        "norm_topk_prob": moe.topk > 1,
        "routed_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
        "n_group": moe["moe_router_num_groups"] or 1,
        "topk_group": moe["moe_router_group_topk"] or 1,
        **deepseek.export_kinds(config),
    }


IN_CLASS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_local_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "n_shared_experts": "num_shared_experts",
    "num_mtp_layers": COUNT,
}
"""Keys that transformers writes -> those of published files, which are written."""
BAILING_HYBRID = ConfigMap(
    architecture=KIND,
    fields=(
        *(
            entry
            for entry in decoder_fields(tied=False, positions=262144)
            if entry.theirs != "tie_word_embeddings"
        ),
        *(Field(entry.theirs, entry.ours, default=entry.default) for entry in deepseek.FIELDS),
        Field(COUNT, "mtp_num_layers", import_value=lambda count: int(count or 0), default=0),
    ),
    fixed=(
        SILU,
        Fixed("attention_bias", (False,)),
        Fixed("tie_word_embeddings", (False,)),
        *(
            Fixed(key, (value,), written=False)
            for key, value in {
                "gated_attention_proj_granularity_type": "head_wise",
                "linear_attention": "kda",
                "linear_silu": True,
                "no_kda_lora": True,
                "use_kda_lora": False,
                "use_mla_nope": False,
                "use_qk_norm": True,
                "use_rmsnorm": True,
                "use_qkv_bias": False,
                "use_bias": False,
                "use_nGPT": False,
                "value_norm": False,
                "up_proj_norm": False,
                "norm_head": False,
                "scale_router_input": False,
                "rope_interleave": True,
                "score_function": "sigmoid",
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                "mtp_use_kda": False,
            }.items()
        ),
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        "mtp_loss_scaling_factor": "of the loss in the publisher's training; model.mtp_loss_scaling_factor sets it",
        **dict.fromkeys(
            ("group_norm_size", "num_kv_heads_for_linear_attn", "embedding_dropout", "output_dropout"),
            "no layer of the class reads it",
        ),
        "qk_head_dim": "the sum of other fields",
        "pretraining_tp": "how another program computed matrices",
        "router_dtype": "of the router's products, which are fp32",
        "seq_aux": "of a loss in training; model.moe chooses one",
        "max_window_layers": "of windows, which the layers have not",
    },
    import_extra=import_extra,
    import_extra_keys=(
        *ROPE_KEYS, *DELTA_KEYS, *EXPERTS, "head_dim", "short_conv_kernel_size", "layer_types", GROUP, SHARE,
        "rotary_dim", "num_key_value_heads", deepseek.KINDS, BIAS_KEY, "moe_shared_expert_intermediate_size",
        "kda_safe_gate", "kda_lower_bound", *LIMITS.values(),
    ),
    export_extra=export_extra,
    spellings=IN_CLASS,
)  # fmt: skip

HUGGING_FACE = HuggingFaceFamily(
    family="bailing_hybrid",
    model_types={KIND: BAILING_HYBRID},
    name_map=name_map,
    spelling=spelling,
    left_out_copies=left_out_copies,
    held=held,
    architectures={KIND: "BailingHybridForCausalLM"},
)
