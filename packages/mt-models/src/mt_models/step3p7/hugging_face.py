"""The decoder of Step-3.5 and Step-3.7 in Hugging Face's format.

Files hold the decoder beside an image tower (`step3p7`) or alone (`step3p5`, a type of the publisher's code), and
transformers has a class with a head for the former only. Both are read; the decoder is written as `step3p7` with a
tower of no layers, so that the class answers text alone. Tensors have the names of published files.

Published configurations have lists with an entry for each layer, also for those of multi-token prediction, which are
left out here as the class leaves them out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import Concatenate, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    FULL,
    OURS,
    PRE_NORMS,
    QK_NORMS,
    ROPE_KEYS,
    SLIDING,
    THEIRS,
    attention_rules,
    decoder_fields,
    decoder_name_map,
    export_scaling,
    export_shape,
    feed_forward_rules,
    import_scaling,
    layer_types,
    norm_rules,
)
from mt_models.blocks.hugging_face_moe import (
    BIAS_KEY,
    MOE_IGNORED,
    RouterWithoutBias,
    export_bias,
    import_bias,
)
from mt_models.blocks.hugging_face_tower import decoder_within
from mt_models.blocks.hugging_face_windows import import_windows
from mt_models.blocks.moe import ANY, MoEOptions, frequency_of
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value, tied_output
from mt_models.step3p7.config import SCALINGS, Step3p7Config, usual_windows

KIND, TEXT_KIND = "step3p7", "step3p5"
TOWER = frozenset(
    f"{part}.*" for part in ("vision_model", "vit_large_projector", "model.vision_model", "model.multi_modal_projector")
)
"""Tensors of the image tower, which this family does not have."""
PREDICTED_LAYERS = 3
"""The most layers of multi-token prediction that a file has."""


# -- tensors -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StackedHalves(Rule):
    """gate and up of all experts there, [experts, ffn, in] each; here in one tensor, for each expert its gate rows
    first."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors), dim=1)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [part.contiguous() for part in tensor.chunk(2, dim=1)]


def name_map(config: Step3p7Config) -> NameMap:
    layers = [rule for number in range(config.num_layers) for rule in layer_rules(config, number)]
    names = decoder_name_map(config, layers)
    further = range(config.num_layers, config.num_layers + PREDICTED_LAYERS)
    return NameMap(names.rules, 0, names.ignored | TOWER | {f"model.layers.{number}.*" for number in further})


def layer_rules(config: Step3p7Config, number: int) -> list[Rule]:
    bias, sparse = config.attention_bias, config.layers_with_experts[number]
    rules = [
        *norm_rules(PRE_NORMS),
        *norm_rules(QK_NORMS),
        *attention_rules(config.of_layer(number), qkv_bias=bias, output_bias=bias),
        Same(f"{OURS}self_attention.linear_gate.weight", f"{THEIRS}self_attn.g_proj.weight"),
        *(expert_rules(MoEOptions(config)) if sparse else feed_forward_rules()),
    ]
    return [rule.for_layer(number) for rule in rules]


def expert_rules(moe: MoEOptions) -> list[Rule]:
    """Experts of a layer in one tensor for each of gate, up and down; the class has gate and up together."""
    ours, theirs, shared = f"{OURS}mlp.", f"{THEIRS}moe.", f"{THEIRS}share_expert."
    router, bias, fc1 = f"{ours}router.weight", f"{theirs}router_bias", f"{ours}experts.linear_fc1.weight"
    halves = (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")
    routers: list[Rule] = [RouterWithoutBias(router, (f"{theirs}gate.weight", bias))]
    if moe["moe_router_enable_expert_bias"]:
        routers = [Same(router, f"{theirs}gate.weight"), Same(f"{ours}router.expert_bias", bias)]
    return [
        *routers,
        StackedHalves(fc1, halves, others=(Same(fc1, f"{THEIRS}mlp.experts.gate_up_proj"),)),
        Same(f"{ours}experts.linear_fc2.weight", f"{theirs}down_proj.weight"),
        Concatenate(
            f"{ours}shared_experts.linear_fc1.weight", (f"{shared}gate_proj.weight", f"{shared}up_proj.weight")
        ),
        Same(f"{ours}shared_experts.linear_fc2.weight", f"{shared}down_proj.weight"),
    ]


SPELLINGS = (
    (r"^model\.language_model\.", "model."),
    (r"\.mlp\.gate\.weight$", ".moe.gate.weight"),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".moe.router_bias"),
    (r"\.mlp\.experts\.down_proj$", ".moe.down_proj.weight"),
    (r"\.mlp\.shared_experts\.", ".share_expert."),
)
"""From names within the class of transformers to published ones, one after the other."""


def spelling(config: Step3p7Config, name: str) -> str:
    for pattern, instead in SPELLINGS:
        name = re.sub(pattern, instead, name)
    return name


# -- configuration: values by layer --------------------------------------------------------------------

LAYERS, HEADS, GROUPS, HEAD_DIM = 45, 64, 8, 128
"""Defaults of the class."""
PREDICTED = "num_nextn_predict_layers"
EXPERT_LAYERS, EXPERT_NUMBERS = "mlp_layer_types", "moe_layers_enum"
OTHER_HEADS, WINDOW_HEADS, BY_LAYER = "attention_other_setting", "num_sliding_attention_heads", "per_layer_config"
LIMITS = {"expert_swiglu_limits": "swiglu_limits", "shared_expert_swiglu_limits": "swiglu_limits_shared"}


def num_layers(external: Mapping[str, Any]) -> int:
    return int(external.get("num_hidden_layers", LAYERS))


def by_layer(external: Mapping[str, Any], key: str) -> list[Any]:
    """The list under a key, without entries of layers of multi-token prediction."""
    values, layers, further = external[key], num_layers(external), external.get(PREDICTED) or 0
    if len(values) not in (layers, layers + further):
        raise ConfigError(
            f"{key}={list(values)} has {len(values)} entries; it needs one for each of num_hidden_layers={layers}, and "
            f"may have one for each of {PREDICTED}={further}"
        )
    return list(values[:layers])


def import_kinds(external: Mapping[str, Any]) -> list[str]:
    """The kind of each layer."""
    layers = num_layers(external)
    kinds = [FULL] * layers if external.get("layer_types") is None else by_layer(external, "layer_types")
    import_windows(kinds, layers, 1)  # raises for a kind that is none
    return kinds


def import_pattern(kinds: Sequence[str]) -> int | str | None:
    """`window_attn_skip_freq`. None: the pattern of published models."""
    windows = [kind == SLIDING for kind in kinds]
    return None if windows == usual_windows(len(kinds)) else import_windows(kinds, len(kinds), 1)


def import_window(external: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, int]:
    if (window := external.get("sliding_window")) is not None:
        return {"sliding_window": window}
    if SLIDING in kinds:
        raise ConfigError(f"sliding_window=None is not supported with {SLIDING} in layer_types; it can be 1 or more")
    return {}


def import_window_heads(external: Mapping[str, Any], kinds: Sequence[str]) -> int | None:
    """`num_window_attention_heads`: of a table by layer, of a key, or of the publisher's table, in this order."""
    heads = external.get("num_attention_heads", HEADS)
    if SLIDING not in kinds:
        table = external.get(BY_LAYER) or {}
        if any(entry.get("num_attention_heads", heads) != heads for entry in table.values()):
            raise ConfigError(
                f"{BY_LAYER}={dict(table)} has other numbers of query heads than num_attention_heads={heads}, and "
                f"layer_types has no layer with {SLIDING}, which alone can have them"
            )
        return None
    if external.get(BY_LAYER) is not None:
        windowed = _heads_by_layer(external[BY_LAYER], heads, kinds)
    elif external.get(WINDOW_HEADS) is not None:
        windowed = external[WINDOW_HEADS]
    else:
        windowed = _other_heads(external, heads)
    return None if windowed == heads else windowed


def _heads_by_layer(table: Mapping[str, Any], heads: int, kinds: Sequence[str]) -> int:
    """Query heads of the layers with a window."""
    entries = {int(layer): entry for layer, entry in table.items()}
    sizes = [{"num_attention_heads": heads, **entries.get(layer, {})} for layer in range(len(kinds))]
    counts = {kind: {size["num_attention_heads"] for size, other in zip(sizes, kinds, strict=True) if other == kind}
             for kind in (FULL, SLIDING)}  # fmt: skip
    if any(len(size) > 1 for size in sizes) or len(counts[SLIDING]) != 1 or counts[FULL] - {heads}:
        raise ConfigError(
            f"{BY_LAYER}={dict(table)} is not supported: it can have num_attention_heads of the layers that are "
            f"{SLIDING} in layer_types, the same in all of them"
        )
    return int(counts[SLIDING].pop())


def _other_heads(external: Mapping[str, Any], heads: int) -> int:
    table = external.get(OTHER_HEADS) or {}
    expected = {
        "attention_type": SLIDING,
        "num_attention_groups": external.get("num_key_value_heads", GROUPS),
        "head_dim": external.get("head_dim", HEAD_DIM),
        "true_head_dim": external.get("head_dim", HEAD_DIM),
    }
    # The class reads the number of heads alone; the publisher's code reads the others.
    if any(expected.get(key, value) != value for key, value in table.items()):
        raise ConfigError(
            f"{OTHER_HEADS}={dict(table)} is not supported: beside num_attention_heads it can have "
            f"{', '.join(f'{key}={value}' for key, value in expected.items())}"
        )
    return int(table.get("num_attention_heads", heads))


def import_limits(external: Mapping[str, Any], sparse: Sequence[bool]) -> dict[str, list[float] | None]:
    """Null for lists without any limit."""
    limits = {
        ours: [float(limit or 0.0) for limit in by_layer(external, theirs)] if external.get(theirs) else None
        for ours, theirs in LIMITS.items()
    }
    if (routed := limits["expert_swiglu_limits"]) is not None:
        # Those of dense layers, which have no experts, count for nothing.
        limits["expert_swiglu_limits"] = [
            limit if experts else 0.0 for limit, experts in zip(routed, sparse, strict=True)
        ]
    return {key: values if values is not None and any(values) else None for key, values in limits.items()}


# -- configuration: positions --------------------------------------------------------------------------

SHARES = "partial_rotary_factors"


def import_positions(external: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    tables = rope_tables(external, kinds)
    base, share, scaling = rope_of_kind(tables.get(FULL), FULL)
    local, local_share, other = rope_of_kind(tables.get(SLIDING), SLIDING)
    if other:
        raise ConfigError(
            f"rope_parameters.{SLIDING}={dict(tables[SLIDING])} is not supported: rope_type can be default"
        )
    values = {"rotary_base": base, "rotary_percent": share, **scaling}
    return {**values, "rotary_base_local": local, "rotary_percent_local": local_share}


def rope_tables(external: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The table of each kind of layer: from `rope_parameters`, or from the lists of published files."""
    parameters = external.get("rope_parameters") or {}
    if parameters and not all(isinstance(parameters.get(kind), Mapping) for kind in kinds):
        listed = ", ".join(sorted(set(kinds)))
        raise ConfigError(f"rope_parameters={dict(parameters)} is not supported: it has a table for each of {listed}")
    if parameters:
        return {kind: parameters[kind] for kind in kinds}
    tables: dict[str, Mapping[str, Any]] = {}
    for kind in kinds:
        base, share = (_of_kind(external, key, kinds, kind) for key in ("rope_theta", SHARES))
        table = {"rope_theta": base, "partial_rotary_factor": share}
        tables[kind] = {**table, **(external.get("rope_scaling") or {})} if kind == FULL else table
    return tables


def _of_kind(external: Mapping[str, Any], key: str, kinds: Sequence[str], kind: str) -> Any:
    """The value of the layers of a kind, from a list by layer or a number for all. Raises ConfigError where they
    differ."""
    if not isinstance(external.get(key), list):
        return external.get(key)
    if not external[key]:
        return None
    values = {value for value, other in zip(by_layer(external, key), kinds, strict=True) if other == kind}
    if len(values) != 1:
        raise ConfigError(f"{key}={external[key]} is not supported: it has to be the same in all layers of {kind}")
    return values.pop()


def rope_of_kind(table: Mapping[str, Any] | None, kind: str) -> tuple[float | None, float | None, dict[str, Any]]:
    """Base, rotated share and keys of [model] for the scaling; None where there is no such layer."""
    if table is None:
        return None, None, {}
    parameters = {key: value for key, value in table.items() if value is not None}
    base, share = float(parameters.pop("rope_theta", 10000.0)), float(parameters.pop("partial_rotary_factor", 1.0))
    scaling = import_scaling(parameters, f"rope_parameters.{kind}")
    if scaling.get("rope_scaling_type", "none") not in SCALINGS:
        raise ConfigError(
            f"rope_parameters.{kind} or rope_scaling of type {scaling['rope_scaling_type']} is not supported; it can "
            f"be default, {', '.join(SCALINGS[1:])}"
        )
    return base, share, scaling


def export_positions(config: Step3p7Config) -> dict[str, Any]:
    whole = {"rope_theta": config.rotary_base, "partial_rotary_factor": config.rotary_percent}
    local = {"rope_theta": config.rotary_base_local, "partial_rotary_factor": config.rotary_percent_local}
    tables = {
        FULL: {**whole, **(export_scaling(config) or {"rope_type": "default"})},
        SLIDING: {**local, "rope_type": "default"},
    }
    return {kind: tables[kind] for kind in tables if kind in layer_types(config)}


# -- configuration: experts ----------------------------------------------------------------------------

MOE_DEFAULTS: Mapping[str, Any] = {
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_router_scaling_factor": 1.0,
}


def import_sparse(external: Mapping[str, Any]) -> list[bool]:
    """For each layer whether it has experts."""
    layers, numbers = num_layers(external), external.get(EXPERT_NUMBERS)
    if external.get(EXPERT_LAYERS) is not None:
        kinds = by_layer(external, EXPERT_LAYERS)
        if set(kinds) - {"dense", "sparse"}:
            raise ConfigError(f"{EXPERT_LAYERS}={kinds} is not supported; it can be dense or sparse for each layer")
        return [kind == "sparse" for kind in kinds]
    if numbers is None:
        return [layer >= 3 for layer in range(layers)]
    listed = numbers.split(",") if isinstance(numbers, str) else numbers
    sparse = {int(number) for number in listed if str(number).strip()}
    return [layer in sparse for layer in range(layers)]


def import_moe(external: Mapping[str, Any], sparse: list[bool]) -> dict[str, Any]:
    if not any(sparse):
        return {}
    if (topk := external["num_experts_per_tok"]) < 2:
        # The class divides the score of a single expert by itself, and training needs its gradient.
        raise ConfigError(f"num_experts_per_tok={topk} is not supported; it can be 2 or more")
    scale = float(external["moe_router_scaling_factor"])
    return {
        "moe": {
            "num_experts": external["n_routed_experts"],
            "moe_router_topk": topk,
            "moe_ffn_hidden_size": external["moe_intermediate_size"],
            "moe_shared_expert_intermediate_size": external["share_expert_dim"],
            "moe_layer_freq": frequency_of(sparse),
            "moe_router_score_function": "sigmoid",
            # The class has no balance loss.
            "moe_router_load_balancing_type": ["none"],
            **({"moe_router_topk_scaling_factor": scale} if scale != 1.0 else {}),
            **import_bias(external),
        }
    }


EXPRESSED = dict.fromkeys(
    (
        "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_topk_scaling_factor",
        "moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size",
    ),
    ANY,
)  # fmt: skip


def export_moe(config: Step3p7Config) -> dict[str, Any]:
    if config.moe is None:
        return {EXPERT_LAYERS: ["dense"] * config.num_layers}
    moe = MoEOptions(config)
    moe.require(KIND, **EXPRESSED, moe_router_score_function=("sigmoid",))
    if moe.topk < 2 or moe.shared_size is None:
        raise ConfigError(
            f"model.moe.moe_router_topk={moe.topk} with moe_shared_expert_intermediate_size={moe.shared_size} cannot "
            f"be written as a Hugging Face {KIND}; the former can be 2 or more, and the latter has to be set"
        )
    return {
        **export_bias(moe),
        EXPERT_LAYERS: ["sparse" if experts else "dense" for experts in moe.layers],
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "moe_intermediate_size": moe.ffn_size,
        "share_expert_dim": moe.shared_size,
        "moe_router_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
    }


# -- configuration of the decoder ------------------------------------------------------------------------


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    kinds, sparse = import_kinds(external), import_sparse(external)
    scale, head = external.get("query_pre_attn_scalar"), external.get("head_dim", HEAD_DIM)
    if scale not in (None, head):
        raise ConfigError(f"query_pre_attn_scalar={scale} is not supported; it can be head_dim={head}")
    if (further := external.get(PREDICTED) or 0) > PREDICTED_LAYERS:
        raise ConfigError(f"{PREDICTED}={further} is not supported; it can be up to {PREDICTED_LAYERS}")
    return {
        "window_attn_skip_freq": import_pattern(kinds),
        "num_window_attention_heads": import_window_heads(external, kinds),
        **import_window(external, kinds),
        **import_positions(external, kinds),
        **import_limits(external, sparse),
        **import_moe({**MOE_DEFAULTS, **external}, sparse),
    }


def export_text(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Step3p7Config.model_validate(model)
    require_value(config, "rope_scaling_type", SCALINGS, KIND)
    return {
        **export_shape(config),
        **export_moe(config),
        "layer_types": layer_types(config),
        "sliding_window": config.sliding_window,
        WINDOW_HEADS: config.window_heads,
        "rope_parameters": export_positions(config),
        **{theirs: getattr(config, ours) for ours, theirs in LIMITS.items()},
    }


DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 128815,
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
OF_PREDICTION = "of layers that predict further tokens, which are left out"
TEXT = ConfigMap(
    architecture=TEXT_KIND,
    fields=(
        *(
            Field(f.theirs, f.ours, f.import_value, f.export_value, DEFAULTS.get(f.theirs, f.default))
            for f in decoder_fields(tied=False, epsilon=1e-5, positions=128000)
        ),
        Field("num_key_value_heads", "num_query_groups", default=GROUPS),
        Field("head_dim", "kv_channels", default=HEAD_DIM),
        Field("attention_bias", "attention_bias", default=False),
    ),
    fixed=(
        Fixed("mlp_bias", (False,)),
        # Of the publisher's code alone: what the class has in every case.
        *(
            Fixed(key, values, written=False)
            for key, values in {
                "yarn_only_types": ([FULL], None),
                "use_rope_layers": ([], None),
                "att_impl_type": ("GQA",),
                "use_qk_norm": (True,),
                "zero_centered": (True,),
                "use_head_wise_attn_gate": (True,),
                "use_moe": (True,),
                "use_moe_router_bias": (True,),
                "moe_router_activation": ("sigmoid",),
                "norm_expert_weight": (True,),
                "moe_layer_offset": (0,),
                "moe_every_n_layer": (1,),
            }.items()
        ),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        **dict.fromkeys(("mtp_layer_types", "mtp_mlp_layer_types"), OF_PREDICTION),
        "hidden_act": "the class computes SiLU whatever it says",
        "need_fp32_gate": "routers are computed in fp32 in every case",
        "max_seq_len": "of the publisher's code; the class reads max_position_embeddings",
    },
    import_extra=import_extra,
    import_extra_keys=(
        *MOE_DEFAULTS, *LIMITS.values(), *ROPE_KEYS, SHARES, PREDICTED, EXPERT_LAYERS, EXPERT_NUMBERS, OTHER_HEADS,
        WINDOW_HEADS, BY_LAYER, BIAS_KEY, "layer_types", "sliding_window", "query_pre_attn_scalar",
    ),
    export_extra=export_text,
    spellings={
        "num_local_experts": "n_routed_experts",
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
        "num_attention_groups": "num_key_value_heads",
        "share_expert_dims": "share_expert_dim",
        "num_mtp_layers": PREDICTED,
    },
)  # fmt: skip

# -- configuration of the whole ------------------------------------------------------------------------

NO_TOWER = {
    "model_type": "step3p5_vision",
    "num_hidden_layers": 0,
    "hidden_size": 16,
    "num_attention_heads": 1,
    "image_size": 14,
    "patch_size": 14,
}
"""An image tower of no layers. Its small tensors are not in the file: the class makes random ones, which text does not
reach."""


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    text = TEXT.export_value(model)
    return {
        "text_config": {"model_type": TEXT_KIND, **text},
        "vision_config": NO_TOWER,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


STEP3P7 = replace(
    decoder_within(KIND, TEXT, KIND, ("projector_bias", "understand_projector_stride")),
    export_extra=export_extra,
    written=True,
)

HUGGING_FACE = HuggingFaceFamily(
    family=KIND,
    model_types={KIND: STEP3P7, TEXT_KIND: TEXT},
    name_map=name_map,
    # The decoder alone is a type of the publisher's code, for which transformers has no class with a head.
    model_type_of=lambda config: KIND,
    copies=tied_output,
    spelling=spelling,
    architectures={KIND: "Step3p7ForConditionalGeneration"},
    within={TEXT_KIND: "text_config"},
)
