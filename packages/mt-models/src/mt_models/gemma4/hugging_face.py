"""Gemma 4 (text) in Hugging Face's format.

Files with towers for pictures and sound hold the decoder beside them: it is read, under the types that have towers, and
written as the type of the decoder alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_core.config.layer_pattern import pattern_of
from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    FULL,
    OURS,
    QK_NORMS,
    SLIDING,
    THEIRS,
    decoder_fields,
    decoder_name_map,
    export_shape,
    feed_forward_rules,
    layer_types,
    norm_rules,
)
from mt_models.blocks.hugging_face_moe import ExpertNames, expert_rules, written_packed
from mt_models.blocks.hugging_face_rope_by_kind import export_rope_by_kind, import_rope_by_kind
from mt_models.blocks.hugging_face_tower import import_placeholders
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.blocks.window_pattern import has_window
from mt_models.gemma4.config import Gemma4Config
from mt_models.hugging_face import (
    GELU_TANH,
    IGNORED,
    NOT_A_CHOICE,
    HuggingFaceFamily,
    require_value,
    tied_output,
)

TEXT, UNIFIED = "gemma4_text", "gemma4_unified_text"


# -- tensors -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupedProjections(Rule):
    """Query, key and value matrices there, or the first of them; rows grouped by key-value group here.

    groups: key-value heads. heads: query heads.
    """

    groups: int = 1
    heads: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        # [groups, rows of the group, in] -> [all rows, in]
        return torch.cat([x.unflatten(0, (self.groups, -1)) for x in tensors], dim=1).flatten(0, 1)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        grouped = tensor.unflatten(0, (self.groups, -1))
        counts = [self.heads // self.groups, 1, 1][: len(self.sources)]
        size = grouped.shape[1] // sum(counts)
        parts = grouped.split([count * size for count in counts], dim=1)
        return [part.flatten(0, 1).contiguous() for part in parts]


NORMS = {
    "input_layernorm": "input_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
EXPERT_NORMS = {
    "experts.post_dense_layernorm": "post_feedforward_layernorm_1",
    "experts.pre_layernorm": "pre_feedforward_layernorm_2",
    "experts.post_layernorm": "post_feedforward_layernorm_2",
}
EXPERTS = ExpertNames(
    router="router.proj.weight",
    gate="experts.{e}.gate_proj.weight",
    up="experts.{e}.up_proj.weight",
    down="experts.{e}.down_proj.weight",
    stacked_router="router.proj.weight",
    stacked_gate_up="experts.gate_up_proj",
    stacked_down="experts.down_proj",
)
PER_LAYER = {
    "per_layer_input.gate": "per_layer_input_gate",
    "per_layer_input.projection": "per_layer_projection",
    "per_layer_input.norm": "post_per_layer_input_norm",
}
PER_LAYER_INPUTS = {
    "embeddings": "embed_tokens_per_layer",
    "projection": "per_layer_model_projection",
    "norm": "per_layer_projection_norm",
}
TOWERS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")


def name_map(config: Gemma4Config) -> NameMap:
    rules = [rule.for_layer(number) for number in range(config.num_layers) for rule in layer_rules(config, number)]
    if config.hidden_size_per_layer_input:
        rules += [
            Same(f"per_layer_inputs.{ours}.weight", f"model.{theirs}.weight")
            for ours, theirs in PER_LAYER_INPUTS.items()
        ]
    names = decoder_name_map(config, rules)
    towers = {f"model.{tower}.*" for tower in TOWERS}
    return NameMap(names.rules, 0, names.ignored | towers | unused_projections(config))


def unused_projections(config: Gemma4Config) -> set[str]:
    """Keys and values of layers that read those of another one: published files hold them, and no class reads them."""
    shared = [layer for layer in range(config.num_layers) if config.shares_kv(layer)]
    unused = ("k_proj", "v_proj", "k_norm", "v_norm")
    return {f"model.layers.{layer}.self_attn.{name}.weight" for layer in shared for name in unused}


def layer_rules(config: Gemma4Config, number: int) -> list[Rule]:
    rules = [
        *norm_rules(NORMS),
        *attention_rules(config, number),
        *feed_forward_rules(),
        Same(f"{OURS}layer_scalar", f"{THEIRS}layer_scalar"),
    ]
    if config.hidden_size_per_layer_input:
        rules += norm_rules(PER_LAYER)
    if config.moe is not None:
        rules += [
            *norm_rules(EXPERT_NORMS),
            Same(f"{OURS}experts.router_input.scale", f"{THEIRS}router.scale"),
            Same(f"{OURS}experts.mlp.router.expert_scale", f"{THEIRS}router.per_expert_scale"),
            *written_packed(expert_rules(MoEOptions(config), EXPERTS, ours=f"{OURS}experts.")),
        ]
    return rules


def attention_rules(config: Gemma4Config, number: int) -> list[Rule]:
    sized, shares = config.of_layer(number), config.shares_kv(number)
    projections = "q" if shares else "qk" if config.keys_are_values(number) else "qkv"
    norms = {ours: theirs for ours, theirs in QK_NORMS.items() if not (shares and "k_" in ours)}
    return [
        *norm_rules(norms),
        GroupedProjections(
            f"{OURS}self_attention.linear_qkv.weight",
            tuple(f"{THEIRS}self_attn.{name}_proj.weight" for name in projections),
            groups=sized.query_groups,
            heads=sized.num_attention_heads,
        ),
        Same(f"{OURS}self_attention.linear_proj.weight", f"{THEIRS}self_attn.o_proj.weight"),
    ]


def spelling(config: Gemma4Config, name: str) -> str:
    """Files with towers have the decoder one level deeper."""
    return name.replace("model.language_model.", "model.", 1) if name.startswith("model.language_model.") else name


# -- layers and their sizes --------------------------------------------------------------------------


def import_kinds(external: Mapping[str, Any]) -> dict[str, int | str]:
    """sliding_window_pattern from layer_types: every so many layers one is global, and the last is; else a pattern."""
    count, kinds = external.get("num_hidden_layers", 30), external.get("layer_types")
    if kinds is None:
        return {"sliding_window_pattern": 6}
    # The class makes the last layer global whatever the list says.
    kinds = [*kinds[:-1], FULL]
    pattern = kinds.index(FULL) + 1
    regular = [FULL if (i + 1) % pattern == 0 or i == count - 1 else SLIDING for i in range(count)]
    if kinds == regular:
        return {"sliding_window_pattern": pattern}
    if len(kinds) != count or set(kinds) - {FULL, SLIDING}:
        raise ConfigError(
            f"layer_types={external['layer_types']} is not supported; it can be {FULL} or {SLIDING} for each of "
            f"num_hidden_layers={count}"
        )
    return {"sliding_window_pattern": pattern_of([kind == SLIDING for kind in kinds])}


def import_global_sizes(external: Mapping[str, Any], whole: Sequence[int]) -> dict[str, Any]:
    """Heads of global layers (`whole`): of their own keys, or of a table with entries by layer (transformers 5.2x)."""
    groups = external.get("num_global_key_value_heads") if external.get("attention_k_eq_v") else None
    sizes = {"head_dim": external.get("global_head_dim", 512), "num_key_value_heads": groups}
    if (table := external.get("per_layer_config")) is not None:
        entries = {int(layer): dict(entry) for layer, entry in table.items()}
        first = next(iter(entries.values()), {})
        if set(entries) != set(whole) or any(entry != first for entry in entries.values()) or set(first) - set(sizes):
            raise ConfigError(
                f"per_layer_config={dict(table)} is not supported: it has the same head_dim and num_key_value_heads "
                f"for the global layers {', '.join(map(str, whole))}"
            )
        beside = {"head_dim": external.get("head_dim", 256), "num_key_value_heads": None}
        sizes = {**beside, **first}
    return {"global_kv_channels": sizes["head_dim"], "num_global_query_groups": sizes["num_key_value_heads"]}


def import_moe(external: Mapping[str, Any]) -> dict[str, Any]:
    if not external.get("enable_moe_block"):
        return {}
    return {
        "moe": {
            "num_experts": external["num_experts"],
            "moe_router_topk": external["top_k_experts"],
            "moe_ffn_hidden_size": external["moe_intermediate_size"],
            "moe_router_expert_scale": True,
            # The class has no balance loss.
            "moe_router_load_balancing_type": ["none"],
        }
    }


def import_text(external: Mapping[str, Any]) -> dict[str, Any]:
    kinds = import_kinds(external)
    count, pattern = external.get("num_hidden_layers", 30), kinds["sliding_window_pattern"]
    whole = [i for i in range(count) if i == count - 1 or not has_window(pattern, i, count)]
    return {
        **kinds,
        **import_global_sizes(external, whole),
        **import_rope_by_kind(external, (1000000.0, 10000.0), share=0.25),
        **import_moe(external),
    }


def import_unified(external: Mapping[str, Any]) -> dict[str, Any]:
    return {**import_text(external), "hidden_size_per_layer_input": 0}


# -- configuration -----------------------------------------------------------------------------------


def real(value: Any) -> float | None:
    return None if value is None else float(value)


def own_fields(*, positions: int, window: int) -> tuple[Field, ...]:
    return (
        *(
            Field(f.theirs, f.ours, f.import_value, f.export_value, DEFAULTS.get(f.theirs, f.default))
            for f in decoder_fields(tied=True, positions=positions)
        ),
        Field("num_key_value_heads", "num_query_groups", default=4),
        Field("head_dim", "kv_channels", default=256),
        Field("sliding_window", "sliding_window", default=window),
        Field("final_logit_softcapping", "final_logit_softcapping", import_value=real),
        Field("attention_k_eq_v", "attention_k_eq_v", default=False),
        Field("num_kv_shared_layers", "num_kv_shared_layers", default=0),
        Field("use_double_wide_mlp", "use_double_wide_mlp", default=False),
    )


DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}
PER_LAYER_FIELDS = (
    Field("hidden_size_per_layer_input", "hidden_size_per_layer_input", lambda size: size or 0, default=256),
    Field("vocab_size_per_layer_input", "vocab_size_per_layer_input", default=262144),
)
FIXED = (
    Fixed("hidden_activation", GELU_TANH),
    Fixed("attention_bias", (False,)),
    # "vision": tokens of a picture see each other. There are none here.
    Fixed("use_bidirectional_attention", (None, False, "vision")),
    *NOT_A_CHOICE,
)
MOE_KEYS = ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size")
KEYS = ("layer_types", "rope_parameters", "global_head_dim", "num_global_key_value_heads", "per_layer_config")
WITHOUT_PER_LAYER = "the class has no embeddings of each layer"


def model_type_of(config: Gemma4Config) -> str:
    return TEXT


def export_text(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Gemma4Config.model_validate(model)
    require_value(config, "rope_scaling_type", ("none", "linear"), TEXT)
    return {
        **export_shape(config),
        "layer_types": layer_types(config),
        "rope_parameters": export_rope_by_kind(config),
        "global_head_dim": config.global_kv_channels,
        "num_global_key_value_heads": config.num_global_query_groups,
        "vocab_size_per_layer_input": config.per_layer_vocab,
        **export_moe(config),
    }


def export_unified(model: Mapping[str, Any]) -> dict[str, Any]:
    return {**export_text(model), "hidden_size_per_layer_input": 0}


def export_moe(config: Gemma4Config) -> dict[str, Any]:
    if config.moe is None:
        return dict(zip(MOE_KEYS, (False, None, None, None), strict=True))
    moe = MoEOptions(config)
    moe.require(TEXT, moe_ffn_hidden_size=ANY, moe_router_topk=ANY, moe_router_expert_scale=(True,))
    return dict(zip(MOE_KEYS, (True, moe.num_experts, moe.topk, moe.ffn_size), strict=True))


GEMMA4 = ConfigMap(
    architecture=TEXT,
    fields=(*own_fields(positions=131072, window=512), *PER_LAYER_FIELDS),
    fixed=FIXED,
    ignored=IGNORED,
    import_extra=import_text,
    import_extra_keys=(*KEYS, *MOE_KEYS),
    export_extra=export_text,
)
GEMMA4_UNIFIED = ConfigMap(
    architecture=UNIFIED,
    fields=own_fields(positions=262144, window=1024),
    fixed=(*FIXED, Fixed("enable_moe_block", (False,))),
    ignored={
        **IGNORED,
        **dict.fromkeys(("hidden_size_per_layer_input", "vocab_size_per_layer_input"), WITHOUT_PER_LAYER),
    },
    import_extra=import_unified,
    import_extra_keys=KEYS,
    export_extra=export_unified,
)

OF_TOWERS = "of the towers for pictures and sound, which this family does not have: text alone is computed"
OUTER_KEYS = (
    "vision_config", "audio_config", "boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index",
    "initializer_range", "vision_soft_tokens_per_image",
)  # fmt: skip
MEDIA = {"image_token_id": 258880, "video_token_id": 258884, "audio_token_id": 258881}
"""Keys of tokens that the class embeds as that of padding in a text without pictures and sound, and their defaults."""


def with_towers(kind: str, decoder: ConfigMap) -> ConfigMap:
    """The map of a type that has the decoder's configuration within it. It is read, and never written."""

    def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
        text = dict(external.get("text_config") or {})
        # The outer class ties its LM head by its own key.
        text["tie_word_embeddings"] = external.get("tie_word_embeddings", True)
        values = decoder.import_value(text)
        padding = text.get("pad_token_id") or 0
        return {**values, **import_placeholders(external, MEDIA, values["vocab_size"], padding)}

    return ConfigMap(
        architecture=kind,
        fields=(),
        ignored={**IGNORED, **dict.fromkeys(OUTER_KEYS, OF_TOWERS)},
        import_extra=import_extra,
        import_extra_keys=("text_config", "tie_word_embeddings", *MEDIA),
        export_extra=_never_written,
        written=False,
    )


def _never_written(model: Mapping[str, Any]) -> dict[str, Any]:
    raise ConfigError(f"a decoder without its towers is written as {TEXT}")


HUGGING_FACE = HuggingFaceFamily(
    family="gemma4",
    model_types={
        TEXT: GEMMA4,
        UNIFIED: GEMMA4_UNIFIED,
        "gemma4": with_towers("gemma4", GEMMA4),
        "gemma4_unified": with_towers("gemma4_unified", GEMMA4_UNIFIED),
    },
    name_map=name_map,
    model_type_of=model_type_of,
    copies=tied_output,
    spelling=spelling,
    architectures={TEXT: "Gemma4ForCausalLM"},
)
