"""BART, mBART, Blenderbot and Blenderbot-small in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import GroupedQKV, NameMap, Rule, Same
from mt_models.bart.config import BartConfig
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, OF_GENERATION, OF_HEADS, HuggingFaceFamily, require_value
from mt_models.t5.blenderbot import (
    ACTIVATIONS,
    BOTH_STACKS,
    KINDS,
    NORM_EPSILON,
    ONE_TABLE,
    HeadwiseKV,
    Row,
    import_activation,
)

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "bart": {
        "layernorm_placement": "post",
        "normalize_embedding": True,
        "norm_before_positions": False,
        "position_offset": 2,
    },
    "mbart": {
        "layernorm_placement": "pre",
        "normalize_embedding": True,
        "norm_before_positions": False,
        "position_offset": 2,
    },
    "blenderbot": {
        "layernorm_placement": "pre",
        "normalize_embedding": False,
        "norm_before_positions": False,
        "position_offset": 0,
    },
    "blenderbot-small": {
        "layernorm_placement": "post",
        "normalize_embedding": True,
        "norm_before_positions": True,
        "position_offset": 0,
    },
}
"""model_type -> the keys of [model] in which the classes differ, and which their configurations do not say."""
CLASSES = {
    "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "blenderbot": "BlenderbotForConditionalGeneration",
    "blenderbot-small": "BlenderbotSmallForConditionalGeneration",
}

# -- names -------------------------------------------------------------------------------------------

NORMS = {
    "pre": {
        "input_layernorm": "self_attn_layer_norm",
        "pre_cross_attn_layernorm": "encoder_attn_layer_norm",
        "pre_mlp_layernorm": "final_layer_norm",
    },
    "post": {
        "post_attention_layernorm": "self_attn_layer_norm",
        "post_cross_attn_layernorm": "encoder_attn_layer_norm",
        "post_mlp_layernorm": "final_layer_norm",
    },
}
"""Norms of a layer by their placement."""


def name_map(config: BartConfig) -> NameMap:
    rules: list[Rule] = [Same("embedding.word_embeddings.weight", "model.shared.weight")]
    for stack, layers in (("encoder", config.num_layers), ("decoder", config.decoder_layers)):
        rules += stack_rules(config, stack, layers)
    # [1, vocab] there: a buffer that is added to logits [B, T, vocab]
    rules.append(Row("output_layer.bias", "final_logits_bias"))
    # Versions of fairseq stand in the first published files; transformers ignores them, too.
    unused = ["model.encoder.version", "model.decoder.version"]
    # No rule has `{i}` left: the stacks expand their own, and may differ in depth.
    return NameMap(rules, config.num_layers, ignored=unused)


def stack_rules(config: BartConfig, stack: str, layers: int) -> Iterable[Rule]:
    theirs = f"model.{stack}."
    yield Same(f"{stack}_embedding.position_embeddings.weight", f"{theirs}embed_positions.weight")
    for kind in KINDS:
        if config.normalize_embedding:
            yield Same(f"{stack}_embedding.layernorm.{kind}", f"{theirs}layernorm_embedding.{kind}")
        if config.layernorm_placement == "pre":
            yield Same(f"{stack}.final_layernorm.{kind}", f"{theirs}layer_norm.{kind}")
        yield from (rule.for_layer(i) for rule in layer_rules(config, stack, kind) for i in range(layers))


def layer_rules(config: BartConfig, stack: str, kind: str) -> list[Rule]:
    """kind: weight or bias."""
    ours, theirs, heads = f"{stack}.layers.{{i}}.", f"model.{stack}.layers.{{i}}.", config.num_attention_heads
    names = NORMS[config.layernorm_placement] | {
        "self_attention.linear_proj": "self_attn.out_proj",
        "mlp.linear_fc1": "fc1",
        "mlp.linear_fc2": "fc2",
        "cross_attention.linear_q": "encoder_attn.q_proj",
        "cross_attention.linear_proj": "encoder_attn.out_proj",
    }
    qkv = tuple(f"{theirs}self_attn.{x}_proj.{kind}" for x in "qkv")
    rules: list[Rule] = [GroupedQKV(f"{ours}self_attention.linear_qkv.{kind}", qkv, groups=heads, heads=heads)]
    if stack == "decoder":
        kv = tuple(f"{theirs}encoder_attn.{x}_proj.{kind}" for x in "kv")
        rules.append(HeadwiseKV(f"{ours}cross_attention.linear_kv.{kind}", kv, heads=heads))
    else:
        names = {here: there for here, there in names.items() if "cross_att" not in here}
    return [*rules, *(Same(f"{ours}{name}.{kind}", f"{theirs}{there}.{kind}") for name, there in names.items())]


def copies(config: BartConfig) -> Mapping[str, str]:
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    return dict.fromkeys(names, "model.shared.weight")


# -- configuration -----------------------------------------------------------------------------------


def model_type_of(config: BartConfig) -> str:
    """Raises ConfigError for a model that is none of the four."""
    kind = next((kind for kind, keys in SHAPES.items() if all(getattr(config, k) == v for k, v in keys.items())), None)
    if kind is None:
        shape = ", ".join(f"model.{key}={getattr(config, key)}" for key in SHAPES["bart"])
        legal = "; ".join(f"{kind}: {', '.join(map(str, keys.values()))}" for kind, keys in SHAPES.items())
        raise ConfigError(f"{shape} cannot be written in Hugging Face's format, which has {legal}")
    require_value(config, "norm_epsilon", (NORM_EPSILON,), kind)
    require_value(config, "activation", tuple(ACTIVATIONS.values()), kind)
    return kind


REPEATED = {
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "hidden_size": "d_model",
}
"""Other names of fields -> the fields, of which the classes keep one value."""


def import_extra(external: Mapping[str, Any], kind: str, defaults: Mapping[str, int]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, repeated in REPEATED.items():
        meant = external.get(repeated, defaults[repeated])
        # transformers lets either of both count, by the order of the file.
        if external.get(name) not in (None, meant):
            raise ConfigError(
                f"{name}={external[name]} and {repeated}={meant} differ, and are one field; remove {name}"
            )
    for key, ours in BOTH_STACKS:
        encoder, decoder = (int(external.get(name, defaults[name])) for name in (f"encoder_{key}", f"decoder_{key}"))
        # The number of layers may differ between the stacks; heads and widths are one key for both here.
        if key == "layers":
            values["decoder_num_layers"] = decoder
        elif encoder != decoder:
            raise ConfigError(f"encoder_{key}={encoder} and decoder_{key}={decoder} differ, which is not supported")
        values[ours] = encoder
    return {**values, **SHAPES[kind], "norm_epsilon": NORM_EPSILON}


def export_extra(model: Mapping[str, Any], kind: str) -> dict[str, Any]:
    config = BartConfig.model_validate(model)
    stacks = {"layers": config.num_layers, "attention_heads": config.num_attention_heads, "ffn_dim": config.ffn_size}
    # Where the model does not say it, the tokenizer's beginning of a text takes its place. Published mBART has null,
    # since the language decides it.
    start = 0 if config.decoder_start_token_id is None and kind != "mbart" else config.decoder_start_token_id
    return {
        "architectures": [CLASSES[kind]],
        "forced_eos_token_id": None,
        **({} if kind != "blenderbot" else {"encoder_no_repeat_ngram_size": 0}),
        "decoder_start_token_id": start,
        **{f"encoder_{key}": value for key, value in stacks.items()},
        **{f"decoder_{key}": value for key, value in {**stacks, "layers": config.decoder_layers}.items()},
    }


def config_map(
    kind: str,
    *,
    vocab: int,
    width: int,
    positions: int,
    layers: tuple[int, int],
    heads: int,
    ffn: int,
    start: int | None,
) -> ConfigMap:
    """The numbers are the defaults of the class; layers: of the encoder and of the decoder."""
    defaults = dict(zip(("encoder_layers", "decoder_layers"), layers, strict=True))
    defaults |= {f"{stack}_attention_heads": heads for stack in ("encoder", "decoder")}
    defaults |= {f"{stack}_ffn_dim": ffn for stack in ("encoder", "decoder")}
    extra = tuple(defaults)
    defaults["d_model"] = width
    pre = SHAPES[kind]["layernorm_placement"] == "pre"
    return ConfigMap(
        architecture=kind,
        fields=(
            Field("vocab_size", "vocab_size", default=vocab),
            Field("d_model", "hidden_size", default=width),
            Field("max_position_embeddings", "max_position_embeddings", default=positions),
            Field("dropout", "hidden_dropout", import_value=float, default=0.1),
            Field("attention_dropout", "attention_dropout", import_value=float, default=0.0),
            Field("activation_dropout", "activation_dropout", import_value=float, default=0.0),
            Field("init_std", "init_method_std", import_value=float, default=0.02),
            Field("scale_embedding", "scale_embedding", import_value=bool, default=False),
            Field(
                "activation_function",
                "activation",
                import_activation,
                {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}.get,
                default="gelu",
            ),
        ),
        fixed=(
            Fixed("is_encoder_decoder", (True,)),
            Fixed("is_decoder", (False,)),
            Fixed("tie_word_embeddings", (True,)),
            # Layers that a step of training leaves out by chance.
            *(Fixed(f"{stack}_layerdrop", (0.0,)) for stack in ("encoder", "decoder")),
            # Of files that mt has written of a T5, which has one table for both stacks.
            Fixed(ONE_TABLE, (False,), written=False),
            # What earlier versions of the class read, as it computes today.
            Fixed("normalize_before", (pre,), written=False),
            Fixed("normalize_embedding", (bool(SHAPES[kind]["normalize_embedding"]),), written=False),
            Fixed("add_final_layer_norm", (pre,), written=False),
            Fixed("extra_pos_embeddings", (SHAPES[kind]["position_offset"],), written=False),
            Fixed("static_position_embeddings", (False,), written=False),
            *(entry for entry in NOT_A_CHOICE if entry.theirs not in ("is_encoder_decoder", "is_decoder")),
        ),
        ignored={
            **{key: reason for key, reason in IGNORED.items() if key != "decoder_start_token_id"},
            **dict.fromkeys(("force_bos_token_to_be_generated", "save_step"), OF_GENERATION),
            # Other names of fields of the encoder; import_extra compares them.
            **dict.fromkeys(REPEATED, "repeats another field"),
            **dict.fromkeys(("classifier_dropout", "classif_dropout"), OF_HEADS),
            "add_bias_logits": "the bias is in the weights, zeros where it has no effect",
        },
        import_extra=lambda external: {
            **import_extra(external, kind, defaults),
            **_start(external, start),
        },
        import_extra_keys=(*extra, "decoder_start_token_id"),
        export_extra=partial(export_extra, kind=kind),
    )


def _start(external: Mapping[str, Any], default: int | None) -> dict[str, Any]:
    start = external.get("decoder_start_token_id", default)
    return {} if start is None else {"decoder_start_token_id": int(start)}


CONFIG_MAPS = {
    "bart": config_map("bart", vocab=50265, width=1024, positions=1024, layers=(12, 12), heads=16, ffn=4096, start=2),
    "mbart": config_map(
        "mbart", vocab=50265, width=1024, positions=1024, layers=(12, 12), heads=16, ffn=4096, start=None
    ),
    "blenderbot": config_map(
        "blenderbot", vocab=8008, width=2560, positions=128, layers=(2, 24), heads=32, ffn=10240, start=1
    ),
    "blenderbot-small": config_map(
        "blenderbot-small", vocab=50265, width=512, positions=512, layers=(8, 8), heads=16, ffn=2048, start=1
    ),
}

HUGGING_FACE = HuggingFaceFamily("bart", CONFIG_MAPS, name_map, model_type_of, copies)
