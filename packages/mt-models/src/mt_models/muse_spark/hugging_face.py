"""Muse Spark's decoder in Hugging Face's format.

Files hold the decoder beside towers of images and sounds, and transformers has no class for the decoder alone. The
decoder is read; it is written for the same class with towers of no layers, so that the class answers text alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    OURS,
    ROPE_KEYS,
    THEIRS,
    decoder_fields,
    decoder_name_map,
    export_scaling,
    export_shape,
    feed_forward_rules,
    import_rope,
    layer_types,
    norm_rules,
)
from mt_models.blocks.hugging_face_moe import (
    BIAS_KEY,
    MOE_IGNORED,
    SILU,
    ExpertNames,
    expert_rules,
    export_bias,
    import_bias,
    written_packed,
)
from mt_models.blocks.hugging_face_tower import decoder_within
from mt_models.blocks.moe import ANY, MoEOptions, frequency_of
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value
from mt_models.muse_glimmer.config import NO_ROPE
from mt_models.muse_glimmer.hugging_face import (
    KEYS,
    NO_TOWER,
    PICTURES,
    PROJECTOR,
    WINDOW,
    import_positions,
    import_windows,
    real,
    row_rules,
    within,
)
from mt_models.muse_spark.config import MuseSparkConfig

KIND = "muse_spark"
TOWERS = frozenset(f"model.{part}.*" for part in ("vision_tower", "vision_adapter", "vision_projection", "audio_tower"))
"""Tensors of the towers, which this family does not have."""
NORMS = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
GATES = {
    "attention_residual": "post_attention_residual_gate",
    "mlp_residual": "post_feedforward_residual_gate",
}
EXPERTS = ExpertNames(latent_down="mlp.pre_expert_proj.weight", latent_up="mlp.post_expert_proj.weight")
EXPERT_NORMS = {"mlp.latent_layernorm": "mlp.pre_expert_norm", "mlp.expert_layernorm": "mlp.experts.post_expert_norm"}


# -- tensors -----------------------------------------------------------------------------------------


def name_map(config: MuseSparkConfig) -> NameMap:
    moe = MoEOptions(config)
    rules = [
        rule.for_layer(number)
        for number, sparse in enumerate(moe.layers)
        for rule in (*_layer_rules(config), *(_expert_rules(moe) if sparse else feed_forward_rules()))
    ]
    names = decoder_name_map(config, rules)
    return NameMap([within(rule) for rule in names.rules], 0, names.ignored | TOWERS)


def _layer_rules(config: MuseSparkConfig) -> list[Rule]:
    gates = [Same(f"{OURS}{ours}.gate", f"{THEIRS}{theirs}.gate") for ours, theirs in GATES.items()]
    return [*norm_rules(NORMS), *gates, *row_rules(config)]


def _expert_rules(moe: MoEOptions) -> list[Rule]:
    return [*written_packed(expert_rules(moe, EXPERTS, always_biased=True)), *norm_rules(EXPERT_NORMS)]


# -- configuration of the decoder --------------------------------------------------------------------

KINDS = "mlp_layer_types"
SIZES: Mapping[str, Any] = {
    "num_hidden_layers": 62,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 4096,
    "moe_hidden_size": 4096,
    "routed_scaling_factor": 1.0,
}
"""Defaults of the class."""
DEFAULT_BASE = 500000.0
TIED = "tie_word_embeddings"
WEIGHT_EPSILON = 1e-15
EXPRESSED = dict.fromkeys(
    (
        "moe_layer_freq", "moe_ffn_hidden_size", "moe_latent_size", "moe_router_topk",
        "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias",
    ),
    ANY,
)  # fmt: skip


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    external = {**SIZES, **external}
    rope = import_rotation(external)
    return {
        **rope,
        **import_windows(external),
        NO_ROPE: import_positions(external, rope["rotary_base"]),
        "moe": import_moe(external),
        "untie_embeddings_and_output_weights": True,
    }


def import_rotation(external: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [model] for the rotary positions. Without a table the class has a base of its own, and does not read what
    stands beside it."""
    if external.get("rope_parameters") is not None or external.get("rope_scaling"):
        return import_rope(external)
    if external.get("rope_theta", DEFAULT_BASE) != DEFAULT_BASE:
        raise ConfigError(
            f"rope_theta={external['rope_theta']} without rope_parameters is not supported; the class takes "
            f"{DEFAULT_BASE} then, so write it into rope_parameters"
        )
    return {"rotary_base": DEFAULT_BASE}


def import_moe(external: Mapping[str, Any]) -> dict[str, Any]:
    topk = external["num_experts_per_tok"]
    if topk < 2:
        # The class divides the score of a single expert by itself, and training needs its gradient.
        raise ConfigError(f"num_experts_per_tok={topk} is not supported; it can be 2 or more")
    return {
        "num_experts": external["num_local_experts"],
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": float(external["routed_scaling_factor"]),
        "moe_router_weight_epsilon": WEIGHT_EPSILON,
        "moe_router_weight_in_fp32": True,
        "moe_ffn_hidden_size": external["moe_intermediate_size"],
        "moe_latent_size": external["moe_hidden_size"],
        "moe_layer_freq": frequency_of(import_layers(external)),
        **import_bias(external),
    }


def import_layers(external: Mapping[str, Any]) -> list[bool]:
    """For each layer whether it has experts."""
    layers = external["num_hidden_layers"]
    if (kinds := external.get(KINDS)) is None:
        return [True] * layers
    if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        raise ConfigError(
            f"{KINDS}={kinds} is not supported; it needs dense or sparse for each of num_hidden_layers={layers}"
        )
    return [kind == "sparse" for kind in kinds]


def export_text(model: Mapping[str, Any]) -> dict[str, Any]:
    config = MuseSparkConfig.model_validate(model)
    require_value(config, "untie_embeddings_and_output_weights", (True,), KIND)
    if config.hidden_size % config.num_attention_heads:
        raise ConfigError(
            f"model.num_attention_heads={config.num_attention_heads} cannot be written as a Hugging Face {KIND}, whose "
            f"class needs a divisor of model.hidden_size={config.hidden_size}"
        )
    rotates = [config.rotates(layer) for layer in range(config.num_layers)]
    table = export_scaling(config) or {"rope_type": "default"}
    return {
        **export_shape(config),
        **export_moe(MoEOptions(config)),
        "rope_parameters": {"rope_theta": config.rotary_base, **table},
        "layer_types": layer_types(config),
        "layer_rope_theta": [config.rotary_base if turned else 0 for turned in rotates],
    }


def export_moe(moe: MoEOptions) -> dict[str, Any]:
    moe.require(KIND, **EXPRESSED, moe_router_score_function=("sigmoid",), moe_router_weight_epsilon=(WEIGHT_EPSILON,))
    if moe.topk < 2:
        raise ConfigError(
            f"model.moe.moe_router_topk={moe.topk} cannot be written as a Hugging Face {KIND}; it can be 2 or more"
        )
    return {
        **export_bias(moe),
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "moe_intermediate_size": moe.ffn_size,
        "moe_hidden_size": moe["moe_latent_size"],
        "routed_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
        KINDS: ["sparse" if experts else "dense" for experts in moe.layers],
    }


TEXT = ConfigMap(
    architecture="muse_spark (text_config)",
    fields=(
        *(field for field in decoder_fields(tied=False, epsilon=1e-5, positions=1048576) if field.theirs != TIED),
        Field("num_key_value_heads", "num_query_groups", default=16),
        Field("head_dim", "kv_channels", default=64),
        Field("sliding_window", "sliding_window", default=WINDOW),
        Field("post_norm_eps", "post_norm_epsilon", import_value=real, default=1e-8),
        Field("qk_scale_factor", "qk_scale_factor", import_value=real, default=5.4730064863875),
        Field("output_multiplier", "output_multiplier", import_value=real, default=0.1767766952966369),
        Field("final_logit_softcapping", "final_logit_softcapping", import_value=real, default=20.0),
        Field("residual_gate_temperature", "residual_gate_temperature", import_value=real, default=0.3),
    ),
    # The class has no tied LM head.
    fixed=(SILU, Fixed("attention_bias", (False,)), Fixed(TIED, (False,)), *NOT_A_CHOICE),
    ignored={**IGNORED, **MOE_IGNORED},
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, *KEYS, *SIZES, KINDS, BIAS_KEY),
    export_extra=export_text,
    spellings={"num_experts": "num_local_experts"},
)

# -- configuration of the whole ----------------------------------------------------------------------

MEDIA = {**PICTURES, "audio_token_id": 200038}
"""Tokens in the place of other media, as the class has them by default."""


def no_sounds(width: int) -> dict[str, Any]:
    """A tower of sounds of one stage without blocks, before a decoder of this width."""
    stage = {"patch_sizes": [1], "hidden_sizes": [1], "depths": [0], "num_hidden_layers": 1}
    return {"model_type": f"{KIND}_audio", **stage, "out_hidden_size": width}


def export_whole(model: Mapping[str, Any]) -> dict[str, Any]:
    text = TEXT.export_value(model)
    return {
        "text_config": {"model_type": f"{KIND}_text", **text},
        "vision_config": {**NO_TOWER, "model_type": f"{KIND}_vision"},
        "audio_config": no_sounds(text["hidden_size"]),
        "out_hidden_size": 64,
        "projector_hidden_size": 16,
        TIED: False,
        **{key: text["vocab_size"] if model[key] is None else model[key] for key in MEDIA},
    }


WITH_TOWERS = decoder_within(KIND, TEXT, KIND, (*PROJECTOR, "audio_config"))


def import_whole(external: Mapping[str, Any]) -> dict[str, Any]:
    assert WITH_TOWERS.import_extra is not None
    text = WITH_TOWERS.import_extra(external)
    ids = {key: external.get(key, default) for key, default in MEDIA.items()}
    # One beyond the vocabulary stands for none.
    return {**text, **{key: number for key, number in ids.items() if 0 <= number < text["vocab_size"]}}


MUSE_SPARK = replace(
    WITH_TOWERS,
    import_extra=import_whole,
    import_extra_keys=(*WITH_TOWERS.import_extra_keys, *MEDIA),
    export_extra=export_whole,
    written=True,
)

HUGGING_FACE = HuggingFaceFamily(
    family=KIND,
    model_types={KIND: MUSE_SPARK},
    name_map=name_map,
    architectures={KIND: "MuseSparkForConditionalGeneration"},
)
