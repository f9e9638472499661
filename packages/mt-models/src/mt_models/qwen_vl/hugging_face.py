"""Qwen2.5-VL in Hugging Face's format, `qwen2_5_vl`.

Configurations are read in the published layout, which has the decoder's keys beside `vision_config`, and in that of
later versions of transformers, which has them in `text_config`. The former is written, which every version reads,
unless ids of tokens are kept that a file in the latter has in `text_config`. So it is with names: `visual.` and
`model.`, where modules of transformers 5 have `model.visual.` and `model.language_model.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import Concatenate, GroupedQKV, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import one_of, require_even_heads, rope_table
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, Preprocessor, require_value, tied_output
from mt_models.llava.image_processor import read_processor, trained_keys, written_processor
from mt_models.qwen import hugging_face as qwen
from mt_models.qwen_vl.config import QwenVisionConfig, QwenVLConfig, QwenVLDecoderConfig
from mt_models.qwen_vl.vision import ROTARY_BASE

# -- configuration of the decoder --------------------------------------------------------------------

TEXT_KEYS = frozenset(
    {field.theirs for field in qwen.QWEN2.fields}
    | {fixed.theirs for fixed in qwen.QWEN2.fixed if fixed.theirs != "use_mrope"}
    | {*qwen.QWEN2.import_extra_keys}
)
MARKERS = "marks images and videos in texts, which the tokenizer's template does"
TOKENS = {
    "video_token_id": "views of videos have the image token",
    **dict.fromkeys(("vision_start_token_id", "vision_end_token_id", "vision_token_id"), MARKERS),
}
TEXT_DEFAULTS = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
}
"""Defaults of transformers, for what a file leaves out."""
ROTARY_DEFAULTS: dict[str, Any] = {"rope_theta": 1000000.0, "mrope_section": [16, 24, 24]}


def text_of(external: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's keys, from either layout. Raises ConfigError where a file has both and they differ."""
    flat = {key: external[key] for key in TEXT_KEYS if key in external}
    nested = external.get("text_config")
    if nested is None:
        return flat
    for field in qwen.QWEN2.fields:
        key = field.theirs
        # tie_word_embeddings is excluded: the outer field is that of the whole model, and decides (see import_decoder).
        if key in flat and key in nested and flat[key] != nested[key] and key != "tie_word_embeddings":
            raise ConfigError(f"{key}={flat[key]!r} and text_config.{key}={nested[key]!r} differ; remove what is wrong")
    return {key: value for key, value in nested.items() if key not in (*TOKENS, "image_token_id")}


def import_decoder(external: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [model.language_model]."""
    text = {**TEXT_DEFAULTS, **text_of(external)}
    rope = rope_table(text, ROTARY_DEFAULTS["rope_theta"], mrope_section=ROTARY_DEFAULTS["mrope_section"])
    sections = rope.pop("mrope_section")
    # mrope names the kind of positions, not a scaling; mrope_section says it, and the scaling is none.
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    keys = qwen.QWEN2.import_value({**text, "rope_scaling": None, "rope_parameters": rope})
    # Whether embeddings are tied: the outer field decides if it is given.
    if external.get("tie_word_embeddings"):
        keys["untie_embeddings_and_output_weights"] = False
    return {**keys, "mrope_section": list(sections)}


def export_decoder(decoder: QwenVLDecoderConfig) -> dict[str, Any]:
    """Raises ConfigError for a decoder that is not Qwen2."""
    require_value(decoder, "add_qkv_bias", (True,), "qwen2_5_vl")
    require_value(decoder, "qk_layernorm", (False,), "qwen2_5_vl")
    require_value(decoder, "moe", (None,), "qwen2_5_vl")
    require_even_heads(decoder, "qwen2_5_vl")
    text = qwen.QWEN2.export_value(decoder.model_dump(mode="json", exclude={"mrope_section"}))
    rope = text["rope_scaling"] or {"type": "mrope"}
    left_out = ("head_dim", "use_mrope")
    text = {key: value for key, value in text.items() if key not in left_out}
    return {**text, "rope_scaling": {**rope, "mrope_section": decoder.mrope_section}}


# -- configuration of the vision transformer ---------------------------------------------------------


AXIAL = ("axial", "default")
"""Types of rotary positions of patches: the class reads default as axial."""


def import_axial(external: Mapping[str, Any]) -> dict[str, Any]:
    """Colours; raises ConfigError for rotary positions of another kind than the model's."""
    rope = external.get("rope_parameters") or {}
    kind, base = rope.get("rope_type", "axial"), rope.get("rope_theta", ROTARY_BASE)
    if kind not in AXIAL or base != ROTARY_BASE:
        raise ConfigError(
            f"vision_config.rope_parameters={rope} is not supported; positions of patches are axial with the base "
            f"{ROTARY_BASE}"
        )
    return {"num_channels": one_of(external, ("in_channels", "in_chans"), 3)}


def export_vision(model: Mapping[str, Any]) -> dict[str, Any]:
    if model["norm_epsilon"] != 1e-6:
        raise ConfigError(
            f"model.vision_model.norm_epsilon={model['norm_epsilon']} cannot be written as a Hugging Face qwen2_5_vl, "
            "which has 1e-6"
        )
    ffn = model.get("ffn_hidden_size") or 4 * model["hidden_size"]
    return {"in_channels": model["num_channels"], "intermediate_size": ffn}


VISION = ConfigMap(
    architecture="qwen2_5_vl_vision",
    fields=(
        Field("depth", "num_layers", default=32),
        Field("hidden_size", "hidden_size", default=3584),
        Field("num_heads", "num_attention_heads", default=16),
        Field("intermediate_size", "ffn_hidden_size", default=3420),
        Field("patch_size", "patch_dim", default=14),
        Field("spatial_merge_size", "spatial_merge_size", default=2),
        Field("temporal_patch_size", "temporal_patch_size", default=2),
        Field("window_size", "window_size", default=112),
        Field("tokens_per_second", "tokens_per_second", default=4),
        Field("fullatt_block_indexes", "full_attention_layers", list, list, default=[7, 15, 23, 31]),
        Field("initializer_range", "init_method_std", float, default=0.02),
    ),
    fixed=(Fixed("hidden_act", ("silu",)), *NOT_A_CHOICE),
    ignored={
        **IGNORED,
        "spatial_patch_size": "repeats patch_size",
        "out_hidden_size": "is the hidden_size of the decoder",
    },
    import_extra=import_axial,
    import_extra_keys=("in_channels", "in_chans", "rope_parameters"),
    export_extra=export_vision,
)


def import_parts(external: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of the two parts, and the vocabulary. Raises ConfigError when their widths do not fit."""
    vision, decoder = dict(external.get("vision_config") or {}), import_decoder(external)
    width = vision.get("out_hidden_size", 3584)
    if width != decoder["hidden_size"]:
        raise ConfigError(
            f"vision_config.out_hidden_size={width} and hidden_size={decoder['hidden_size']} differ; the merger makes "
            "vectors of the decoder's width"
        )
    return {
        "vision_model": {"use_scaled_init_method": False, **VISION.import_value(vision)},
        "vocab_size": decoder.pop("vocab_size"),
        "language_model": decoder,
    }


def export_parts(model: Mapping[str, Any]) -> dict[str, Any]:
    config = QwenVLConfig.model_validate(model)
    vision = VISION.export_value(config.vision_model.model_dump(mode="json"))
    vision = {"model_type": "qwen2_5_vl", **vision, "out_hidden_size": config.decoder.hidden_size}
    text = export_decoder(config.decoder)
    if "text_config" not in config.kept_token_ids:
        return {**text, "vision_config": vision}
    # The published layout has one place for ids of the text and of the whole; this file had two.
    tied = text.pop("tie_word_embeddings")
    text = {"model_type": "qwen2_5_vl_text", **text}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


QWEN25_VL = ConfigMap(
    architecture="qwen2_5_vl",
    fields=(Field("image_token_id", "image_token_index", default=151655),),
    fixed=NOT_A_CHOICE,
    ignored={**IGNORED, **TOKENS},
    import_extra=import_parts,
    import_extra_keys=("vision_config", "text_config", *sorted(TEXT_KEYS - {fixed.theirs for fixed in NOT_A_CHOICE})),
    export_extra=export_parts,
)

# -- names -------------------------------------------------------------------------------------------

LAYER, THEIR_LAYER = "vision_model.decoder.layers.{i}.", "visual.blocks.{i}."
KINDS = ("weight", "bias")


def tower_rules(config: QwenVisionConfig) -> list[Rule]:
    heads = config.num_attention_heads
    rules: list[Rule] = [
        Same("vision_model.conv1.weight", "visual.patch_embed.proj.weight"),
        Same(f"{LAYER}input_layernorm.weight", f"{THEIR_LAYER}norm1.weight"),
        Same(f"{LAYER}pre_mlp_layernorm.weight", f"{THEIR_LAYER}norm2.weight"),
        Same("vision_model.decoder.final_layernorm.weight", "visual.merger.ln_q.weight"),
    ]
    for kind in KINDS:
        qkv, gated = (
            f"{THEIR_LAYER}attn.qkv.{kind}",
            [f"{THEIR_LAYER}mlp.{name}_proj.{kind}" for name in ("gate", "up")],
        )
        rules += [
            GroupedQKV(f"{LAYER}self_attention.linear_qkv.{kind}", qkv, groups=heads, heads=heads),
            Same(f"{LAYER}self_attention.linear_proj.{kind}", f"{THEIR_LAYER}attn.proj.{kind}"),
            Concatenate(f"{LAYER}mlp.linear_fc1.{kind}", tuple(gated)),
            Same(f"{LAYER}mlp.linear_fc2.{kind}", f"{THEIR_LAYER}mlp.down_proj.{kind}"),
            Same(f"vision_projection.linear_fc1.{kind}", f"visual.merger.mlp.0.{kind}"),
            Same(f"vision_projection.linear_fc2.{kind}", f"visual.merger.mlp.2.{kind}"),
        ]
    # Expanded for the tower's layers here: the whole model's NameMap has 0 layers, as its parts differ in depth.
    return NameMap(rules, config.num_layers).rules


def name_map(config: QwenVLConfig) -> NameMap:
    decoder = qwen.name_map(config.decoder)
    rules = [replace(rule, ours=f"language_model.{rule.ours}") for rule in decoder.rules]
    return NameMap([*tower_rules(config.vision_model), *rules], 0, ignored=decoder.ignored)


def copies(config: QwenVLConfig) -> Mapping[str, str]:
    """The LM head repeats the token embeddings when the decoder ties the two."""
    return tied_output(config.decoder)


def spelling(config: QwenVLConfig, name: str) -> str:
    """The published name, from that of transformers 5."""
    if name.startswith("model.visual."):
        return name.removeprefix("model.")
    return name.replace("model.language_model.", "model.", 1)


# -- images ------------------------------------------------------------------------------------------


def patch_fields(config: Any) -> dict[str, Any]:
    """How an image is cut into patches, which is the model's."""
    vision = config.vision_model
    return {
        "patch_size": vision.patch_dim,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }


PIXELS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Fields of published files, which are the keys of [data] -> those within `size` in newer ones."""


def pixel_preprocessor(processor: str) -> Preprocessor:
    """Images of any size between two numbers of pixels. processor: the class that joins images and texts."""

    def write(config: Any, data: Mapping[str, Any]) -> dict[str, Any]:
        keys = trained_keys(config, data)
        return {
            **written_processor("Qwen2VLImageProcessor", processor, keys),
            **{key: keys[key] for key in PIXELS},
            **patch_fields(config),
        }

    return Preprocessor(write, read_preprocessor)


def read_preprocessor(config: Any, external: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for patches that are not the model's."""
    keys = read_processor(config, external, patch_fields(config))
    size = external.get("size") or {}
    for key, edge in PIXELS.items():
        pixels = external.get(key) or size.get(edge)
        keys |= {key: pixels} if pixels is not None else {}
    return keys


HUGGING_FACE = HuggingFaceFamily(
    "qwen_vl",
    {"qwen2_5_vl": QWEN25_VL},
    name_map,
    copies=copies,
    spelling=spelling,
    architectures={"qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration"},
    preprocessor=pixel_preprocessor("Qwen2_5_VLProcessor"),
)
