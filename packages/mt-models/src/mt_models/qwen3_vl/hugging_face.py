"""Qwen3-VL in Hugging Face's format, `qwen3_vl` and, with experts, `qwen3_vl_moe`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import GroupedQKV, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    OURS,
    PRE_NORMS,
    QK_NORMS,
    THEIRS,
    attention_rules,
    decoder_name_map,
    feed_forward_rules,
    norm_rules,
    rope_table,
)
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.hugging_face import GELU_TANH, IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value
from mt_models.qwen.hugging_face import QWEN3
from mt_models.qwen3_vl.config import Qwen3VisionConfig, Qwen3VLConfig, Qwen3VLDecoderConfig
from mt_models.qwen_moe.hugging_face import QWEN3_MOE
from mt_models.qwen_vl.hugging_face import TOKENS, import_axial, pixel_preprocessor

DENSE, SPARSE = "qwen3_vl", "qwen3_vl_moe"

# -- configuration of the decoder --------------------------------------------------------------------

COMMON_DEFAULTS = {"vocab_size": 151936, "max_position_embeddings": 128000}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    DENSE: {
        **COMMON_DEFAULTS, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32,
    },
    SPARSE: {
        **COMMON_DEFAULTS, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    },
}  # fmt: skip
"""Defaults of transformers, for what a file leaves out."""
MROPE: dict[str, Any] = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
BASE = 500000.0


def import_decoder(kind: str, external: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [model.language_model]."""
    text = {**DEFAULTS[kind], **(external.get("text_config") or {})}
    if kind == SPARSE and "num_experts" not in text:
        text.setdefault("num_local_experts", 60)
    # The router divides by the sum over the chosen experts, whatever a file says.
    if text.pop("norm_topk_prob", True) is False:
        raise ConfigError("text_config.norm_topk_prob=False is not supported; the class has true")
    rope = rope_table(text, BASE, **MROPE)
    sections = rope.pop("mrope_section")
    # Whatever it says: the class has no other order of axes.
    rope.pop("mrope_interleaved")
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    # The outer class ties its LM head by its own key.
    tied = bool(external.get("tie_word_embeddings", False))
    decoder = QWEN3 if kind == DENSE else QWEN3_MOE
    routing = {"norm_topk_prob": True} if kind == SPARSE else {}
    keys = decoder.import_value(
        {**text, **routing, "tie_word_embeddings": tied, "rope_scaling": None, "rope_parameters": rope}
    )
    if kind == SPARSE:
        keys.setdefault("kv_channels", keys["hidden_size"] // keys["num_attention_heads"])
    return {**keys, "mrope_section": list(sections)}


def export_decoder(decoder: Qwen3VLDecoderConfig) -> dict[str, Any]:
    """text_config. Raises ConfigError for a decoder that is not Qwen3."""
    kind = model_type_of_decoder(decoder)
    require_value(decoder, "add_qkv_bias", (False,), kind)
    require_value(decoder, "qk_layernorm", (True,), kind)
    require_value(decoder, "sliding_window", (None,), kind)
    left_out = {"mrope_section", "max_window_layers", "sliding_window"}
    values = decoder.model_dump(mode="json", exclude=left_out if kind == SPARSE else {"mrope_section"})
    if kind == SPARSE:
        MoEOptions(decoder).require(kind, moe_layer_freq=ANY, moe_ffn_hidden_size=ANY, moe_router_topk=ANY)
    text = (QWEN3_MOE if kind == SPARSE else QWEN3).export_value(values)
    unread = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "use_mrope", "norm_topk_prob")
    text = {key: value for key, value in text.items() if key not in unread}
    theta = text.pop("rope_theta")
    rope = text.pop("rope_scaling") or {"rope_type": "default"}
    sections = {"mrope_section": decoder.mrope_section, "mrope_interleaved": True}
    # Both: transformers 5 reads the table alone, older versions the two keys.
    scaling = {**rope, **sections}
    return {**text, "model_type": f"{kind}_text", "rope_theta": theta, "rope_scaling": scaling}


def model_type_of_decoder(decoder: Any) -> str:
    return DENSE if decoder.moe is None else SPARSE


# -- configuration of the vision transformer ---------------------------------------------------------


def export_vision(model: Mapping[str, Any]) -> dict[str, Any]:
    if model["norm_epsilon"] != 1e-6:
        raise ConfigError(
            f"model.vision_model.norm_epsilon={model['norm_epsilon']} cannot be written as a Hugging Face qwen3_vl, "
            "which has 1e-6"
        )
    ffn = model.get("ffn_hidden_size") or 4 * model["hidden_size"]
    return {"in_channels": model["num_channels"], "intermediate_size": ffn}


VISION_FIELDS = (
    Field("depth", "num_layers", default=27),
    Field("hidden_size", "hidden_size", default=1152),
    Field("num_heads", "num_attention_heads", default=16),
    Field("intermediate_size", "ffn_hidden_size", default=4304),
    Field("patch_size", "patch_dim", default=16),
    Field("spatial_merge_size", "spatial_merge_size", default=2),
    Field("temporal_patch_size", "temporal_patch_size", default=2),
    Field("num_position_embeddings", "num_position_embeddings", default=2304),
    Field("initializer_range", "init_method_std", float, default=0.02),
)
VISION = ConfigMap(
    architecture="qwen3_vl_vision",
    fields=(*VISION_FIELDS, Field("deepstack_visual_indexes", "deepstack_layers", list, list, default=[8, 16, 24])),
    fixed=(Fixed("hidden_act", GELU_TANH), *NOT_A_CHOICE),
    ignored={**IGNORED, "out_hidden_size": "is the hidden_size of the decoder"},
    import_extra=import_axial,
    import_extra_keys=("in_channels", "in_chans", "rope_parameters"),
    export_extra=export_vision,
)


def require_width(vision: Mapping[str, Any], hidden_size: int) -> None:
    """Raises ConfigError when the widths of the two parts do not fit."""
    width = vision.get("out_hidden_size", 3584)
    if width != hidden_size:
        raise ConfigError(
            f"vision_config.out_hidden_size={width} and text_config.hidden_size={hidden_size} differ; the merger makes "
            "vectors of the decoder's width"
        )


def image_text_map(
    kind: str,
    vision_map: ConfigMap,
    config_type: type[Qwen3VLConfig],
    import_text: Callable[[str, Mapping[str, Any]], dict[str, Any]],
    export_text: Callable[[Any], dict[str, Any]],
    *,
    image_token: int,
    fixed: tuple[Fixed, ...] = (),
    ignored: Mapping[str, str] | None = None,
) -> ConfigMap:
    """The map of a type that has `vision_config` and `text_config`. import_text: keys of [model.language_model] from
    the whole file. export_text: text_config from the decoder's configuration."""

    def import_parts(external: Mapping[str, Any]) -> dict[str, Any]:
        vision, decoder = dict(external.get("vision_config") or {}), import_text(kind, external)
        require_width(vision, decoder["hidden_size"])
        return {
            "vision_model": {"use_scaled_init_method": False, **vision_map.import_value(vision)},
            "vocab_size": decoder.pop("vocab_size"),
            "language_model": decoder,
        }

    def export_parts(model: Mapping[str, Any]) -> dict[str, Any]:
        config = config_type.model_validate(model)
        vision = vision_map.export_value(config.vision_model.model_dump(mode="json"))
        text = export_text(config.decoder)
        width = {"model_type": f"{kind}_vision", "out_hidden_size": config.decoder.hidden_size}
        return {
            "text_config": text,
            "vision_config": {**vision, **width},
            "tie_word_embeddings": text["tie_word_embeddings"],
        }

    return ConfigMap(
        architecture=kind,
        fields=(Field("image_token_id", "image_token_index", default=image_token),),
        fixed=(*NOT_A_CHOICE, *fixed),
        ignored={**IGNORED, **TOKENS, **(ignored or {})},
        import_extra=import_parts,
        import_extra_keys=("vision_config", "text_config", "tie_word_embeddings"),
        export_extra=export_parts,
    )


def _map_of(kind: str) -> ConfigMap:
    return image_text_map(kind, VISION, Qwen3VLConfig, import_decoder, export_decoder, image_token=151655)


# -- names -------------------------------------------------------------------------------------------

LAYER, THEIR_LAYER = "vision_model.decoder.layers.{i}.", "model.visual.blocks.{i}."
KINDS = ("weight", "bias")


@dataclass(frozen=True)
class EitherWayExperts(Rule):
    """[experts, in, out] in published files, [experts, out, in] here and in the modules of transformers, which takes
    both and goes by the shape. Square matrices are in files as they are here.

    shape: here, of an expert.
    """

    shape: tuple[int, int] = (0, 0)

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        tensor = tensors[0]
        return tensor if tuple(tensor.shape[1:]) == self.shape else tensor.transpose(1, 2).contiguous()

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor if self.shape[0] == self.shape[1] else tensor.transpose(1, 2).contiguous()]


def tower_rules(config: Qwen3VisionConfig) -> list[Rule]:
    heads = config.num_attention_heads
    position = Same("vision_model.position_embeddings.weight", "model.visual.pos_embed.weight")
    rules: list[Rule] = [position]
    for kind in KINDS:
        qkv = f"{THEIR_LAYER}attn.qkv.{kind}"
        rules += [
            Same(f"vision_model.conv1.{kind}", f"model.visual.patch_embed.proj.{kind}"),
            Same(f"{LAYER}input_layernorm.{kind}", f"{THEIR_LAYER}norm1.{kind}"),
            Same(f"{LAYER}pre_mlp_layernorm.{kind}", f"{THEIR_LAYER}norm2.{kind}"),
            GroupedQKV(f"{LAYER}self_attention.linear_qkv.{kind}", qkv, groups=heads, heads=heads),
            Same(f"{LAYER}self_attention.linear_proj.{kind}", f"{THEIR_LAYER}attn.proj.{kind}"),
            Same(f"{LAYER}mlp.linear_fc1.{kind}", f"{THEIR_LAYER}mlp.linear_fc1.{kind}"),
            Same(f"{LAYER}mlp.linear_fc2.{kind}", f"{THEIR_LAYER}mlp.linear_fc2.{kind}"),
        ]
    mergers = {"merger": "merger"}
    mergers |= {f"deepstack.{n}": f"deepstack_merger_list.{n}" for n in range(len(config.deepstack_layers))}
    rules += [
        Same(f"vision_projection.{ours}.{part}.{kind}", f"model.visual.{theirs}.{part}.{kind}")
        for ours, theirs in mergers.items()
        for part in ("norm", "linear_fc1", "linear_fc2")
        for kind in KINDS
    ]
    # Expanded for the tower's layers here: the whole model's NameMap has 0 layers, as its parts differ in depth.
    return NameMap(rules, config.num_layers).rules


def decoder_map(config: Qwen3VLDecoderConfig) -> NameMap:
    layer = [*norm_rules(PRE_NORMS), *norm_rules(QK_NORMS), *attention_rules(config)]
    sparse = [False] * config.num_layers if config.moe is None else MoEOptions(config).layers
    blocks = [
        rule.for_layer(number)
        for number, has_experts in enumerate(sparse)
        for rule in (expert_rules(config) if has_experts else feed_forward_rules())
    ]
    return decoder_name_map(config, [*layer, *blocks])


def expert_rules(config: Qwen3VLDecoderConfig) -> list[Rule]:
    ffn, hidden = MoEOptions(config).ffn_size, config.hidden_size
    ours, theirs = f"{OURS}mlp.", f"{THEIRS}mlp."
    return [
        Same(f"{ours}router.weight", f"{theirs}gate.weight"),
        EitherWayExperts(f"{ours}experts.linear_fc1.weight", f"{theirs}experts.gate_up_proj", shape=(2 * ffn, hidden)),
        EitherWayExperts(f"{ours}experts.linear_fc2.weight", f"{theirs}experts.down_proj", shape=(hidden, ffn)),
    ]


def nested(name: str) -> str:
    """The name of a tensor of the decoder beside a tower."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def name_map(config: Qwen3VLConfig) -> NameMap:
    decoder = decoder_map(config.decoder)
    rules = [
        replace(rule, ours=f"language_model.{rule.ours}", theirs=tuple(map(nested, rule.sources)))
        for rule in decoder.rules
    ]
    return NameMap([*tower_rules(config.vision_model), *rules], 0, ignored=map(nested, decoder.ignored))


def copies(config: Qwen3VLConfig) -> Mapping[str, str]:
    """The LM head repeats the token embeddings when the decoder ties the two."""
    if config.decoder.untie_embeddings_and_output_weights:
        return {}
    return {"lm_head.weight": "model.language_model.embed_tokens.weight"}


def model_type_of(config: Qwen3VLConfig) -> str:
    return model_type_of_decoder(config.language_model)


HUGGING_FACE = HuggingFaceFamily(
    "qwen3_vl",
    {DENSE: _map_of(DENSE), SPARSE: _map_of(SPARSE)},
    name_map,
    model_type_of=model_type_of,
    copies=copies,
    architectures={DENSE: "Qwen3VLForConditionalGeneration", SPARSE: "Qwen3VLMoeForConditionalGeneration"},
    preprocessor=pixel_preprocessor("Qwen3VLProcessor"),
)
