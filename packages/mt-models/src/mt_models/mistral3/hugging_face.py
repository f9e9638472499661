"""Mistral 3 with pictures in Hugging Face's format, `mistral3`.

Names are those of LLaVA's published files (`mt_models.llava.hugging_face`); modules of transformers 5 have other
prefixes, which `spelling` reads too. The decoder is a `mistral`, a `ministral3` or a `mistral4`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed, require_known
from mt_core.errors import ConfigError
from mt_core.name_map import Concatenate, GroupedQKV, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import one_of
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, Preprocessor
from mt_models.llava.hugging_face import (
    DECODER,
    OUTPUT,
    PROJECTION,
    STEM,
    TOWER,
    decoder_map,
    decoder_maps,
    export_activation,
    import_activation,
    published_spelling,
    tied_output,
)
from mt_models.llava.image_processor import read_processor, require_fields, trained_keys, written_processor
from mt_models.mistral3.config import DECODERS, Mistral3Config, PixtralVisionConfig

# -- configuration -----------------------------------------------------------------------------------

GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}
"""Activations; of several the first is written."""
DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "vocab_size": 131072, "sliding_window": None, "rope_theta": 1000000000.0,
}  # fmt: skip
"""Those of transformers for a file without text_config."""


def square_patch(key: str, side: Any) -> int:
    """A side in pixels, or the pair of a square. Raises ConfigError for another."""
    sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
    if len(sides) != 2 or sides[0] != sides[1] or not isinstance(sides[0], int):
        raise ConfigError(f"{key}={side!r} is not supported; patches are square")
    return sides[0]


def import_tower(external: Mapping[str, Any]) -> dict[str, Any]:
    rope = external.get("rope_parameters") or {}
    return {
        "patch_dim": square_patch("patch_size", external.get("patch_size", 16)),
        "activation": GATED[require_known("hidden_act", str(external.get("hidden_act", "gelu")), GATED)],
        "rotary_base": float(one_of({**external, **rope}, ("rope_theta",), 10000.0)),
    }


def export_tower(model: Mapping[str, Any]) -> dict[str, Any]:
    tower = PixtralVisionConfig.model_validate(model)
    if tower.norm_epsilon != 1e-5:
        raise ConfigError(
            f"model.vision_model.norm_epsilon={tower.norm_epsilon} cannot be written as a Hugging Face pixtral, which "
            "has 1e-5"
        )
    return {
        "patch_size": tower.patch_dim,
        "head_dim": tower.head_dim,
        "intermediate_size": tower.ffn_size,
        "hidden_act": next(theirs for theirs, ours in GATED.items() if ours == tower.activation),
        "rope_parameters": {"rope_type": "axial", "rope_theta": tower.rotary_base},
    }


VISION = ConfigMap(
    architecture="pixtral",
    fields=(
        Field("num_hidden_layers", "num_layers", default=24),
        Field("hidden_size", "hidden_size", default=1024),
        Field("num_attention_heads", "num_attention_heads", default=16),
        Field("intermediate_size", "ffn_hidden_size", default=4096),
        Field("num_channels", "num_channels", default=3),
        Field("image_size", "image_size"),
        Field("initializer_range", "init_method_std", float, default=0.02),
    ),
    fixed=(Fixed("attention_dropout", (0.0,)), *NOT_A_CHOICE),
    ignored={
        **IGNORED,
        "head_dim": "is hidden_size / num_attention_heads in the class, whatever it says",
        "vocab_size": "a tower reads no words",
        "tie_word_embeddings": "a tower reads no words",
    },
    import_extra=import_tower,
    import_extra_keys=("patch_size", "hidden_act", "rope_parameters", "rope_theta"),
    export_extra=export_tower,
)


def import_decoder(external: Mapping[str, Any]) -> dict[str, Any]:
    """The table of the decoder, and the vocabulary, from `text_config`."""
    text = external.get("text_config")
    text = dict(DEFAULTS) if text is None else dict(text)
    kind = require_known("text_config.model_type", str(text.get("model_type", "mistral")), DECODERS)
    # The outer class ties its LM head by its own key.
    tied = bool(external.get("tie_word_embeddings", True))
    decoder = decoder_maps(kind).read_config({**text, "model_type": kind, "tie_word_embeddings": tied})
    return {"vocab_size": decoder.pop("vocab_size"), "language_model": decoder}


def import_parts(external: Mapping[str, Any]) -> dict[str, Any]:
    tower = {"patch_size": 14, **(external.get("vision_config") or {})}
    require_known("vision_config.model_type", str(tower.get("model_type", "pixtral")), ("pixtral",))
    vision = {**VISION.import_value(tower), "spatial_merge_size": external.get("spatial_merge_size", 2)}
    return {"vision_model": {"use_scaled_init_method": False, **vision}, **import_decoder(external)}


def export_parts(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Mistral3Config.model_validate(model)
    text = decoder_maps(config.decoder.family).write_config(config.decoder)
    vision = VISION.export_value(config.vision_model.model_dump(mode="json"))
    edge = config.image_data_keys["max_pixels"] ** 0.5
    return {
        "text_config": text,
        "vision_config": {"model_type": "pixtral", **vision, "image_size": config.vision_model.image_size or int(edge)},
        "spatial_merge_size": config.vision_model.spatial_merge_size,
        "tie_word_embeddings": not config.decoder.untie_embeddings_and_output_weights,
    }


MISTRAL3 = ConfigMap(
    architecture="mistral3",
    fields=(
        Field("image_token_index", "image_token_index", default=10),
        Field("projector_hidden_act", "projection_activation", import_activation, export_activation, default="gelu"),
        Field("multimodal_projector_bias", "projection_bias", default=False),
    ),
    fixed=(Fixed("vision_feature_layer", (-1, [-1])), *NOT_A_CHOICE),
    ignored=IGNORED,
    import_extra=import_parts,
    import_extra_keys=("vision_config", "text_config", "spatial_merge_size", "tie_word_embeddings"),
    export_extra=export_parts,
    spellings={"image_token_id": "image_token_index"},
)


def held(external: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """A file that does not say whether its LM head is tied, and has one, is not."""
    has_head = any(name.endswith(OUTPUT) for name in names)
    return {"tie_word_embeddings": not has_head, **external} if has_head else external


# -- names -------------------------------------------------------------------------------------------

LAYER, THEIR_LAYER = "vision_model.decoder.layers.{i}.", f"{TOWER}transformer.layers.{{i}}."


def tower_rules(config: PixtralVisionConfig) -> list[Rule]:
    heads = config.num_attention_heads
    rules: list[Rule] = [
        Same("vision_model.conv1.weight", f"{TOWER}patch_conv.weight"),
        Same("vision_model.ln_pre.weight", f"{TOWER}ln_pre.weight"),
        Same(f"{LAYER}input_layernorm.weight", f"{THEIR_LAYER}attention_norm.weight"),
        Same(f"{LAYER}pre_mlp_layernorm.weight", f"{THEIR_LAYER}ffn_norm.weight"),
        GroupedQKV(
            f"{LAYER}self_attention.linear_qkv.weight",
            tuple(f"{THEIR_LAYER}attention.{name}_proj.weight" for name in "qkv"),
            groups=heads,
            heads=heads,
        ),
        Same(f"{LAYER}self_attention.linear_proj.weight", f"{THEIR_LAYER}attention.o_proj.weight"),
        Concatenate(
            f"{LAYER}mlp.linear_fc1.weight",
            tuple(f"{THEIR_LAYER}feed_forward.{name}_proj.weight" for name in ("gate", "up")),
        ),
        Same(f"{LAYER}mlp.linear_fc2.weight", f"{THEIR_LAYER}feed_forward.down_proj.weight"),
    ]
    # Expanded for the tower's layers here: the whole model's NameMap has 0 layers, as its parts differ in depth.
    return NameMap(rules, config.num_layers).rules


def projection_rules(config: Mistral3Config) -> list[Rule]:
    kinds = ("weight", "bias") if config.projection_bias else ("weight",)
    return [
        Same("vision_projection.norm.weight", f"{PROJECTION}norm.weight"),
        Same("vision_projection.patch_merger.weight", f"{PROJECTION}patch_merger.merging_layer.weight"),
        *(
            Same(f"vision_projection.encoder.linear_fc{i}.{kind}", f"{PROJECTION}linear_{i}.{kind}")
            for i in (1, 2)
            for kind in kinds
        ),
    ]


def name_map(config: Mistral3Config) -> NameMap:
    decoder = decoder_map(config, DECODER + STEM, DECODER + OUTPUT)
    rules = [*tower_rules(config.vision_model), *projection_rules(config), *decoder.rules]
    return NameMap(rules, 0, ignored=decoder.ignored)


def copies(config: Mistral3Config) -> Mapping[str, str]:
    return tied_output(config, name_map(config), DECODER + OUTPUT)


def spelling(config: Mistral3Config, name: str) -> str:
    """The published name, from that of transformers 5."""
    return published_spelling(name)


# -- images ------------------------------------------------------------------------------------------


def write_preprocessor(config: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for images that are sized by another rule."""
    keys = trained_keys(config, data)
    if keys["size_rule"] != "longest_edge":
        raise ConfigError(
            f"data.size_rule={keys['size_rule']} cannot be written as a PixtralImageProcessor, which has longest_edge"
        )
    side = config.vision_model.patch_dim
    return {
        **written_processor("PixtralImageProcessor", "PixtralProcessor", keys),
        "patch_size": {"height": side, "width": side},
        "size": {"longest_edge": int(keys["max_pixels"] ** 0.5)},
    }


def read_preprocessor(config: Any, external: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for patches that are not the model's."""
    patch, side = external.get("patch_size"), config.vision_model.patch_dim
    if isinstance(patch, Mapping):
        patch = side if (patch.get("height"), patch.get("width")) == (side, side) else patch
    require_fields({"patch_size": patch}, {"patch_size": side})
    keys = read_processor(config, external, {})
    edge = (external.get("size") or {}).get("longest_edge")
    return keys | ({"max_pixels": edge**2} if edge is not None else {})


HUGGING_FACE = HuggingFaceFamily(
    "mistral3",
    {"mistral3": MISTRAL3},
    name_map,
    copies=copies,
    spelling=spelling,
    held=held,
    architectures={"mistral3": "Mistral3ForConditionalGeneration"},
    preprocessor=Preprocessor(write_preprocessor, read_preprocessor),
)
