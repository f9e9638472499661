"""Gemma 4 with pictures in Hugging Face's format, `gemma4`.

Files with a vision tower are read as this family, with their tower for sound if they have one; their decoders alone are
the family gemma4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.gemma4 import hugging_face as gemma4
from mt_models.gemma4_vl.config import (
    Gemma4AudioConfig,
    Gemma4VisionConfig,
    Gemma4VLConfig,
    Gemma4VLDecoderConfig,
)
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, Preprocessor
from mt_models.llava.image_processor import read_processor, require_fields, trained_keys, written_processor
from mt_models.vision.hugging_face import export_activation, import_activation

# -- configuration of the decoder --------------------------------------------------------------------

DECODER = replace(
    gemma4.GEMMA4,
    fixed=tuple(fixed for fixed in gemma4.GEMMA4.fixed if fixed.theirs != "use_bidirectional_attention"),
    import_extra_keys=(*gemma4.GEMMA4.import_extra_keys, "use_bidirectional_attention", "pad_token_id"),
    ignored={key: why for key, why in gemma4.GEMMA4.ignored.items() if key != "pad_token_id"},
)
BIDIRECTIONAL = "use_bidirectional_attention"
OF_IMAGES = ("bidirectional_images", "per_layer_image_token")
"""Keys of the decoder that a decoder alone does not have."""


def import_decoder(external: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [model.language_model]."""
    text = dict(external.get("text_config") or {})
    # The outer class ties its LM head by its own key.
    text["tie_word_embeddings"] = external.get("tie_word_embeddings", True)
    if (kind := text.get(BIDIRECTIONAL)) not in (None, "vision"):
        raise ConfigError(f"text_config.{BIDIRECTIONAL}={kind!r} is not supported; it can be null or vision")
    return {
        **DECODER.import_value(text),
        "bidirectional_images": kind == "vision",
        "per_layer_image_token": text.get("pad_token_id") or 0,
    }


def export_decoder(decoder: Gemma4VLDecoderConfig) -> dict[str, Any]:
    """text_config."""
    text = gemma4.GEMMA4.export_value(decoder.model_dump(mode="json", exclude=set(OF_IMAGES)))
    images = {BIDIRECTIONAL: "vision" if decoder.bidirectional_images else None}
    return {**text, "model_type": gemma4.TEXT, **images, "pad_token_id": decoder.per_layer_image_token}


# -- configuration of the vision transformer ---------------------------------------------------------


def import_heads(external: Mapping[str, Any]) -> dict[str, Any]:
    """The base of rotary positions, which is all that the class reads of their table."""
    return {"rotary_base": float((external.get("rope_parameters") or {}).get("rope_theta", 100.0))}


def export_heads(model: Mapping[str, Any]) -> dict[str, Any]:
    tower = Gemma4VisionConfig.model_validate(model)
    if tower.num_channels != 3:
        raise ConfigError(
            f"model.vision_model.num_channels={tower.num_channels} cannot be written as a Hugging Face gemma4, whose "
            "images have 3 colours"
        )
    return {
        "head_dim": tower.head_dim,
        "num_key_value_heads": tower.query_groups,
        "intermediate_size": tower.ffn_size,
        "rope_parameters": {"rope_type": "axial", "rope_theta": tower.rotary_base},
    }


VISION = ConfigMap(
    architecture="gemma4_vision",
    fields=(
        Field("num_hidden_layers", "num_layers", default=16),
        Field("hidden_size", "hidden_size", default=768),
        Field("num_attention_heads", "num_attention_heads", default=12),
        Field("num_key_value_heads", "num_query_groups", default=12),
        Field("head_dim", "kv_channels", default=64),
        Field("intermediate_size", "ffn_hidden_size", default=3072),
        Field("rms_norm_eps", "norm_epsilon", float, default=1e-6),
        Field("patch_size", "patch_dim", default=16),
        Field("pooling_kernel_size", "spatial_merge_size", default=3),
        Field("position_embedding_size", "num_position_embeddings", default=10240),
        Field("use_clipped_linears", "clipped_linears", default=False),
        Field("standardize", "standardized", default=False),
        Field("initializer_range", "init_method_std", float, default=0.02),
    ),
    fixed=(
        Fixed("hidden_activation", gemma4.GELU_TANH),
        Fixed("attention_bias", (False, None)),
        Fixed("attention_dropout", (0.0, None)),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        "max_position_embeddings": "positions of patches are those of position_embedding_size",
        "default_output_length": "of the image processor",
    },
    import_extra=import_heads,
    import_extra_keys=("rope_parameters",),
    export_extra=export_heads,
)


# -- configuration of the tower for sound ------------------------------------------------------------

AUDIO = ConfigMap(
    architecture="gemma4_audio",
    fields=(
        Field("num_hidden_layers", "num_layers", default=12),
        Field("hidden_size", "hidden_size", default=1024),
        Field("num_attention_heads", "num_attention_heads", default=8),
        Field("hidden_act", "activation", import_activation, export_activation, default="silu"),
        Field("subsampling_conv_channels", "conv_channels", list, list, default=[128, 32]),
        Field("conv_kernel_size", "conv_kernel_size", default=5),
        Field("residual_weight", "residual_weight", float, default=0.5),
        Field("attention_chunk_size", "attention_chunk_size", default=12),
        Field("attention_context_left", "attention_context_left", default=13),
        Field("attention_context_right", "attention_context_right", default=0),
        Field("attention_logit_cap", "attention_logit_cap", float, default=50.0),
        Field("use_clipped_linears", "clipped_linears", default=True),
        Field("rms_norm_eps", "norm_epsilon", float, default=1e-6),
        Field("gradient_clipping", "gradient_clipping", float, default=1e10),
        Field("output_proj_dims", "output_size", default=1536),
        Field("initializer_range", "init_method_std", float, default=0.02),
    ),
    # Those of keys that are not seen, which then have no weight.
    fixed=(Fixed("attention_invalid_logits_value", (-1e9,)), *NOT_A_CHOICE),
    ignored=IGNORED,
)


def export_audio(config: Gemma4VLConfig) -> dict[str, Any] | None:
    if config.audio_model is None:
        return None
    return {"model_type": "gemma4_audio", **AUDIO.export_value(config.audio_model.model_dump(mode="json"))}


def import_parts(external: Mapping[str, Any]) -> dict[str, Any]:
    if (vision := external.get("vision_config")) is None:
        raise ConfigError(
            "vision_config=null: the file has no vision tower, and model.family=gemma4_vl needs one; its decoder is a "
            "model.family=gemma4"
        )
    decoder = import_decoder(external)
    audio = external.get("audio_config")
    return {
        **({} if audio is None else {"audio_model": AUDIO.import_value(dict(audio))}),
        "vision_model": {"use_scaled_init_method": False, **VISION.import_value(dict(vision))},
        "vocab_size": decoder.pop("vocab_size"),
        "language_model": decoder,
    }


def export_parts(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Gemma4VLConfig.model_validate(model)
    text = export_decoder(config.decoder)
    vision = VISION.export_value(config.vision_model.model_dump(mode="json"))
    return {
        "text_config": text,
        "vision_config": {"model_type": "gemma4_vision", **vision},
        "audio_config": export_audio(config),
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


GEMMA4 = ConfigMap(
    architecture="gemma4",
    fields=(
        Field("image_token_id", "image_token_index", default=258880),
        Field("audio_token_id", "audio_token_index", default=258881),
        Field("video_token_id", "video_token_index", default=258884),
    ),
    fixed=NOT_A_CHOICE,
    ignored={
        **IGNORED,
        **dict.fromkeys(
            ("boa_token_id", "eoa_token_id", "eoa_token_index"), "marks sound in texts, which the tokenizer's tokens do"
        ),
        **dict.fromkeys(("boi_token_id", "eoi_token_id"), "marks images in texts, which the tokenizer's tokens do"),
        "vision_soft_tokens_per_image": "of the image processor",
        "initializer_range": "of both parts together, which have their own",
    },
    import_extra=import_parts,
    import_extra_keys=("vision_config", "audio_config", "text_config", "tie_word_embeddings"),
    export_extra=export_parts,
)

# -- names -------------------------------------------------------------------------------------------

LAYER, THEIR_LAYER = "vision_model.decoder.layers.{i}.", "model.vision_tower.encoder.layers.{i}."
NORMS = {
    "input_layernorm": "input_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}
MATRICES = {
    **{f"self_attention.linear_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "self_attention.linear_proj": "self_attn.o_proj",
    **{f"mlp.linear_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True)
class OneNumber(Rule):
    """A number without dimensions there, [1] here."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].reshape(1)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.reshape(())]


@dataclass(frozen=True)
class PatchKernel(Rule):
    """[H, p p C] there, with the colours of a pixel side by side; [H, C, p, p] here.

    side: of a patch.
    """

    side: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].unflatten(1, (self.side, self.side, -1)).permute(0, 3, 1, 2).contiguous()

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.permute(0, 2, 3, 1).flatten(1).contiguous()]


def tower_rules(config: Gemma4VisionConfig) -> list[Rule]:
    tower = "model.vision_tower."
    rules: list[Rule] = [
        PatchKernel("vision_model.conv1.weight", (f"{tower}patch_embedder.input_proj.weight",), side=config.patch_dim),
        Same("vision_model.position_embeddings.weight", f"{tower}patch_embedder.position_embedding_table"),
        Same("vision_projection.linear.weight", "model.embed_vision.embedding_projection.weight"),
        *(Same(f"{LAYER}{ours}.weight", f"{THEIR_LAYER}{theirs}.weight") for ours, theirs in NORMS.items()),
    ]
    for ours, theirs in MATRICES.items():
        rules.append(Same(f"{LAYER}{ours}.linear.weight", f"{THEIR_LAYER}{theirs}.linear.weight"))
        if config.clipped_linears:
            rules += [
                OneNumber(f"{LAYER}{ours}.bounds.{bound}", (f"{THEIR_LAYER}{theirs}.{bound}",)) for bound in BOUNDS
            ]
    if config.standardized:
        rules += [Same(f"vision_model.standardization.{name}", f"{tower}std_{name}") for name in ("bias", "scale")]
    # Expanded for the tower's layers here: the whole model's NameMap has 0 layers, as its parts differ in depth.
    return NameMap(rules, config.num_layers).rules


SOUND_NORMS = {
    **{
        f"{ours}.{kind}_layernorm": f"{theirs}.{kind}_layer_norm"
        for ours, theirs in (("mlp1", "feed_forward1"), ("mlp2", "feed_forward2"))
        for kind in ("pre", "post")
    },
    "convolution.pre_layernorm": "lconv1d.pre_layer_norm",
    "convolution.conv_layernorm": "lconv1d.conv_norm",
    "pre_attention_layernorm": "norm_pre_attn",
    "post_attention_layernorm": "norm_post_attn",
    "final_layernorm": "norm_out",
}
SOUND_MATRICES = {
    **{f"self_attention.linear_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "self_attention.linear_proj": "self_attn.post",
    "convolution.linear_start": "lconv1d.linear_start",
    "convolution.linear_end": "lconv1d.linear_end",
    **{
        f"mlp{n}.linear_{ours}": f"feed_forward{n}.ffw_layer_{theirs}"
        for n in (1, 2)
        for ours, theirs in (("up", 1), ("down", 2))
    },
}


def sound_rules(config: Gemma4AudioConfig) -> list[Rule]:
    ours, theirs = "audio_model.", "model.audio_tower."
    layer, their_layer = f"{ours}layers.{{i}}.", f"{theirs}layers.{{i}}."
    conv = f"{theirs}subsample_conv_projection."
    rules: list[Rule] = [
        *(Same(f"{ours}embedding.conv{n + 1}.weight", f"{conv}layer{n}.conv.weight") for n in (0, 1)),
        *(Same(f"{ours}embedding.conv{n + 1}.norm_weight", f"{conv}layer{n}.norm.weight") for n in (0, 1)),
        Same(f"{ours}embedding.linear.weight", f"{conv}input_proj_linear.weight"),
        *(Same(f"{ours}linear.{kind}", f"{theirs}output_proj.{kind}") for kind in ("weight", "bias")),
        Same("audio_projection.linear.weight", "model.embed_audio.embedding_projection.weight"),
        Same(f"{layer}self_attention.linear_distance.weight", f"{their_layer}self_attn.relative_k_proj.weight"),
        Same(f"{layer}self_attention.per_dim_scale", f"{their_layer}self_attn.per_dim_scale"),
        Same(f"{layer}convolution.weight", f"{their_layer}lconv1d.depthwise_conv1d.weight"),
        *(Same(f"{layer}{a}.weight", f"{their_layer}{b}.weight") for a, b in SOUND_NORMS.items()),
    ]
    for a, b in SOUND_MATRICES.items():
        rules.append(Same(f"{layer}{a}.linear.weight", f"{their_layer}{b}.linear.weight"))
        if config.clipped_linears:
            rules += [OneNumber(f"{layer}{a}.bounds.{bound}", (f"{their_layer}{b}.{bound}",)) for bound in BOUNDS]
    return NameMap(rules, config.num_layers).rules


def nested(name: str) -> str:
    """The name of a tensor of the decoder beside a tower."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def beside_tower(rule: Rule) -> Rule:
    """The rule of a decoder that is a part of the model."""
    return replace(
        rule,
        ours=f"language_model.{rule.ours}",
        theirs=tuple(map(nested, rule.sources)),
        others=tuple(map(beside_tower, rule.others)),
    )


def name_map(config: Gemma4VLConfig) -> NameMap:
    decoder = gemma4.name_map(config.decoder)
    towers = {f"model.{tower}.*" for tower in gemma4.TOWERS}
    ignored = {nested(name) for name in decoder.ignored if name not in towers}
    rules = [*tower_rules(config.vision_model), *map(beside_tower, decoder.rules)]
    if config.audio_model is None:
        return NameMap(rules, 0, ignored | {"model.audio_tower.*", "model.embed_audio.*"})
    return NameMap([*rules, *sound_rules(config.audio_model)], 0, ignored)


def copies(config: Gemma4VLConfig) -> Mapping[str, str]:
    """The LM head repeats the token embeddings when the decoder ties the two."""
    if config.decoder.untie_embeddings_and_output_weights:
        return {}
    return {"lm_head.weight": "model.language_model.embed_tokens.weight"}


# -- images ------------------------------------------------------------------------------------------

PLAIN = {"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]}
SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""Most cells of an image that the class allows."""


def patch_fields(config: Any) -> dict[str, Any]:
    vision = config.vision_model
    return {"patch_size": vision.patch_dim, "pooling_kernel_size": vision.spatial_merge_size}


def write_preprocessor(config: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for images that the class does not make: the model subtracts 0.5 from colours, and doubles
    them."""
    keys, published = trained_keys(config, data), config.image_data_keys
    for key in ("image_mean", "image_std", "size_rule"):
        if keys[key] != published[key]:
            raise ConfigError(
                f"data.{key}={keys[key]} cannot be written as a Gemma4ImageProcessor, which has {published[key]}"
            )
    cells = keys["max_pixels"] // config.vision_model.merged_side**2
    if cells not in SOFT_TOKENS:
        raise ConfigError(
            f"data.max_pixels={keys['max_pixels']} are {cells} cells, which cannot be written as a "
            f"Gemma4ImageProcessor; it has {', '.join(map(str, SOFT_TOKENS))}"
        )
    written = written_processor("Gemma4ImageProcessor", "Gemma4Processor", keys)
    return {**written, **PLAIN, "do_normalize": False, "max_soft_tokens": cells, **patch_fields(config)}


def read_preprocessor(config: Any, external: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for patches and colours that are not the model's."""
    require_fields(external, {**PLAIN, "do_normalize": False})
    plain = {key: value for key, value in external.items() if key not in (*PLAIN, "do_normalize")}
    keys = read_processor(config, plain, patch_fields(config))
    if (cells := external.get("max_soft_tokens")) is not None:
        keys["max_pixels"] = cells * config.vision_model.merged_side**2
    return keys


HUGGING_FACE = HuggingFaceFamily(
    "gemma4_vl",
    {"gemma4": GEMMA4},
    name_map,
    copies=copies,
    architectures={"gemma4": "Gemma4ForConditionalGeneration"},
    preprocessor=Preprocessor(write_preprocessor, read_preprocessor),
    ids_read=(("text_config", "pad_token_id"),),
)
