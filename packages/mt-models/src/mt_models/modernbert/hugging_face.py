"""ModernBERT in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed, require_known
from mt_core.errors import ConfigError
from mt_core.name_map import GroupedQKV, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import FULL, SLIDING, import_scaling
from mt_models.blocks.hugging_face_rope_by_kind import rope_of_kind
from mt_models.hugging_face import (
    FURTHER_ACTIVATIONS,
    IGNORED,
    NOT_A_CHOICE,
    OF_HEADS,
    OF_PYTHON,
    SPECIAL_IDS,
    HuggingFaceFamily,
)
from mt_models.modernbert.config import ModernBertConfig

# -- configuration -----------------------------------------------------------------------------------

PLAIN = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu"}
PLAIN |= FURTHER_ACTIVATIONS
GATED = {"gelu": "geglu", "gelu_tanh": "geglu_tanh", "silu": "swiglu"}
"""Our plain activation -> the gated one of it."""
BASES = {FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)}
"""Kind of layer -> the key of its base beside the table, and the base where a file says none."""
CLASSES = {"ModernBertForMaskedLM": True, "ModernBertModel": False}
"""Class -> whether it has the masked-word head. A configuration without a class name is read as the first."""


def import_plain(name: str) -> str:
    return PLAIN[require_known("the activation", name, PLAIN)]


def import_gated(name: str) -> str:
    plain = import_plain(name)
    return GATED[require_known("hidden_activation", plain, GATED)]


def export_plain(name: str) -> str:
    # reversed: of several names for one activation the first is inserted last, and stays.
    names = {ours: theirs for theirs, ours in reversed(PLAIN.items())}
    return names[require_known("model.lm_head_activation", name, names)]


def export_gated(name: str) -> str:
    return export_plain({gated: plain for plain, gated in GATED.items()}[name])


def base_of(external: Mapping[str, Any], kind: str) -> float:
    """The rotary base of the layers of a kind: in a table for each kind (transformers 5), or beside it."""
    beside, default = BASES[kind]
    tables = external.get("rope_parameters") or {}
    if set(tables) - set(BASES):
        raise ConfigError(f"rope_parameters={tables} is not supported: it has the keys {FULL} and {SLIDING}")
    table = tables.get(kind) or {}
    rope_of_kind(table, default, kind, ("default",))
    base = table.get("rope_theta")
    outside = external.get(beside)
    if None not in (base, outside) and base != outside:
        raise ConfigError(
            f"rope_parameters.{kind}.rope_theta={base} and {beside}={outside} contradict each other; they mean the "
            "same, so remove what is wrong"
        )
    return float(next((value for value in (base, outside) if value is not None), default))


def interval_of(external: Mapping[str, Any]) -> int:
    """Every so many layers one attends to all positions."""
    layers, every = external.get("num_hidden_layers", 22), external.get("global_attn_every_n_layers")
    kinds = external.get("layer_types")
    if kinds is None:
        return 3 if every is None else int(every)
    # Without a second global layer, an interval beyond the last layer says the same.
    interval = kinds.index(FULL, 1) if FULL in kinds[1:] else max(len(kinds), 1)
    if len(kinds) != layers or kinds != kinds_of(layers, interval):
        raise ConfigError(
            f"layer_types={kinds} is not supported: there is one for each of num_hidden_layers={layers}; the first and "
            f"every n-th after it have to be {FULL}, the others {SLIDING}"
        )
    if every is not None and kinds != kinds_of(layers, int(every)):
        raise ConfigError(f"layer_types={kinds} and global_attn_every_n_layers={every} contradict each other")
    return interval


def kinds_of(layers: int, interval: int) -> list[str]:
    return [SLIDING if i % interval else FULL for i in range(layers)]


def import_layers(external: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers see everything, and the bases of their positions."""
    if import_scaling(external.get("rope_scaling") or {}):
        raise ConfigError(f"rope_scaling={external['rope_scaling']} is not supported; it can be null")
    return {
        "global_attn_every_n_layers": interval_of(external),
        "rotary_base": base_of(external, FULL),
        "rotary_base_local": base_of(external, SLIDING),
    }


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    named = external.get("architectures") or [next(iter(CLASSES))]
    return {"add_lm_head": CLASSES[require_known("architectures", str(named[0]), CLASSES)], **import_layers(external)}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = ModernBertConfig.model_validate(model)
    classes = [kind for kind, has_head in CLASSES.items() if has_head == config.add_lm_head]
    return {"architectures": classes, **export_layers(config)}


def export_layers(config: ModernBertConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.ffn_size,
        # Keys that every version reads.
        "global_attn_every_n_layers": config.global_attn_every_n_layers,
        "global_rope_theta": config.rotary_base,
        "local_rope_theta": config.rotary_base_local,
    }


LAYER_KEYS = (
    "layer_types", "rope_parameters", "rope_scaling", "global_attn_every_n_layers", "global_rope_theta",
    "local_rope_theta",
)  # fmt: skip
OUTPUT_BIAS = Field("decoder_bias", "output_bias", default=True)
CONFIG = ConfigMap(
    architecture="modernbert",
    fields=(
        Field("vocab_size", "vocab_size", default=50368),
        Field("num_hidden_layers", "num_layers", default=22),
        Field("hidden_size", "hidden_size", default=768),
        Field("num_attention_heads", "num_attention_heads", default=12),
        Field("intermediate_size", "ffn_hidden_size", default=1152),
        Field("hidden_activation", "activation", import_gated, export_gated, default="gelu"),
        Field("classifier_activation", "lm_head_activation", import_plain, export_plain, default="gelu"),
        Field("max_position_embeddings", "max_position_embeddings", default=8192),
        Field("local_attention", "local_attention", default=128),
        Field("norm_eps", "norm_epsilon", default=1e-5),
        Field("norm_bias", "norm_bias", default=False),
        Field("attention_bias", "attention_bias", default=False),
        Field("mlp_bias", "mlp_bias", default=False),
        Field("classifier_bias", "lm_head_bias", default=False),
        OUTPUT_BIAS,
        Field("embedding_dropout", "embedding_dropout", float, default=0.0),
        Field("attention_dropout", "attention_dropout", float, default=0.0),
        Field("initializer_range", "init_method_std", default=0.02),
    ),
    fixed=(
        Fixed("mlp_dropout", (0.0,)),
        Fixed("tie_word_embeddings", (True,)),
        # Of BERT's class; written into the published files, whose positions are rotary all the same.
        Fixed("position_embedding_type", ("absolute",), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={
        **{key: why for key, why in IGNORED.items() if key != "architectures"},
        "cls_token_id": SPECIAL_IDS,
        "layer_norm_eps": "read by no version; norm_eps is",
        "initializer_cutoff_factor": "initial weights are cut off there, and only new models have these",
        "deterministic_flash_attn": "which kernel computed attention; train.deterministic chooses here",
        "classifier_pooling": OF_HEADS,
        "classifier_dropout": OF_HEADS,
        "sparse_prediction": "computes the same losses without the logits of words that are not masked",
        "sparse_pred_ignore_index": SPECIAL_IDS,
        "reference_compile": OF_PYTHON,
        "repad_logits_with_grad": OF_PYTHON,
    },
    import_extra=import_extra,
    import_extra_keys=("architectures", *LAYER_KEYS),
    export_extra=export_extra,
)


# -- names -------------------------------------------------------------------------------------------


def name_map(config: ModernBertConfig) -> NameMap:
    rules = encoder_rules(config, "model." if config.add_lm_head else "")
    if config.add_lm_head:
        rules += head_rules(config)
        rules += [Same("output_layer.bias", "decoder.bias")] if config.output_bias else []
    return NameMap(rules, config.num_layers)


def head_rules(config: ModernBertConfig) -> list[Rule]:
    """The layer between the encoder and masked words, or classes."""
    return [
        *_same("lm_head.dense", "head.dense", bias=config.lm_head_bias),
        *_same("lm_head.layer_norm", "head.norm", bias=config.norm_bias),
    ]


def encoder_rules(config: ModernBertConfig, prefix: str) -> list[Rule]:
    ours, theirs = "encoder.layers.{i}.", f"{prefix}layers.{{i}}."
    heads, qkv = config.num_attention_heads, f"{ours}self_attention.linear_qkv"
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", f"{prefix}embeddings.tok_embeddings.weight"),
        *_same("embedding.layernorm", f"{prefix}embeddings.norm", bias=config.norm_bias),
        *_same("encoder.final_layernorm", f"{prefix}final_norm", bias=config.norm_bias),
        *_same(f"{ours}pre_mlp_layernorm", f"{theirs}mlp_norm", bias=config.norm_bias),
        *_same(f"{ours}self_attention.linear_proj", f"{theirs}attn.Wo", bias=config.attention_bias),
        *_same(f"{ours}mlp.linear_fc1", f"{theirs}mlp.Wi", bias=config.mlp_bias),
        *_same(f"{ours}mlp.linear_fc2", f"{theirs}mlp.Wo", bias=config.mlp_bias),
        *(
            GroupedQKV(f"{qkv}.{kind}", f"{theirs}attn.Wqkv.{kind}", groups=heads, heads=heads)
            for kind in _kinds(config.attention_bias)
        ),
    ]
    # The first layer has no norm before attention.
    for i in range(1, config.num_layers):
        rules += _same(f"encoder.layers.{i}.input_layernorm", f"{prefix}layers.{i}.attn_norm", bias=config.norm_bias)
    return rules


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def _same(ours: str, theirs: str, *, bias: bool) -> list[Rule]:
    return [Same(f"{ours}.{kind}", f"{theirs}.{kind}") for kind in _kinds(bias)]


def copies(config: ModernBertConfig) -> Mapping[str, str]:
    return {"decoder.weight": "model.embeddings.tok_embeddings.weight"} if config.add_lm_head else {}


HUGGING_FACE = HuggingFaceFamily("modernbert", {"modernbert": CONFIG}, name_map, copies=copies)
