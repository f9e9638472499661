"""Models of pictures and texts of Megatron's scripts: a tower and a projection, whose sizes the script chooses by
names, in front of the decoder that the arguments describe.

Sizes are those of examples/multimodal/config.py and of pretrain_vlm.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mt_core.errors import ConfigError

TOKENIZER = "MultimodalTokenizer"
"""The example's: one of transformers, with a token for pictures."""
IMAGE_TOKEN = 1_000_000
"""The id that stands for a picture: behind every vocabulary, since a script adds its own to the tokenizer's."""
SWIGLU: Mapping[str, Any] = {"swiglu": True, "squared_relu": False, "add_bias_linear": False, "add_qkv_bias": False}
SQUARED: Mapping[str, Any] = {**SWIGLU, "swiglu": False, "squared_relu": True}
QWEN: Mapping[str, Any] = {**SWIGLU, "add_qkv_bias": True}
GIVEN = "given"
"""A norm of the kind that --normalization names."""
LANGUAGE: Mapping[str, tuple[Mapping[str, Any], int, int, str]] = {
    "llama3_8b": (SWIGLU, 14336, 14336, GIVEN),
    "llama3.1_8b": (SWIGLU, 14336, 4096, "LayerNorm"),
    "llama3.2_1b": (SWIGLU, 8192, 2048, "LayerNorm"),
    "mistral_7b": (SWIGLU, 14336, 14336, "none"),
    "nemotron5-8b": (SQUARED, 21504, 21504, GIVEN),
    "yi-34b": (SWIGLU, 20480, 20480, "LayerNorm"),
    "qwen2.0_72B": (QWEN, 29568, 29568, "LayerNorm"),
    "qwen2.5_7B": (QWEN, 18944, 3584, GIVEN),
    "qwen2.5_72B": (QWEN, 29568, 29568, "LayerNorm"),
}
"""--language-model-type -> arguments of the decoder, its feed-forward's width, that of the projection, and its norm."""
BIASED = ("llama3.1_8b",)
"""Types whose projection has biases."""
TOWERS: Mapping[str, Mapping[str, Any]] = {
    "clip": {"vision_model_type": "clip", "num_layers": 24, "ffn_hidden_size": 4096, "activation": "quick_gelu"},
    "internvit300M": {
        "vision_model_type": "internvit",
        "num_layers": 24,
        "ffn_hidden_size": 4096,
        "activation": "gelu",
        "norm_epsilon": 1e-6,
    },
}
"""--vision-model-type -> keys of the tower."""
ABSENT_TOWERS: Mapping[str, str] = {
    "internvit": "InternViT with 6 billion parameters, whose layers have RMSNorm, queries and keys normalized over all "
    "heads together, and heads that the ranks do not divide",
    "siglip": "SigLIP read behind the norm of its last layer; model.vision_feature_layers takes states before it",
    "radio": "RADIO, whose positions are cut out of a larger table and which has eight class tokens",
    "radio-g": "RADIO, whose positions are cut out of a larger table and which has five class tokens",
    "cradio-g": "RADIO, whose positions are cut out of a larger table and which has eight class tokens",
}
"""Towers that no family has."""
TEMPLATES: Mapping[str, str] = {
    **dict.fromkeys(("chatml", "qwen2p0", "qwen2p5", "nvlm-yi-34b"), "chatml"),
    **dict.fromkeys(("llama3", "llama3p1"), "llama3"),
    "mistral": "tokenizer",
}
"""--tokenizer-prompt-format -> data.chat_template."""


def decoder_objection(value: str) -> Iterator[str]:
    if value not in LANGUAGE:
        yield f"this decoder; it can be {', '.join(LANGUAGE)}"


def tower_objection(value: str) -> Iterator[str]:
    if value not in TOWERS:
        yield f"{ABSENT_TOWERS.get(value, 'a tower of transformers')}; a tower can be {' or '.join(TOWERS)}"


def template_objection(value: str) -> Iterator[str]:
    if value not in TEMPLATES:
        yield f"this form of conversations; it can be {', '.join(TEMPLATES)}"


def markers_objection(value: str) -> Iterator[str]:
    if value == "nvlm":
        yield "texts <Image> and </Image> around the views of a picture; data.image_markers has those of InternVL"


def shards_objection(value: list[str]) -> Iterator[str]:
    if listed := [word for word in value if word.endswith((".yaml", ".yml"))]:
        yield (
            f"{', '.join(listed)} lists data sets of Megatron-Energon; data.data_path takes their shards (.tar), or "
            "files of JSON lines: give these in its place, for a variable of a script by --define NAME=VALUE"
        )


def section(
    values: Mapping[str, Any], decoder_section: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """[model] but the vocabulary. decoder_section: the section of a decoder with such arguments."""
    changed, projection = _parts(values)
    decoder = decoder_section({**values, **changed})
    drops = bool(values["disable_vision_class_token"])
    frozen = {"language_model": values["freeze_LM"], "vision_model": values["freeze_ViT"]}
    return {
        "family": "llava",
        "vision_model": _tower(values),
        "language_model": {key: value for key, value in decoder.items() if not key.startswith(("vocab", "make_vocab"))},
        "make_vocab_size_divisible_by": values["make_vocab_size_divisible_by"],
        "image_token_index": IMAGE_TOKEN,
        "vision_feature_layers": [-1],
        "vision_feature_select_strategy": "default" if drops else "full",
        "scale_factor": 2 if values["pixel_shuffle"] else 1,
        "freeze": [part for part, is_frozen in frozen.items() if is_frozen],
        **projection,
    }


def _parts(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the decoder that the script changes, and keys of the projection."""
    positions = {"max_position_embeddings": max(values["max_position_embeddings"], seq_length(values))}
    if (kind := values["language_model_type"]) is None:
        return positions, _projection_of_layers(values)
    changed, width, inner, norm = LANGUAGE[kind]
    epsilon = 1e-5 if kind in BIASED else values["norm_epsilon"]
    projection = {
        "projection_activation": "squared_relu" if changed["squared_relu"] else "gelu",
        "projection_bias": kind in BIASED,
        "projection_ffn_hidden_size": inner,
        "projection_normalization": values["normalization"] if norm == GIVEN else norm,
        **({} if norm == "none" else {"projection_norm_epsilon": epsilon}),
    }
    return {**positions, **changed, "ffn_hidden_size": width}, projection


def _projection_of_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """pretrain_vlm.py: a feed-forward as that of the decoder's layers, with its norm where Transformer Engine has both
    in one module."""
    if values["swiglu"] or values["squared_relu"]:
        raise ConfigError(
            "a projection with the decoder's activation is read of GELU alone; --swiglu and --squared-relu"
        )
    in_front = values["transformer_impl"] == "transformer_engine"
    return {
        "projection_activation": _gelu(values),
        "projection_bias": values["add_bias_linear"],
        "projection_ffn_hidden_size": values["ffn_hidden_size"],
        "projection_normalization": values["normalization"] if in_front else "none",
        **({"projection_norm_epsilon": values["norm_epsilon"]} if in_front else {}),
    }


def _gelu(values: Mapping[str, Any]) -> str:
    return "gelu_tanh" if values["bias_gelu_fusion"] or values["openai_gelu"] else "gelu"


def _tower(values: Mapping[str, Any]) -> dict[str, Any]:
    shape = {"patch_dim": values["patch_dim"], "img_h": values["img_h"], "img_w": values["img_w"], "add_pooler": False}
    if values["language_model_type"] is not None:
        tower = {"hidden_size": 1024, "num_attention_heads": 16, "norm_epsilon": values["norm_epsilon"]}
        tower |= {**shape, **TOWERS[values["vision_model_type"]]}
        if tower["vision_model_type"] == "internvit":
            tower.pop("add_pooler")
        return tower
    # pretrain_vlm.py: layers as the decoder's, with CLIP's class token and norm in front of them.
    return {
        **shape,
        "num_layers": values["encoder_num_layers"],
        "hidden_size": values["hidden_size"],
        "num_attention_heads": values["num_attention_heads"],
        "ffn_hidden_size": values["ffn_hidden_size"],
        "activation": _gelu(values),
        "norm_epsilon": values["norm_epsilon"],
        "attention_dropout": values["attention_dropout"],
        "init_method_std": values["init_method_std"],
    }


def image_positions(values: Mapping[str, Any]) -> int:
    """Positions that a picture of the tower's size takes in the text."""
    patches = (values["img_h"] // values["patch_dim"]) * (values["img_w"] // values["patch_dim"])
    positions = int(patches + (not values["disable_vision_class_token"]))
    return positions // 4 if values["pixel_shuffle"] else positions


def seq_length(values: Mapping[str, Any]) -> int:
    """Positions of a sample, those of pictures included."""
    if values["language_model_type"] is not None:
        return int(values["decoder_seq_length"] or values["seq_length"])
    return int(values["dataloader_seq_length"] or values["seq_length"]) + image_positions(values)


def data_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [data]. Megatron-Energon's webdataset shards are read as such."""
    keys: dict[str, Any] = {
        "data.seq_length": seq_length(values),
        "data.image_token_index": IMAGE_TOKEN,
        "data.image_seq_length": image_positions(values),
        "data.img_h": values["img_h"],
        "data.img_w": values["img_w"],
    }
    if values["mock_data"]:
        return {**keys, "data.dataset_type": "captioned_shapes"}
    tiles = values["max_num_tiles"] if values["use_tiling"] else 1
    return {
        **keys,
        "data.dataset_type": "image_text",
        "data.data_path": values["data_path"],
        "data.chat_template": TEMPLATES.get(values["tokenizer_prompt_format"] or "", "tokenizer"),
        "data.max_num_tiles": tiles,
        "data.use_thumbnail": bool(values["use_thumbnail"] and tiles > 1),
        "data.image_markers": values["image_tag_type"] or "none",
        "data.packing": bool(values["packing_buffer_size"]),
        **COLOURS[values["vision_model_type"] or "clip"],
    }


IMAGENET: Mapping[str, Any] = {
    "data.image_mean": [0.485, 0.456, 0.406],
    "data.image_std": [0.229, 0.224, 0.225],
    "data.resize": "squash",
}
CLIP: Mapping[str, Any] = {
    "data.image_mean": [0.48145466, 0.4578275, 0.40821073],
    "data.image_std": [0.26862954, 0.26130258, 0.27577711],
    "data.resize": "squash",
}
COLOURS: Mapping[str, Mapping[str, Any]] = {"clip": CLIP, "internvit300M": IMAGENET}
