"""LLaVA in Hugging Face's format: the maps of its vision tower and of its decoder, each under a prefix.

Names are those of the published checkpoints, which every version of transformers reads:

| part | begins with |
| --- | --- |
| tower | `vision_tower.vision_model.` |
| projection | `multi_modal_projector.` |
| decoder without its LM head | `language_model.model.`, whatever its prefix as a single model |
| LM head | `language_model.lm_head.` |

Modules of transformers 5 call them `model.vision_tower.`, `model.multi_modal_projector.`, `model.language_model.` and
`lm_head.`, and leave `vision_model.` out; `spelling` reads these too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mt_core.config_map import ConfigMap, Field, require_known
from mt_core.errors import ConfigError
from mt_core.kinds import Lazy
from mt_core.name_map import NameMap, Rule, Same
from mt_models.hugging_face import FURTHER_ACTIVATIONS, IGNORED, NOT_A_CHOICE, HuggingFaceFamily, Preprocessor
from mt_models.llava.config import LlavaConfig, VisionLanguageConfig
from mt_models.llava.image_processor import read_processor, require_size, trained_keys, written_processor
from mt_models.vision import hugging_face as vision

# -- decoders ----------------------------------------------------------------------------------------

DECODERS: Mapping[str, Lazy[HuggingFaceFamily]] = {
    name: Lazy(f"mt_models.{name}.hugging_face:HUGGING_FACE")
    for name in ("llama", "mistral", "ministral3", "mistral4", "qwen", "gemma", "gpt")
}
"""Family -> its maps. Others can be trained as LLaVA's decoder, but not exported."""

LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
    },
}
"""model_type -> what published files of LLaVA leave out, since it is the type's default."""


def decoder_maps(family: str) -> HuggingFaceFamily:
    """Raises ConfigError for a family that cannot be written as a part of LLaVA."""
    if family not in DECODERS:
        raise ConfigError(
            f"model.language_model.family={family} cannot be written as the decoder of a Hugging Face llava; it can "
            f"be {', '.join(DECODERS)}"
        )
    return DECODERS[family].load()


def read_decoder(external: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [model.language_model] from `text_config`."""
    kinds = {kind: maps for maps in _all() for kind in maps.model_types}
    kind = require_known("text_config.model_type", str(external.get("model_type", "llama")), kinds)
    return kinds[kind].read_config({"model_type": kind, **LEFT_OUT.get(kind, {}), **external})


def _all() -> Iterator[HuggingFaceFamily]:
    return (maps.load() for maps in DECODERS.values())


TOWER, PROJECTION, DECODER = "vision_tower.", "multi_modal_projector.", "language_model."
STEM, OUTPUT = "model.", "lm_head.weight"
"""What a decoder's names, and its LM head, are called under language_model."""

# -- configuration -----------------------------------------------------------------------------------

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    **FURTHER_ACTIVATIONS,
}
"""Theirs to ours; of several the first is written."""


def import_activation(name: str) -> str:
    return ACTIVATIONS[require_known("projector_hidden_act", name, ACTIVATIONS)]


def export_activation(name: str) -> str:
    if name not in ACTIVATIONS.values():
        known = ", ".join(dict.fromkeys(ACTIVATIONS.values()))
        raise ConfigError(
            f"model.projection_activation={name} cannot be written as a Hugging Face model of images and text; it can "
            f"be {known}"
        )
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == name)


def import_layers(layers: int | list[int]) -> list[int]:
    return [layers] if isinstance(layers, int) else list(layers)


def export_layers(layers: list[int]) -> int | list[int]:
    return layers[0] if len(layers) == 1 else layers


def import_parts(external: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of tower and decoder, and the vocabulary, which is the whole model's."""
    tower = {"model_type": "clip_vision_model", **(external.get("vision_config") or {})}
    kind = require_known("vision_config.model_type", str(tower["model_type"]), vision.TOWERS)
    return {"vision_model": vision.TOWERS[kind].import_value(tower), **import_decoder(external)}


def import_decoder(external: Mapping[str, Any]) -> dict[str, Any]:
    """The table of the decoder, and the vocabulary, from `text_config`."""
    decoder = read_decoder(external.get("text_config") or {})
    # Whether the decoder's embeddings are tied: the outer field decides if it is given.
    if external.get("tie_word_embeddings"):
        decoder["untie_embeddings_and_output_weights"] = False
    return {"vocab_size": decoder.pop("vocab_size"), "language_model": decoder}


def export_decoder(config: VisionLanguageConfig) -> dict[str, Any]:
    """Raises ConfigError for a decoder that has no map."""
    text = decoder_maps(config.decoder.family).write_config(config.decoder)
    return {"text_config": text, "tie_word_embeddings": bool(text.get("tie_word_embeddings"))}


PLAIN: Mapping[str, Any] = {
    "projection_ffn_hidden_size": None,
    "projection_normalization": "none",
    "scale_factor": 1,
}
"""Keys of a projection, as that of Hugging Face's llava has them."""


def export_parts(model: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for a projection or a decoder that Hugging Face's llava cannot have."""
    config = LlavaConfig.model_validate(model)
    for key, value in PLAIN.items():
        if (actual := getattr(config, key)) != value:
            raise ConfigError(
                f"model.{key}={actual} cannot be written as a Hugging Face llava, whose projection has none of its "
                f"own; it can be {value}"
            )
    if config.vision_projection_type != "mlp":
        raise ConfigError(
            f"model.vision_projection_type={config.vision_projection_type} cannot be written as a Hugging Face llava, "
            "whose projection is an mlp"
        )
    kind = vision.tower_type_of(config.vision_model)
    return {
        "vision_config": {"model_type": kind, **vision.TOWERS[kind].export_value(config.vision_model.model_dump())},
        **export_decoder(config),
        "image_seq_length": config.image_seq_length,
    }


LLAVA = ConfigMap(
    architecture="llava",
    fields=(
        Field("image_token_index", "image_token_index", default=32000),
        Field("vision_feature_layer", "vision_feature_layers", import_layers, export_layers, default=-2),
        Field("vision_feature_select_strategy", "vision_feature_select_strategy", default="default"),
        Field("projector_hidden_act", "projection_activation", import_activation, export_activation, default="gelu"),
        Field("multimodal_projector_bias", "projection_bias", default=True),
    ),
    fixed=NOT_A_CHOICE,
    ignored={
        **IGNORED,
        "image_seq_length": "counted from the tower's patches",
        "ignore_index": "labels that do not count are the loss mask's",
        "vocab_size": "text_config has it",
    },
    import_extra=import_parts,
    import_extra_keys=("vision_config", "text_config", "tie_word_embeddings"),
    export_extra=export_parts,
)

# -- names -------------------------------------------------------------------------------------------


def prefixed(rules: Iterable[Rule], *, ours: str = "", theirs: str = "") -> list[Rule]:
    """The same rules with a prefix, in every form that is read."""
    return [
        replace(
            rule,
            ours=ours + rule.ours,
            theirs=tuple(theirs + name for name in rule.sources),
            others=tuple(prefixed(rule.others, ours=ours, theirs=theirs)),
        )
        for rule in rules
    ]


def decoder_stem(names: NameMap) -> str:
    """The prefix of a decoder's names: `model.`, `transformer.`, ..."""
    words = next(rule for rule in names.rules if rule.ours == "embedding.word_embeddings.weight")
    # Every decoder has the table, and its name begins with the part that the LM head is not in.
    return words.sources[0].partition(".")[0] + "."


def decoder_map(config: VisionLanguageConfig, prefix: str, output: str) -> NameMap:
    """Rules of the decoder as a part of a model. prefix: of its names there, in place of its own. output: its
    LM head's."""
    names = decoder_maps(config.decoder.family).name_map(config.decoder)
    stem = decoder_stem(names)

    # "model.layers.0..." of a Llama or "transformer.h.0..." of a GPT-2 -> prefix + "layers.0...": whatever the decoder
    # is called as a single model, within this one it has this one's prefix.
    def within(rule: Rule) -> Rule:
        if rule.ours == "output_layer.weight":
            return replace(rule, theirs=(output,))
        others = tuple(map(within, rule.others))
        return replace(rule, theirs=tuple(prefix + name.removeprefix(stem) for name in rule.sources), others=others)

    ignored = [prefix + name.removeprefix(stem) for name in names.ignored]
    return NameMap(prefixed(map(within, names.rules), ours=DECODER), 0, ignored=ignored)


def name_map(config: LlavaConfig) -> NameMap:
    tower = vision.tower_map(config.vision_model)
    decoder = decoder_map(config, DECODER + STEM, DECODER + OUTPUT)
    rules = [*prefixed(tower.rules, theirs=TOWER), *projection_rules(config), *decoder.rules]
    return NameMap(rules, 0, ignored=[*(TOWER + name for name in tower.ignored), *decoder.ignored])


def projection_rules(config: LlavaConfig) -> list[Rule]:
    kinds = ("weight", "bias") if config.projection_bias else ("weight",)
    return [
        Same(f"vision_projection.encoder.linear_fc{i}.{kind}", f"{PROJECTION}linear_{i}.{kind}")
        for i in (1, 2)
        for kind in kinds
    ]


def copies(config: LlavaConfig) -> Mapping[str, str]:
    return tied_output(config, name_map(config), DECODER + OUTPUT)


def tied_output(config: VisionLanguageConfig, names: NameMap, output: str) -> Mapping[str, str]:
    """The LM head, called `output`, repeats the token embeddings when the decoder ties the two."""
    if config.decoder.untie_embeddings_and_output_weights:
        return {}
    words = next(rule for rule in names.rules if rule.ours.endswith("embedding.word_embeddings.weight"))
    # The name in the map of the whole model, with its prefix.
    return {output: words.sources[0]}


def spelling(config: LlavaConfig, name: str) -> str:
    """The published name, from that of transformers 5 and of the decoder as a single model."""
    # First the prefixes of the parts, then the tower's own names under its prefix.
    name = published_spelling(name)
    if name.startswith(TOWER):
        return TOWER + vision.spelling(config.vision_model, name.removeprefix(TOWER))
    return name


def published_spelling(name: str) -> str:
    """The published name of a part, from that of transformers 5; within the tower it may differ."""
    if name == OUTPUT:
        return DECODER + OUTPUT
    if name.startswith(STEM + DECODER):
        return DECODER + STEM + name.removeprefix(STEM + DECODER)
    return name.removeprefix(STEM)


# -- images ------------------------------------------------------------------------------------------


def write_preprocessor(config: LlavaConfig, data: Mapping[str, Any]) -> dict[str, Any]:
    """CLIP's processor takes the middle of an image, SigLIP's all of it."""
    keys = trained_keys(config, data)
    sides = {"height": keys["img_h"], "width": keys["img_w"]}
    if keys["resize"] == "squash":
        return {**written_processor("SiglipImageProcessor", "LlavaProcessor", keys), "size": sides}
    crop = {"do_center_crop": True, "size": {"shortest_edge": keys["img_h"]}, "crop_size": sides}
    return {**written_processor("CLIPImageProcessor", "LlavaProcessor", keys), **crop}


def read_preprocessor(config: LlavaConfig, external: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for images of another size than the tower's, and for what no processor of CLIP's or SigLIP's
    does."""
    keys = read_processor(config, external, {"do_pad": False})
    require_size(config, "size", external.get("size"))
    if not external.get("do_center_crop"):
        # SigLIP's file has no such field.
        return keys | ({"resize": "squash"} if "size" in external else {})
    require_size(config, "crop_size", external.get("crop_size"))
    return keys | {"resize": "crop"}


HUGGING_FACE = HuggingFaceFamily(
    "llava",
    {"llava": LLAVA},
    name_map,
    copies=copies,
    spelling=spelling,
    architectures={"llava": "LlavaForConditionalGeneration"},
    preprocessor=Preprocessor(write_preprocessor, read_preprocessor),
)
