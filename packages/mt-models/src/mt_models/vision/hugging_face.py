"""Image towers in Hugging Face's format: `clip_vision_model`, `siglip_vision_model`; with classes `clip`, `siglip`.

Of a whole CLIP or SigLIP (`CLIPModel`, `SiglipModel`), as published, the image tower is read, and the text tower left.
Names are those of the published checkpoints, `vision_model.encoder...`, which every version of transformers reads.
Since version 5 its own modules leave `vision_model.` out; `spelling` puts it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed, require_known
from mt_core.errors import ConfigError
from mt_core.name_map import GroupedQKV, NameMap, Rule, Same
from mt_models.hugging_face import (
    CLASS_KEYS,
    FURTHER_ACTIVATIONS,
    IGNORED,
    NOT_A_CHOICE,
    HuggingFaceFamily,
    num_classes,
)
from mt_models.vision.config import VisionConfig, VisionEncoderConfig

ACTIVATIONS = {
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    **FURTHER_ACTIVATIONS,
}
"""Hugging Face's value -> ours; if several map to one, the first is exported."""


def import_activation(name: str) -> str:
    return ACTIVATIONS[require_known("hidden_act", name, ACTIVATIONS)]


def export_activation(name: str) -> str:
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    return names[require_known("model.activation", name, names)]


# -- configuration -----------------------------------------------------------------------------------

SIZES = ("image_size", "patch_size")
TOWER_IGNORED = {
    **IGNORED,
    "projection_dim": "of the projection into the space of texts, which stands behind the tower",
    "initializer_factor": "scales initial weights",
    "vocab_size": "a tower reads no words",
    "tie_word_embeddings": "a tower reads no words",
}


def tower_fields(*, activation: str, epsilon: float) -> tuple[Field, ...]:
    """activation, epsilon: Hugging Face's defaults for the type."""
    return (
        Field("num_hidden_layers", "num_layers", default=12),
        Field("hidden_size", "hidden_size", default=768),
        Field("num_attention_heads", "num_attention_heads", default=12),
        Field("intermediate_size", "ffn_hidden_size", default=3072),
        Field("num_channels", "num_channels", default=3),
        Field("hidden_act", "activation", import_activation, export_activation, default=activation),
        Field("layer_norm_eps", "norm_epsilon", float, default=epsilon),
        Field("attention_dropout", "attention_dropout", lambda rate: float(rate or 0.0), default=0.0),
    )


def import_sizes(external: Mapping[str, Any], patch: int) -> dict[str, int]:
    """Image and patch in pixels: numbers, or pairs of height and width. patch: Hugging Face's default."""
    height, width = pair("image_size", external.get("image_size", 224))
    patch_height, patch_width = pair("patch_size", external.get("patch_size", patch))
    # The layers here read rows and columns of patches from one side length.
    if patch_height != patch_width:
        raise ConfigError(f"patch_size=[{patch_height}, {patch_width}] is not supported; patches are square")
    return {"img_h": height, "img_w": width, "patch_dim": patch_height}


def pair(key: str, size: Any) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ConfigError(f"{key}={size!r} is not supported; it can be a number of pixels, or height and width")
    return sides


def export_sizes(model: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for images that are not square: the reference assumes a square number of patches."""
    if model["img_h"] != model["img_w"]:
        raise ConfigError(
            f"model.img_h={model['img_h']} and model.img_w={model['img_w']} cannot be written for Hugging Face, where "
            "images are square"
        )
    return {
        "image_size": model["img_h"],
        "patch_size": model["patch_dim"],
        "intermediate_size": model.get("ffn_hidden_size") or 4 * model["hidden_size"],
    }


def clip_export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    if not model.get("num_classes") and not model["add_pooler"]:
        raise ConfigError(
            "model.add_pooler=false cannot be written as a Hugging Face clip_vision_model, which always has a pooled "
            "vector"
        )
    return export_sizes(model)


CLIP = ConfigMap(
    architecture="clip_vision_model",
    fields=(
        *tower_fields(activation="quick_gelu", epsilon=1e-5),
        Field("initializer_range", "init_method_std", float, default=0.02),
    ),
    fixed=(Fixed("dropout", (0.0,), written=False), *NOT_A_CHOICE),
    ignored=TOWER_IGNORED,
    import_extra=lambda external: {
        "vision_model_type": "clip",
        "use_scaled_init_method": False,
        **import_sizes(external, patch=32),
    },
    import_extra_keys=SIZES,
    export_extra=clip_export_extra,
)
SIGLIP = ConfigMap(
    architecture="siglip_vision_model",
    fields=(
        *tower_fields(activation="gelu_pytorch_tanh", epsilon=1e-6),
        Field("vision_use_head", "add_pooler", default=True),
    ),
    fixed=NOT_A_CHOICE,
    ignored=TOWER_IGNORED,
    import_extra=lambda external: {
        "vision_model_type": "siglip",
        "use_scaled_init_method": False,
        **import_sizes(external, patch=16),
    },
    import_extra_keys=SIZES,
    export_extra=export_sizes,
)
TOWERS = {"clip_vision_model": CLIP, "siglip_vision_model": SIGLIP}
"""`model_type` of a tower -> its map."""


def tower_type_of(config: VisionEncoderConfig) -> str:
    """Raises ConfigError for InternViT, which is a part of internvl alone."""
    kind = f"{config.vision_model_type}_vision_model"
    if kind not in TOWERS:
        raise ConfigError(
            f"vision_model_type={config.vision_model_type} cannot be written as a tower by itself, or in a Hugging "
            "Face llava; it can be clip or siglip"
        )
    return kind


def joint_map(kind: str, tower: ConfigMap, class_name: str, joint_name: str) -> ConfigMap:
    """The configuration of a tower within that of text and images together: `class_name` has classes, of `joint_name`
    it is the tower alone."""

    def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
        architecture = str((external.get("architectures") or [None])[0])
        require_known("architectures", architecture, [class_name, joint_name])
        vision = {"model_type": tower.architecture, **(external.get("vision_config") or {})}
        # A whole CLIP or SigLIP: its image tower is read, and OF_TEXTS names what is left.
        if architecture == joint_name:
            return tower.import_value(vision)
        return {**tower.import_value(vision), "num_classes": num_classes(external)}

    def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
        names = [f"LABEL_{i}" for i in range(model["num_classes"])]
        return {
            "architectures": [class_name],
            "vision_config": {"model_type": tower.architecture, **tower.export_value(model)},
            "id2label": dict(enumerate(names)),
            "label2id": {name: i for i, name in enumerate(names)},
        }

    class_keys = ("architectures", *CLASS_KEYS)
    return ConfigMap(
        architecture=kind,
        fields=(),
        fixed=NOT_A_CHOICE,
        ignored={key: why for key, why in IGNORED.items() if key not in class_keys}
        | {
            "text_config": "of the tower that reads texts, which predicts no classes",
            "projection_dim": "of the projections that compare images with texts",
            "logit_scale_init_value": "of the comparison of images with texts",
            "initializer_factor": "scales initial weights",
        },
        import_extra=import_extra,
        import_extra_keys=("vision_config", *class_keys),
        export_extra=export_extra,
    )


JOINT = {
    "clip": joint_map("clip", CLIP, "CLIPForImageClassification", "CLIPModel"),
    "siglip": joint_map("siglip", SIGLIP, "SiglipForImageClassification", "SiglipModel"),
}


def model_type_of(config: VisionConfig) -> str:
    tower = tower_type_of(config)
    return tower if config.num_classes is None else config.vision_model_type


# -- names -------------------------------------------------------------------------------------------

OURS, THEIRS = "vision_model.", "vision_model."
OUR_LAYER, THEIR_LAYER = f"{OURS}decoder.layers.{{i}}.", f"{THEIRS}encoder.layers.{{i}}."
LAYER = (
    ("input_layernorm", "layer_norm1"),
    ("self_attention.linear_proj", "self_attn.out_proj"),
    ("pre_mlp_layernorm", "layer_norm2"),
    ("mlp.linear_fc1", "mlp.fc1"),
    ("mlp.linear_fc2", "mlp.fc2"),
)
SIGLIP_HEAD = (
    ("head.attention.linear_proj", "head.attention.out_proj"),
    ("head.layernorm", "head.layernorm"),
    ("head.mlp.linear_fc1", "head.mlp.fc1"),
    ("head.mlp.linear_fc2", "head.mlp.fc2"),
)


def tower_map(config: VisionEncoderConfig) -> NameMap:
    """Names of a tower, `vision_model.` in both formats; models with a tower add a prefix."""
    rules: list[Rule] = [
        Same(f"{OURS}conv1.weight", f"{THEIRS}embeddings.patch_embedding.weight"),
        Same(f"{OURS}position_embeddings.weight", f"{THEIRS}embeddings.position_embedding.weight"),
        *layer_rules(config, THEIR_LAYER, "self_attn", LAYER),
        *(clip_rules(config) if config.vision_model_type == "clip" else siglip_rules(config)),
    ]
    return NameMap(rules, config.num_layers, ignored=[f"{THEIRS}embeddings.position_ids"])


def layer_rules(
    config: VisionEncoderConfig, layer: str, attention: str, names: Iterable[tuple[str, str]]
) -> list[Rule]:
    """layer, attention: what their names of a layer, and of its attention, begin with. names: ours and theirs in it."""
    heads = config.num_attention_heads
    rules: list[Rule] = [
        GroupedQKV(
            f"{OUR_LAYER}self_attention.linear_qkv.{kind}",
            tuple(f"{layer}{attention}.{name}_proj.{kind}" for name in "qkv"),
            groups=heads,
            heads=heads,
        )
        for kind in ("weight", "bias")
    ]
    for ours, theirs in names:
        rules += with_bias(f"{OUR_LAYER}{ours}", f"{layer}{theirs}")
    return rules


def clip_rules(config: VisionEncoderConfig) -> list[Rule]:
    rules: list[Rule] = [Same(f"{OURS}class_token", f"{THEIRS}embeddings.class_embedding")]
    # The misspelled name is that of the published files.
    rules += with_bias(f"{OURS}ln_pre", f"{THEIRS}pre_layrnorm")
    if config.has_pooler:
        rules += with_bias(f"{OURS}ln_post", f"{THEIRS}post_layernorm")
    return rules


def siglip_rules(config: VisionEncoderConfig) -> list[Rule]:
    rules: list[Rule] = [Same(f"{OURS}conv1.bias", f"{THEIRS}embeddings.patch_embedding.bias")]
    rules += with_bias(f"{OURS}ln_post", f"{THEIRS}post_layernorm")
    if not config.has_pooler:
        return rules
    heads = config.num_attention_heads
    rules.append(Same(f"{OURS}head.probe", f"{THEIRS}head.probe"))
    for kind in ("weight", "bias"):
        # torch's MultiheadAttention: queries, keys and values end to end in one tensor
        source = f"{THEIRS}head.attention.in_proj_{kind}"
        rules.append(GroupedQKV(f"{OURS}head.attention.linear_qkv.{kind}", (source,), groups=heads, heads=heads))
    for ours, theirs in SIGLIP_HEAD:
        rules += with_bias(f"{OURS}{ours}", f"{THEIRS}{theirs}")
    return rules


def with_bias(ours: str, theirs: str) -> list[Rule]:
    return [Same(f"{ours}.{kind}", f"{theirs}.{kind}") for kind in ("weight", "bias")]


UNREAD = {
    "clip": tuple(f"{THEIRS}post_layernorm.{kind}" for kind in ("weight", "bias")),
    "siglip": (
        f"{THEIRS}head.probe",
        *(f"{THEIRS}head.attention.in_proj_{kind}" for kind in ("weight", "bias")),
        *(f"{THEIRS}{theirs}.{kind}" for _, theirs in SIGLIP_HEAD for kind in ("weight", "bias")),
    ),
}
"""Tensors of a pooler, which a classifier's file may hold although its class never reads them."""


OF_TEXTS = ("text_model.*", "text_projection.weight", "visual_projection.weight", "logit_scale", "logit_bias")
"""Tensors of a whole CLIP or SigLIP that are not the image tower's."""


def name_map(config: VisionConfig) -> NameMap:
    tower = tower_map(config)
    if config.num_classes is None:
        return NameMap(tower.rules, 0, ignored=[*tower.ignored, *OF_TEXTS])
    rules = [*tower.rules, *with_bias("classification_head", "classifier")]
    return NameMap(rules, config.num_layers, ignored=[*tower.ignored, *UNREAD[config.vision_model_type]])


def spelling(config: VisionEncoderConfig, name: str) -> str:
    """The published name, from that of transformers 5, whose towers leave out `vision_model.`."""
    is_published = name.startswith((THEIRS, "classifier.")) or any(fnmatchcase(name, other) for other in OF_TEXTS)
    return name if is_published else f"{THEIRS}{name}"


HUGGING_FACE = HuggingFaceFamily(
    "vision",
    {**TOWERS, **JOINT},
    name_map,
    model_type_of,
    spelling=spelling,
    architectures={"clip_vision_model": "CLIPVisionModel", "siglip_vision_model": "SiglipVisionModel"},
)
