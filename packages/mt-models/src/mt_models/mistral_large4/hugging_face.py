"""Mistral Large 4 in Hugging Face's format, `mistral_large4`: the decoder, beside an image tower that is left out.

Tensors have the names of published files, which are Mistral's own; those of transformers' modules are read too.
transformers knows the decoder with an LM head beside an image tower alone: a decoder is written with a `vision_config`
of no layers, whose few tensors are missing in the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mt_core.config.layer_pattern import pattern_of
from mt_core.config_map import ConfigMap, Field, Fixed, require_known
from mt_core.errors import ConfigError
from mt_core.name_map import Concatenate, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    OURS,
    POSITIONS,
    ROPE_KEYS,
    decoder_fields,
    export_scaling,
    import_rope,
    rope_table,
)
from mt_models.blocks.hugging_face_moe import MOE_IGNORED, SILU, ExpertNames, expert_rules, shared_experts
from mt_models.blocks.hugging_face_tower import OF_PICTURES, TOWER_KEYS
from mt_models.blocks.moe import MoEOptions
from mt_models.deepseek import hugging_face as deepseek
from mt_models.deepseek_v32.hugging_face import FULL, SHARED, SHARING, import_sharing
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value
from mt_models.mistral_large4.config import MistralLarge4Config, layers_without_rope

KIND, TEXT_KIND = "mistral_large4", "mistral_large4_text"

# -- tensors -----------------------------------------------------------------------------------------

LAYER = "layers.{i}."
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"
ATTENTION = {"linear_q_proj": "wq", "linear_kv_up_proj": "wkv_b", "linear_proj": "wo"}
LATENTS = {"linear_kv_down_proj": "wkv_a_with_mqa", "kv_layernorm": "kv_a_norm"}
FACTORS = {"query_factors.scale": "ssmax_scaling.s", "query_factors.bias": "ssmax_scaling.b"}
INDEXER = {
    "linear_wq_b.weight": "wq_b.weight",
    "linear_wk.weight": "wk.weight",
    "linear_weights_proj.weight": "weights_proj.weight",
    "k_norm.weight": "k_norm.weight",
    "k_norm.bias": "k_norm.bias",
    "q_input_norm.weight": "q_input_norm.weight",
    "q_input_norm.bias": "q_input_norm.bias",
    **FACTORS,
}
EXPERTS = ExpertNames(
    router="gate.weight",
    gate="experts.{e}.w1.weight",
    up="experts.{e}.w3.weight",
    down="experts.{e}.w2.weight",
    stacked_router="gate.weight",
    stacked_gate_up="experts.gate_up_proj",
    stacked_down="experts.down_proj",
)
TOWER = frozenset(
    ("vision_encoder.*", "pre_mm_projector_norm.*", "patch_merger.*", "vision_language_adapter.*", "mtp_dspark.*",
     "model.vision_tower.*", "model.multi_modal_projector.*")
)  # fmt: skip
"""Tensors of the image tower, and of a draft model, which neither this family nor transformers has."""


def name_map(config: MistralLarge4Config) -> NameMap:
    rules: list[Rule] = [Same("embedding.word_embeddings.weight", EMBEDDING), Same("rotary.alpha", "lerope.alpha")]
    for number in range(config.num_layers):
        rules += [rule.for_layer(number) for rule in layer_rules(config, number)]
    rules.append(Same("decoder.final_layernorm.weight", "norm.weight"))
    if config.untie_embeddings_and_output_weights:
        rules.append(Same("output_layer.weight", OUTPUT))
    return NameMap(rules, 0, TOWER)


def layer_rules(config: MistralLarge4Config, number: int) -> list[Rule]:
    names = ATTENTION if config.kv_source_of(number) != number else {**ATTENTION, **LATENTS}
    attention = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in names.items()} | FACTORS
    if config.indexer_of(number) == number:
        attention |= {f"core_attention.indexer.{ours}": f"indexer.{theirs}" for ours, theirs in INDEXER.items()}
    sparse = config.moe is not None and MoEOptions(config).layers[number]
    return [
        Same(f"{OURS}input_layernorm.weight", f"{LAYER}attention_norm.weight"),
        Same(f"{OURS}pre_mlp_layernorm.weight", f"{LAYER}ffn_norm.weight"),
        *(Same(f"{OURS}self_attention.{ours}", f"{LAYER}attention.{theirs}") for ours, theirs in attention.items()),
        *(_moe_rules(MoEOptions(config)) if sparse else _gated_rules("mlp", "feed_forward")),
    ]


def _gated_rules(ours: str, theirs: str) -> list[Rule]:
    halves = (f"{LAYER}{theirs}.w1.weight", f"{LAYER}{theirs}.w3.weight")
    return [
        Concatenate(f"{OURS}{ours}.linear_fc1.weight", halves),
        Same(f"{OURS}{ours}.linear_fc2.weight", f"{LAYER}{theirs}.w2.weight"),
    ]


def _moe_rules(moe: MoEOptions) -> list[Rule]:
    routed = expert_rules(moe, EXPERTS, theirs=LAYER)
    if moe.shared_size is None:
        return routed
    others = [rule for rule in routed if "shared_experts" not in rule.ours]
    return [*others, *_gated_rules("mlp.shared_experts", "shared_experts")]


# -- names of transformers' modules --------------------------------------------------------------------

PREFIXES = ("model.language_model.", "language_model.", "model.")
WHOLE = {
    "embed_tokens.weight": EMBEDDING,
    "rotary_emb.alpha": "lerope.alpha",
    "lm_head.weight": OUTPUT,
}
PARTS = {
    "self_attn": "attention",
    "q_proj": "wq",
    "o_proj": "wo",
    "kv_a_proj_with_mqa": "wkv_a_with_mqa",
    "kv_b_proj": "wkv_b",
    "kv_a_layernorm": "kv_a_norm",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
FEED_FORWARD = re.compile(r"mlp\.(?=w[123]\.)")
STACKED = re.compile(r"\.experts\.(gate_up|down)_proj$")


def spelling(config: MistralLarge4Config, name: str) -> str:
    """The published name of a decoder's tensor; others stay."""
    if any(re.match(pattern.replace("*", ".+"), name) for pattern in TOWER):
        return name
    inner = next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)
    layer = re.fullmatch(r"layers\.([0-9]+)\.(.+)", inner)
    if layer is None:
        return WHOLE.get(inner, inner)
    suffix = (
        layer[2] if STACKED.search(f".{layer[2]}") else ".".join(PARTS.get(part, part) for part in layer[2].split("."))
    )
    suffix = suffix.replace("softmax_scaling.scale", "ssmax_scaling.s").replace(
        "softmax_scaling.bias", "ssmax_scaling.b"
    )
    suffix = FEED_FORWARD.sub("feed_forward.", suffix).removeprefix("mlp.")
    return f"layers.{layer[1]}.{suffix}"


# -- configuration of the decoder --------------------------------------------------------------------

LIST, INTERVAL, SOURCES, KINDS = "no_rope_layers", "no_rope_layer_interval", "kv_source_layers", "mlp_layer_types"
DENSE, SPARSE = "dense", "sparse"
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
"""What a file without a table means."""
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 204800,
    "num_hidden_layers": 72,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "intermediate_size": 24576,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 6144,
    "first_k_dense_replace": 1,
    "aux_loss_alpha": 0.0001,
}
"""Defaults of the class, and a coefficient for training, which it has not."""


def import_text(external: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [model] that depend on several of the decoder."""
    stated = {**DEFAULTS, **{key: value for key, value in external.items() if value is not None}}
    layers, heads = stated["num_hidden_layers"], stated["num_attention_heads"]
    if stated.get("num_key_value_heads", heads) != heads:
        raise ConfigError(
            f"num_key_value_heads={stated['num_key_value_heads']} is not supported; it can be "
            f"num_attention_heads={heads}"
        )
    kinds = stated.get("layer_types")
    if kinds is not None and set(kinds) != {"indexed_attention"}:
        raise ConfigError(f"layer_types={kinds} is not supported; every layer can be indexed_attention alone")
    freq = _import_no_rope(stated, layers)
    rotates = [not without for without in layers_without_rope(freq, layers)]
    values = {
        **_import_rope(external),
        **import_sharing(stated),
        "no_rope_freq": freq,
        **_import_sources(stated.get(SOURCES), rotates),
    }
    return {**values, **_import_experts(stated, layers)}


def _import_rope(external: Mapping[str, Any]) -> dict[str, Any]:
    if all(external.get(key) is None for key in ("rope_parameters", "rope_scaling")):
        external = {**external, "rope_parameters": DEFAULT_ROPE}
    table = rope_table(external)
    table.pop(POSITIONS, None)
    if table["rope_type"] not in ("default", "yarn"):
        raise ConfigError(f"rope_parameters={table} is not supported; rope_type can be yarn or default")
    return import_rope({"rope_parameters": table})


def _import_no_rope(stated: Mapping[str, Any], layers: int) -> int | str:
    interval = stated.get(INTERVAL, 4)
    if (rotates := stated.get(LIST)) is None:
        return int(interval)
    if len(rotates) < layers or set(rotates) - {0, 1}:
        raise ConfigError(f"{LIST}={rotates} is not supported; it needs 0 or 1 for each of num_hidden_layers={layers}")
    without = [not rotated for rotated in rotates[:layers]]
    by_interval = [interval > 0 and (layer + 1) % interval == 0 for layer in range(layers)]
    return int(interval) if without == by_interval else pattern_of(without)


def _import_sources(sources: Sequence[int] | None, rotates: Sequence[bool]) -> dict[str, Any]:
    if sources is None or list(sources) == list(range(len(rotates))):
        return {}
    if len(sources) != len(rotates):
        raise ConfigError(f"{SOURCES}={sources} is not supported; it needs a layer for each of {len(rotates)} layers")
    require_last_sources(sources, rotates)
    return {SOURCES: list(sources)}


def require_last_sources(sources: Sequence[int], rotates: Sequence[bool]) -> None:
    """Raises ConfigError where transformers' class, in which a layer reads what the last layer of its kind before it
    has left for others, reads the latents of another layer than `kv_source_layers` names."""
    lenders = {source for layer, source in enumerate(sources) if source != layer}
    last: dict[bool, int] = {}
    for layer, source in enumerate(sources):
        if layer in lenders and source == layer:
            last[rotates[layer]] = layer
        if source != layer and last.get(rotates[layer]) != source:
            raise ConfigError(
                f"{SOURCES}={list(sources)} is not supported: layer {layer} names layer {source}, and transformers "
                "gives it the latents of the last layer of its kind (with or without positions) that others read"
            )


def _import_experts(stated: Mapping[str, Any], layers: int) -> dict[str, Any]:
    first = min(stated["first_k_dense_replace"], layers)
    kinds = stated.get(KINDS) or [DENSE] * first + [SPARSE] * (layers - first)
    if len(kinds) < layers or set(kinds) - {DENSE, SPARSE}:
        raise ConfigError(f"{KINDS}={kinds} is not supported; it needs {DENSE} or {SPARSE} for each of {layers} layers")
    sparse = [kind == SPARSE for kind in kinds[:layers]]
    if not any(sparse):
        return {}
    if stated.get("n_shared_experts") == 0:
        raise ConfigError("n_shared_experts=0 is not supported; it can be 1 or more")
    # The class reads the list alone, and writes the number beside it.
    listed = {key: value for key, value in stated.items() if key != "first_k_dense_replace"}
    moe = deepseek.import_moe({**listed, KINDS: kinds[:layers]}, dense=0, shared=1, layers=layers, scale=1.0)
    # The class keeps the router's matrix in fp32.
    return {"moe": {**moe, "moe_router_weight_in_fp32": True}}


def export_text(model: Mapping[str, Any]) -> dict[str, Any]:
    config = MistralLarge4Config.model_validate(model)
    layers = range(config.num_layers)
    _require_expressible(config)
    table = export_scaling(config) or {"rope_type": "default"}
    return {
        "rope_parameters": {"rope_theta": config.rotary_base, **table},
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.qk_pos_emb_head_dim,
        "intermediate_size": config.ffn_size,
        LIST: [int(config.rotates(layer)) for layer in layers],
        SOURCES: [config.kv_source_of(layer) for layer in layers],
        "indexer_types": [FULL if config.indexer_of(layer) == layer else SHARED for layer in layers],
        "layer_types": ["indexed_attention"] * config.num_layers,
        **_export_experts(config),
    }


def _require_expressible(config: MistralLarge4Config) -> None:
    require_value(config, "normalization", ("RMSNorm",), KIND)
    require_value(config, "latent_norm_epsilon", (None, config.norm_epsilon), KIND)
    require_value(config, "dsa_indexer_k_norm_epsilon", (1e-6,), KIND)
    require_value(config, "dsa_dense_warmup", (False,), KIND)
    if config.final_logit_softcapping is None:
        raise ConfigError(
            f"model.final_logit_softcapping=null cannot be written as a Hugging Face {KIND}; it can be a number"
        )
    layers = range(config.num_layers)
    require_last_sources([config.kv_source_of(i) for i in layers], [config.rotates(i) for i in layers])


def _export_experts(config: MistralLarge4Config) -> dict[str, Any]:
    if config.moe is None:
        return {KINDS: [DENSE] * config.num_layers, "first_k_dense_replace": config.num_layers}
    moe = MoEOptions(config)
    expressed = {key: legal for key, legal in deepseek.EXPRESSED.items() if "group" not in key}
    moe.require(KIND, **expressed)
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "n_shared_experts": shared_experts(moe, KIND),
        "moe_intermediate_size": moe.ffn_size,
        "routed_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
        KINDS: [SPARSE if sparse else DENSE for sparse in moe.layers],
        "first_k_dense_replace": (*moe.layers, True).index(True),
    }


TEXT = ConfigMap(
    architecture=f"{KIND} (text_config)",
    fields=(
        *(
            Field(
                field.theirs,
                field.ours,
                field.import_value,
                field.export_value,
                DEFAULTS.get(field.theirs, field.default),
            )
            for field in decoder_fields(tied=False, positions=1048576, epsilon=1e-5)
        ),
        Field("kv_lora_rank", "kv_lora_rank", default=512),
        Field("qk_nope_head_dim", "qk_head_dim", default=64),
        Field("qk_rope_head_dim", "qk_pos_emb_head_dim", default=64),
        Field("v_head_dim", "v_head_dim", default=128),
        Field("index_n_heads", "dsa_indexer_n_heads", default=32),
        Field("index_head_dim", "dsa_indexer_head_dim", default=128),
        Field("index_topk", "dsa_indexer_topk", default=2048),
        Field("final_logit_softcapping", "final_logit_softcapping", float, default=30.0),
    ),
    fixed=(
        SILU,
        Fixed("attention_bias", (False,)),
        # Groups are ranked by probabilities there, by logits here.
        Fixed("n_group", (1,)),
        Fixed("topk_group", (1,)),
        Fixed("q_lora_rank", (None,), written=False),
        Fixed("norm_topk_prob", (True,), written=False),
        Fixed("mlp_bias", (False,), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        "qk_head_dim": "the sum of other fields",
        "head_dim": "is qk_rope_head_dim in the class, whatever it says",
    },
    import_extra=import_text,
    import_extra_keys=(
        *ROPE_KEYS, *SHARING, "num_key_value_heads", "layer_types", LIST, INTERVAL, SOURCES, KINDS, "n_routed_experts",
        "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor",
        "first_k_dense_replace", "aux_loss_alpha",
    ),
    export_extra=export_text,
    spellings={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
)  # fmt: skip

# -- configuration of the whole ------------------------------------------------------------------------

TIED = "tie_word_embeddings"
NO_TOWER = {
    "model_type": "pixtral",
    "num_hidden_layers": 0,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 28,
}
"""`vision_config` of a decoder alone."""


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    text = dict(external.get("text_config") or {})
    require_known("text_config.model_type", str(text.get("model_type", TEXT_KIND)), (TEXT_KIND,))
    # The outer class ties its LM head by its own key.
    return TEXT.import_value({**text, TIED: external.get(TIED, False)})


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    text = TEXT.export_value(model)
    return {"text_config": {"model_type": TEXT_KIND, **text}, "vision_config": NO_TOWER, TIED: text[TIED]}


MISTRAL_LARGE4 = ConfigMap(
    architecture=KIND,
    fields=(),
    ignored={
        **IGNORED,
        **dict.fromkeys(
            (*TOWER_KEYS, "image_token_index", "projector_hidden_act", "vision_feature_layer",
             "multimodal_projector_bias", "spatial_merge_size"),
            OF_PICTURES,
        ),
    },
    import_extra=import_extra,
    import_extra_keys=("text_config", TIED),
    export_extra=export_extra,
)  # fmt: skip


def copies(config: MistralLarge4Config) -> Mapping[str, str]:
    return {} if config.untie_embeddings_and_output_weights else {OUTPUT: EMBEDDING}


HUGGING_FACE = HuggingFaceFamily(
    family=KIND,
    model_types={KIND: MISTRAL_LARGE4},
    name_map=name_map,
    spelling=spelling,
    copies=copies,
    architectures={KIND: "MistralLarge4ForConditionalGeneration"},
)
