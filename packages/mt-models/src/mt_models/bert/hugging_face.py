"""BERT in Hugging Face's format: `bert` is post-norm, `megatron-bert` is pre-norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed, require_known
from mt_core.errors import ConfigError
from mt_core.name_map import GroupedQKV, NameMap, Rule, Same
from mt_models.bert.config import BertConfig
from mt_models.hugging_face import FURTHER_ACTIVATIONS, IGNORED, NOT_A_CHOICE, OF_HEADS, HuggingFaceFamily

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    **FURTHER_ACTIVATIONS,
}
"""Hugging Face's value -> ours; if several map to one, the first is exported."""
PLACEMENTS = {"bert": "post", "megatron-bert": "pre"}


def import_activation(name: str) -> str:
    return ACTIVATIONS[require_known("hidden_act", name, ACTIVATIONS)]


def export_activation(name: str) -> str:
    # reversed: of several names for one activation the first is inserted last, and stays.
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    return names[require_known("model.activation", name, names)]


# -- configuration -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """Which heads a Hugging Face class has."""

    lm: bool
    binary: bool
    pooler: bool


CLASSES = {
    "ForPreTraining": Heads(lm=True, binary=True, pooler=True),
    "ForMaskedLM": Heads(lm=True, binary=False, pooler=False),
    "ForNextSentencePrediction": Heads(lm=False, binary=True, pooler=True),
    "Model": Heads(lm=False, binary=False, pooler=True),
}
"""By the suffix of the class name. A configuration without a class name is read as the first."""
STEMS = {"bert": "Bert", "megatron-bert": "MegatronBert"}


def heads_of(external: Mapping[str, Any], stem: str) -> Heads:
    """The heads of the class that `architectures` names; ConfigError for a class of another kind."""
    named = external.get("architectures") or [f"{stem}ForPreTraining"]
    known = {f"{stem}{end}": heads for end, heads in CLASSES.items()}
    # The class decides which heads the file has: nothing else in a config.json of BERT does.
    return known[require_known("architectures", str(named[0]), known)]


POOLER_KEY = "add_pooling_layer"
"""False: the encoder has no pooler, as in most files of other formats. An option of the class, which a config.json of
transformers does not have."""


def class_of(model: Mapping[str, Any], stem: str) -> str:
    """The class that has the heads of a [model] section."""
    binary = bool(model.get("bert_binary_head"))
    pooler = model.get("add_pooler")
    wanted = Heads(bool(model.get("add_lm_head")), binary, binary if pooler is None else bool(pooler))
    for end, heads in CLASSES.items():
        if heads == wanted:
            return f"{stem}{end}"
    raise ConfigError(
        f"no class of Hugging Face has the heads model.add_lm_head={str(wanted.lm).lower()}, model.bert_binary_head="
        f"{str(wanted.binary).lower()} and model.add_pooler={str(wanted.pooler).lower()}; one without a pooler "
        "is left when masked words are the only task"
    )


ENCODER_FIELDS = (
    Field("vocab_size", "vocab_size", default=30522),
    Field("num_hidden_layers", "num_layers", default=12),
    Field("hidden_size", "hidden_size", default=768),
    Field("num_attention_heads", "num_attention_heads", default=12),
    Field("intermediate_size", "ffn_hidden_size", default=3072),
    Field("hidden_act", "activation", import_activation, export_activation, default="gelu"),
    Field("max_position_embeddings", "max_position_embeddings", default=512),
    Field("type_vocab_size", "num_tokentypes", default=2),
    Field("layer_norm_eps", "norm_epsilon", default=1e-12),
    Field("hidden_dropout_prob", "hidden_dropout", float, default=0.1),
    Field("attention_probs_dropout_prob", "attention_dropout", float, default=0.1),
    Field("initializer_range", "init_method_std", default=0.02),
)
WRITTEN = ("is_decoder", "add_cross_attention", "is_encoder_decoder")
ENCODER_FIXED = (
    *(Fixed(key, (False,)) for key in WRITTEN),
    Fixed("tie_word_embeddings", (True,)),
    Fixed("position_embedding_type", ("absolute",)),
    # From Google's original code. Both name the pooler: one linear layer on the first token.
    Fixed("directionality", ("bidi",), written=False),
    Fixed("pooler_type", ("first_token_transform",), written=False),
    *(entry for entry in NOT_A_CHOICE if entry.theirs not in WRITTEN),
)
ENCODER_IGNORED = {
    **{key: why for key, why in IGNORED.items() if key != "architectures"},
    "classifier_dropout": OF_HEADS,
    **dict.fromkeys(
        ("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
        "of other poolers than that on the first token, in Google's first code",
    ),
}


def config_map(model_type: str) -> ConfigMap:
    stem = STEMS[model_type]

    def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
        heads = heads_of(external, stem)
        return {
            "layernorm_placement": PLACEMENTS[model_type],
            "use_scaled_init_method": False,
            "add_lm_head": heads.lm,
            "bert_binary_head": heads.binary,
            "add_pooler": heads.pooler and bool(external.get(POOLER_KEY, True)),
        }

    return ConfigMap(
        architecture=model_type,
        fields=ENCODER_FIELDS,
        fixed=ENCODER_FIXED,
        ignored=ENCODER_IGNORED,
        import_extra=import_extra,
        import_extra_keys=("architectures", POOLER_KEY),
        export_extra=lambda model: {
            "architectures": [class_of(model, stem)],
            "intermediate_size": model.get("ffn_hidden_size") or 4 * model["hidden_size"],
        },
    )


CONFIG_MAPS = {model_type: config_map(model_type) for model_type in PLACEMENTS}


def model_type_of(config: BertConfig) -> str:
    return next(kind for kind, placement in PLACEMENTS.items() if placement == config.layernorm_placement)


# -- names -------------------------------------------------------------------------------------------

LAYER = "encoder.layers.{i}."
POST_NORMS = (
    ("embedding.layernorm", "embeddings.LayerNorm"),
    (f"{LAYER}post_attention_layernorm", "encoder.layer.{i}.attention.output.LayerNorm"),
    (f"{LAYER}post_mlp_layernorm", "encoder.layer.{i}.output.LayerNorm"),
)
PRE_NORMS = (
    (f"{LAYER}input_layernorm", "encoder.layer.{i}.attention.ln"),
    (f"{LAYER}pre_mlp_layernorm", "encoder.layer.{i}.ln"),
    ("encoder.final_layernorm", "encoder.ln"),
)
TABLES = (
    ("embedding.word_embeddings.weight", "embeddings.word_embeddings.weight"),
    ("embedding.position_embeddings.weight", "embeddings.position_embeddings.weight"),
)
TYPES = ("embedding.tokentype_embeddings.weight", "embeddings.token_type_embeddings.weight")
LINEARS = (
    (f"{LAYER}self_attention.linear_proj", "encoder.layer.{i}.attention.output.dense"),
    (f"{LAYER}mlp.linear_fc1", "encoder.layer.{i}.intermediate.dense"),
    (f"{LAYER}mlp.linear_fc2", "encoder.layer.{i}.output.dense"),
)
LM_HEAD = (
    ("lm_head.dense", "cls.predictions.transform.dense"),
    ("lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
)


def with_bias(ours: str, theirs: str) -> list[Rule]:
    return [Same(f"{ours}.{kind}", f"{theirs}.{kind}") for kind in ("weight", "bias")]


def encoder_rules(config: BertConfig, prefix: str) -> list[Rule]:
    """Rules of the embedding and the layers; prefix: what their names begin with there."""
    pairs = (*TABLES, TYPES) if config.num_tokentypes else TABLES
    norms = POST_NORMS if config.layernorm_placement == "post" else PRE_NORMS
    rules: list[Rule] = [Same(ours, prefix + theirs) for ours, theirs in pairs]
    for ours, theirs in (*norms, *LINEARS):
        rules += with_bias(ours, prefix + theirs)
    heads = config.num_attention_heads
    for kind in ("weight", "bias"):
        theirs_qkv = tuple(f"{prefix}encoder.layer.{{i}}.attention.self.{x}.{kind}" for x in ("query", "key", "value"))
        rules.append(GroupedQKV(f"{LAYER}self_attention.linear_qkv.{kind}", theirs_qkv, groups=heads, heads=heads))
    return rules


def prefix_of(config: BertConfig) -> str:
    """A bare encoder has no prefix there; with a head it is a part called bert."""
    return "bert." if config.add_lm_head or config.bert_binary_head else ""


def name_map(config: BertConfig) -> NameMap:
    prefix = prefix_of(config)
    rules = encoder_rules(config, prefix)
    if config.has_pooler:
        rules += with_bias("pooler.dense", f"{prefix}pooler.dense")
    if config.add_lm_head:
        rules += [rule for pair in LM_HEAD for rule in with_bias(*pair)]
        rules.append(Same("output_layer.bias", "cls.predictions.bias"))
    if config.bert_binary_head:
        rules += with_bias("binary_head", "cls.seq_relationship")
    return NameMap(rules, config.num_layers, ignored=[f"{prefix}embeddings.position_ids"])


def copies(config: BertConfig) -> Mapping[str, str]:
    if not config.add_lm_head:
        return {}
    return {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }


def spelling(config: BertConfig, name: str) -> str:
    """The first published checkpoints call the weight of a norm gamma and its bias beta."""
    for end, meaning in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(end):
            return name.removesuffix(end) + meaning
    return name


HUGGING_FACE = HuggingFaceFamily("bert", CONFIG_MAPS, name_map, model_type_of, copies, spelling)
