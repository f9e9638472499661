"""T5, T5 1.1, mT5 and UMT5 in Hugging Face's format; Megatron's T5, with learned positions, is exported as a
Blenderbot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed, require_known
from mt_core.errors import ConfigError
from mt_core.name_map import Concatenate, GroupedQKV, NameMap, Rule, Same
from mt_core.nn.activations import is_gated
from mt_models.hugging_face import (
    FURTHER_ACTIVATIONS,
    IGNORED,
    NOT_A_CHOICE,
    OF_HEADS,
    HuggingFaceFamily,
    require_value,
)
from mt_models.t5 import blenderbot
from mt_models.t5.blenderbot import HeadwiseKV
from mt_models.t5.config import T5Config

PADDING = 0
"""The id with which T5's decoder begins, unless the tokenizer says otherwise."""
PLAIN = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "relu2": "squared_relu",
    "quick_gelu": "quick_gelu",
    **FURTHER_ACTIVATIONS,
}
"""dense_act_fn -> model.activation."""
GATED = {"gelu": "geglu", "gelu_new": "geglu_tanh", "gelu_pytorch_tanh": "geglu_tanh", "silu": "swiglu"}
GATED |= {name: GATED["gelu_new" if plain == "gelu_tanh" else plain] for name, plain in FURTHER_ACTIVATIONS.items()}
"""The same with is_gated_act."""


def import_activation(external: Mapping[str, Any]) -> str:
    """`dense_act_fn` and `is_gated_act`, which newer files have, count; without them `feed_forward_proj` says both."""
    default = "relu" if external.get("model_type", "t5") == "t5" else "gated-gelu"
    projection = str(external.get("feed_forward_proj", default))
    # The class takes gated-gelu for the tanh approximation.
    implied = "gelu_new" if projection == "gated-gelu" else projection.removeprefix("gated-")
    name, gated = external.get("dense_act_fn", implied), external.get("is_gated_act", projection.startswith("gated-"))
    known = GATED if gated else PLAIN
    if name not in known:
        raise ConfigError(
            f"feed_forward_proj={projection!r}, dense_act_fn={name!r} and is_gated_act={gated} are not supported "
            f"together; dense_act_fn can be {', '.join(known)}"
        )
    return known[name]


def export_activation(name: str) -> dict[str, Any]:
    for gated, known in ((False, PLAIN), (True, GATED)):
        for theirs, ours in known.items():
            if ours == name:
                whole = "gelu" if gated and theirs == "gelu_new" else theirs
                # The class makes gelu_new of gated-gelu, so that the exact one has to be said.
                exact = {"dense_act_fn": "gelu", "is_gated_act": True} if name == "geglu" else {}
                return {"feed_forward_proj": f"gated-{whole}" if gated else whole, **exact}
    require_known("model.activation", name, [*PLAIN.values(), *GATED.values()])
    raise AssertionError


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    """If `tie_word_embeddings` is false the output is not scaled, but in UMT5; newer files have a key for it."""
    # Before transformers 5 tie_word_embeddings decided both whether the LM head is the embedding and whether
    # its input is scaled; since then scale_decoder_outputs is the second.
    dropout, tied = float(external.get("dropout_rate", 0.1)), bool(external.get("tie_word_embeddings", True))
    # UMT5's class takes every file for a tied one and scales its output; mT5's has no scale at all.
    kind = external.get("model_type")
    scaled = kind == UMT5 or bool(external.get("scale_decoder_outputs", tied and kind != "mt5"))
    return {
        "activation": import_activation(external),
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "untie_embeddings_and_output_weights": not tied,
        "relative_attention_bias_per_layer": external.get("model_type") == UMT5,
        ("scale_output" if tied else "scale_untied_output"): scaled,
    }


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    head = model.get("kv_channels") or model["hidden_size"] // model["num_attention_heads"]
    tied = not model.get("untie_embeddings_and_output_weights")
    per_layer = bool(model.get("relative_attention_bias_per_layer"))
    scaled = bool(model.get("scale_output", True) if tied else model.get("scale_untied_output", False))
    scale = {} if per_layer else {"scale_decoder_outputs": scaled}
    return {
        "architectures": [f"{'UMT5' if per_layer else 'T5'}ForConditionalGeneration"],
        "decoder_start_token_id": PADDING,
        "tie_word_embeddings": tied,
        **scale,
        **export_activation(model["activation"]),
        "dropout_rate": model.get("hidden_dropout"),
        "d_kv": head,
        "d_ff": model.get("ffn_hidden_size") or 4 * model["hidden_size"],
        "num_decoder_layers": model.get("decoder_num_layers") or model["num_layers"],
    }


UMT5 = "umt5"


def config_map(kind: str, *, vocab: int, ffn: int, layers: int, heads: int) -> ConfigMap:
    """The map of a model_type, with what its class takes where a file says nothing."""
    return ConfigMap(
        architecture=kind,
        fields=(
            Field("vocab_size", "vocab_size", default=vocab),
            Field("d_model", "hidden_size", default=512),
            Field("d_kv", "kv_channels", default=64),
            Field("d_ff", "ffn_hidden_size", default=ffn),
            Field("num_layers", "num_layers", default=layers),
            Field("num_decoder_layers", "decoder_num_layers"),
            Field("num_heads", "num_attention_heads", default=heads),
            Field("relative_attention_num_buckets", "relative_attention_num_buckets", default=32),
            Field("relative_attention_max_distance", "relative_attention_max_distance", default=128),
            Field("layer_norm_epsilon", "norm_epsilon", default=1e-6),
        ),
        fixed=(
            Fixed("is_encoder_decoder", (True,)),
            Fixed("is_decoder", (False,)),
            # Of UMT5's published files; no version of its class reads it.
            Fixed("scalable_attention", (True, False), written=False),
            *(entry for entry in NOT_A_CHOICE if entry.theirs not in ("is_encoder_decoder", "is_decoder")),
        ),
        ignored={
            **IGNORED,
            "n_positions": "relative positions have no table",
            "initializer_factor": "scales initial weights only",
            "classifier_dropout": OF_HEADS,
        },
        import_extra=import_extra,
        import_extra_keys=(
            *("model_type", "tie_word_embeddings", "dropout_rate"),
            *(("scale_decoder_outputs",) if kind == "t5" else ()),
            *("feed_forward_proj", "dense_act_fn", "is_gated_act"),
        ),
        export_extra=export_extra,
        spellings={
            "hidden_size": "d_model",
            "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers",
            "head_dim": "d_kv",
        },
    )


CONFIG_MAPS = {
    "t5": config_map("t5", vocab=32128, ffn=2048, layers=6, heads=8),
    # Written as t5, of which it is one with an output that is not scaled.
    "mt5": config_map("mt5", vocab=250112, ffn=1024, layers=8, heads=6),
    UMT5: config_map(UMT5, vocab=250112, ffn=1024, layers=8, heads=6),
}


def stack_rules(config: T5Config, stack: str, layers: int) -> Iterable[Rule]:
    """Rules of encoder or decoder, expanded: the two may differ in their number of layers."""
    ours, theirs = f"{stack}.layers.{{i}}.", f"{stack}.block.{{i}}.layer."
    # `layer.{n}` of a block: 0 self-attention, in a decoder 1 cross attention, and the feed-forward last
    last = 2 if stack == "decoder" else 1
    heads, feed = config.num_attention_heads, f"{theirs}{last}.DenseReluDense."
    # wi_0 is the gate, to which the activation is applied; wi_1 the other half.
    wi = (f"{feed}wi_0.weight", f"{feed}wi_1.weight") if is_gated(config.activation) else (f"{feed}wi.weight",)
    qkv = tuple(f"{theirs}0.SelfAttention.{x}.weight" for x in "qkv")
    rules: list[Rule] = [
        Same(f"{ours}input_layernorm.weight", f"{theirs}0.layer_norm.weight"),
        GroupedQKV(f"{ours}self_attention.linear_qkv.weight", qkv, groups=heads, heads=heads),
        Same(f"{ours}self_attention.linear_proj.weight", f"{theirs}0.SelfAttention.o.weight"),
        Same(f"{ours}pre_mlp_layernorm.weight", f"{theirs}{last}.layer_norm.weight"),
        Concatenate(f"{ours}mlp.linear_fc1.weight", wi),
        Same(f"{ours}mlp.linear_fc2.weight", f"{feed}wo.weight"),
    ]
    if stack == "decoder":
        rules += cross_rules(ours, f"{theirs}1.", heads)
    yield from (rule.for_layer(i) for rule in rules for i in range(layers))
    yield Same(f"{stack}.final_layernorm.weight", f"{stack}.final_layer_norm.weight")
    yield from bias_rules(config, stack, layers)


def bias_rules(config: T5Config, stack: str, layers: int) -> Iterable[Rule]:
    """In T5 the first layer has the table of all."""
    table = "relative_attention_bias.weight"
    for i in range(layers if config.relative_attention_bias_per_layer else 1):
        of_layer = f"{stack}.layers.{i}.self_attention.relative_pos_emb"
        ours = of_layer if config.relative_attention_bias_per_layer else f"{stack}_relative_pos_emb"
        yield Same(f"{ours}.{table}", f"{stack}.block.{i}.layer.0.SelfAttention.{table}")


def cross_rules(ours: str, theirs: str, heads: int) -> list[Rule]:
    kv = tuple(f"{theirs}EncDecAttention.{x}.weight" for x in "kv")
    return [
        Same(f"{ours}pre_cross_attn_layernorm.weight", f"{theirs}layer_norm.weight"),
        Same(f"{ours}cross_attention.linear_q.weight", f"{theirs}EncDecAttention.q.weight"),
        HeadwiseKV(f"{ours}cross_attention.linear_kv.weight", kv, heads=heads),
        Same(f"{ours}cross_attention.linear_proj.weight", f"{theirs}EncDecAttention.o.weight"),
    ]


def name_map(config: T5Config) -> NameMap:
    if model_type_of(config) == blenderbot.KIND:
        return blenderbot.name_map(config)
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "shared.weight"),
        *stack_rules(config, "encoder", config.num_layers),
        *stack_rules(config, "decoder", config.decoder_layers),
    ]
    if config.untie_embeddings_and_output_weights:
        rules.append(Same("output_layer.weight", "lm_head.weight"))
    # Google's first checkpoints hold it; transformers ignores it too (_keys_to_ignore_on_load_unexpected).
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    # No rule has `{i}` left: the stacks expand their own, and may differ in depth.
    return NameMap(rules, config.num_layers, ignored=[unused])


def copies(config: T5Config) -> Mapping[str, str]:
    if model_type_of(config) == blenderbot.KIND:
        return blenderbot.copies(config)
    tied = [] if config.untie_embeddings_and_output_weights else ["lm_head.weight"]
    return dict.fromkeys(["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *tied], "shared.weight")


def model_type_of(config: T5Config) -> str:
    """Raises ConfigError for a model that differs from T5, or with learned positions from Blenderbot, in what the
    format cannot express."""
    if config.position_embedding_type == "learned_absolute":
        blenderbot.require_blenderbot(config)
        return blenderbot.KIND
    for key, value in (
        ("normalization", "RMSNorm"),
        ("add_bias_linear", False),
        ("scale_attention_scores", False),
        ("add_output_bias", False),
        ("attention_dropout", config.hidden_dropout),
    ):
        require_value(config, key, (value,), "t5")
    if not config.relative_attention_bias_per_layer:
        return "t5"
    untied = config.untie_embeddings_and_output_weights
    require_value(config, "scale_untied_output" if untied else "scale_output", (True,), UMT5)
    return UMT5


def held(external: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """config.json with what the names of the tensors say: without `lm_head.weight` the LM head is the embedding, as the
    classes of Hugging Face load it.

    Outputs of mT5 are not scaled, whether its head is tied or not. A T5 without a head whose config.json has
    tie_word_embeddings=false does not scale them either, unless it sets scale_decoder_outputs.
    """
    kind, has_head = external.get("model_type"), "lm_head.weight" in set(names)
    if kind == "mt5" or (kind == UMT5 and not has_head):
        return {**external, "tie_word_embeddings": not has_head}
    if kind == "t5" and not has_head and external.get("tie_word_embeddings") is False:
        return {"scale_decoder_outputs": False, **external, "tie_word_embeddings": True}
    return external


HUGGING_FACE = HuggingFaceFamily(
    "t5", {**CONFIG_MAPS, blenderbot.KIND: blenderbot.BLENDERBOT}, name_map, model_type_of, copies, held=held
)
