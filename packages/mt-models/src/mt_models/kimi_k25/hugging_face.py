"""Kimi K2.5 and K2.6 with pictures in Hugging Face's format, `kimi_k25`.

Names are those of published files. Modules of transformers 5 have other ones and keep queries, keys and values of the
tower in three matrices, whose rows are in another order; what transformers writes is a third form. All are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mt_core.config_map import ConfigMap, Field, Fixed, require_known
from mt_core.errors import ConfigError
from mt_core.name_map import GroupedQKV, NameMap, Rule, Same
from mt_models.deepseek import hugging_face as deepseek
from mt_models.hugging_face import GELU_TANH, IGNORED, NOT_A_CHOICE, HuggingFaceFamily, Preprocessor
from mt_models.kimi_k25.config import KimiK25Config, MoonVitConfig
from mt_models.llava.image_processor import read_processor, require_fields, trained_keys, written_processor
from mt_models.qwen_vl.hugging_face import AXIAL

# -- configuration -----------------------------------------------------------------------------------

OF_VIDEOS = "stands for videos there; here the image token does, whose embeddings are replaced as well"
TEXT_TYPES = ("deepseek_v3", "kimi_k2")
DECODER_DEFAULTS = {"model_type": "deepseek_v3"}
OLDER_TOWER = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
}
"""Keys of vision_config in the first published files -> those of transformers."""
OLDER_PROJECTION = ("mm_hidden_size", "projector_hidden_act", "projector_ln_eps", "text_hidden_size")
"""Keys of the projection within vision_config, in these files."""


def import_positions(external: Mapping[str, Any]) -> dict[str, Any]:
    rope = external.get("rope_parameters") or {}
    rows, columns = external.get("pos_emb_height", 64), external.get("pos_emb_width", 64)
    merged = list(external.get("merge_kernel_size", (2, 2)))
    if rows != columns or len(merged) != 2 or merged[0] != merged[1]:
        raise ConfigError(
            f"vision_config: pos_emb_height={rows}, pos_emb_width={columns} and merge_kernel_size={merged} are not "
            "supported; learned positions and merged patches are those of squares"
        )
    if rope.get("rope_type", "axial") not in AXIAL:
        raise ConfigError(f"vision_config.rope_parameters={rope} is not supported; positions of patches are axial")
    return {
        "num_position_embeddings": rows**2,
        "spatial_merge_size": merged[0],
        "rotary_base": float(rope.get("rope_theta", 10000.0)),
    }


def export_tower(model: Mapping[str, Any]) -> dict[str, Any]:
    tower = MoonVitConfig.model_validate(model)
    for key, wanted in (("norm_epsilon", 1e-5), ("num_channels", 3)):
        if (value := getattr(tower, key)) != wanted:
            raise ConfigError(
                f"model.vision_model.{key}={value} cannot be written as a Hugging Face kimi_k25, which has {wanted}"
            )
    side, merge = tower.position_side, tower.spatial_merge_size
    return {
        "intermediate_size": tower.ffn_size,
        "pos_emb_height": side,
        "pos_emb_width": side,
        "merge_kernel_size": [merge, merge],
        "rope_parameters": {"rope_type": "axial", "rope_theta": tower.rotary_base},
    }


VISION = ConfigMap(
    architecture="kimi_k25_vision",
    fields=(
        Field("num_hidden_layers", "num_layers", default=27),
        Field("hidden_size", "hidden_size", default=1152),
        Field("num_attention_heads", "num_attention_heads", default=16),
        Field("intermediate_size", "ffn_hidden_size", default=4304),
        Field("patch_size", "patch_dim", default=14),
        Field("initializer_range", "init_method_std", float, default=0.02),
    ),
    fixed=(
        Fixed("hidden_act", GELU_TANH),
        Fixed("merge_type", ("sd2_tpool",)),
        Fixed("pos_emb_type", ("divided_fixed",)),
        Fixed("mm_projector_type", ("patchmerger",)),
        Fixed("video_attn_type", ("spatial_temporal",), written=False),
        Fixed("pos_emb_time", (4,)),
        *NOT_A_CHOICE,
    ),
    ignored=IGNORED,
    import_extra=import_positions,
    import_extra_keys=("pos_emb_height", "pos_emb_width", "merge_kernel_size", "rope_parameters"),
    export_extra=export_tower,
    spellings=OLDER_TOWER,
)


def import_decoder(external: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [model.language_model], and the vocabulary, from `text_config`."""
    text = {**DECODER_DEFAULTS, **(external.get("text_config") or {})}
    require_known("text_config.model_type", str(text["model_type"]), TEXT_TYPES)
    # The outer class ties its LM head by its own key.
    text["tie_word_embeddings"] = bool(external.get("tie_word_embeddings", True))
    return deepseek.HUGGING_FACE.read_config({**text, "model_type": "deepseek_v3"})


def import_projection(external: Mapping[str, Any], tower: Mapping[str, Any], decoder: Mapping[str, Any]) -> float:
    """Epsilon of the norm of the projection. Raises ConfigError for widths that do not fit, another activation."""
    older = external.get("vision_config") or {}
    widths = {
        "projection_hidden_size": (external.get("projection_hidden_size"), tower["hidden_size"]),
        "vision_config.mm_hidden_size": (older.get("mm_hidden_size"), tower["hidden_size"]),
        "vision_config.text_hidden_size": (older.get("text_hidden_size"), decoder["hidden_size"]),
        "vision_config.projector_hidden_act": (older.get("projector_hidden_act"), "gelu"),
    }
    for key, (value, wanted) in widths.items():
        if value not in (None, wanted):
            raise ConfigError(f"{key}={value!r} is not supported; it can be {wanted!r}")
    return float(external.get("projection_layer_norm_eps", older.get("projector_ln_eps", 1e-5)))


def import_parts(external: Mapping[str, Any]) -> dict[str, Any]:
    if external.get("vision_config") is None:
        raise ConfigError(
            "vision_config=null: the file has no vision tower, and model.family=kimi_k25 needs one; its decoder is a "
            "model.family=deepseek"
        )
    vision = {key: value for key, value in external["vision_config"].items() if key not in OLDER_PROJECTION}
    tower, decoder = VISION.import_value(vision), import_decoder(external)
    return {
        "vision_model": {"use_scaled_init_method": False, **tower},
        "projection_norm_epsilon": import_projection(external, tower, decoder),
        "vocab_size": decoder.pop("vocab_size"),
        "language_model": decoder,
    }


def export_parts(model: Mapping[str, Any]) -> dict[str, Any]:
    config = KimiK25Config.model_validate(model)
    text = deepseek.HUGGING_FACE.write_config(config.decoder)
    if text["model_type"] != "deepseek_v3":
        raise ConfigError(
            f"model.language_model is a Hugging Face {text['model_type']}, and the decoder of a kimi_k25 is a "
            'deepseek_v3, whose model.language_model.moe.moe_router_score_function is "sigmoid"'
        )
    vision = VISION.export_value(config.vision_model.model_dump(mode="json"))
    return {
        "text_config": text,
        "vision_config": {"model_type": "kimi_k25_vision", **vision},
        "projection_hidden_size": config.vision_model.hidden_size,
        "projection_layer_norm_eps": config.projection_norm_epsilon,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


KIMI_K25 = ConfigMap(
    architecture="kimi_k25",
    fields=(
        Field("image_token_id", "image_token_index", default=163605),
        Field("video_token_id", "video_token_index", default=163840),
    ),
    fixed=NOT_A_CHOICE,
    ignored={
        **IGNORED,
        **dict.fromkeys(("video_placeholder", "use_unified_vision_chunk"), OF_VIDEOS),
        **dict.fromkeys(
            ("vision_start_token_id", "vision_end_token_id"), "marks images in texts, which the tokenizer's tokens do"
        ),
        "ignore_index": "of labels, which loss_mask says",
    },
    import_extra=import_parts,
    import_extra_keys=(
        "vision_config",
        "text_config",
        "projection_hidden_size",
        "projection_layer_norm_eps",
        "tie_word_embeddings",
    ),
    export_extra=export_parts,
    spellings={"media_placeholder_token_id": "image_token_id"},
)

DECODER, OUTPUT = "language_model.", "language_model.lm_head.weight"


def held(external: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Without layers of multi-token prediction where a file has none. A file that does not say whether its LM head is
    tied, and has one, is not."""
    names = list(names)
    external = deepseek.held(external, names)
    has_head = any(name.endswith("lm_head.weight") for name in names)
    return {"tie_word_embeddings": not has_head, **external} if has_head else external


# -- names -------------------------------------------------------------------------------------------

LAYER, THEIR_LAYER = "vision_model.decoder.layers.{i}.", "vision_tower.encoder.blocks.{i}."
KINDS = ("weight", "bias")


@dataclass(frozen=True)
class HalvedQKV(GroupedQKV):
    """Queries, keys and values in three matrices, of which the rows of a query or key head are in the order of halves
    that are rotated together there, and of neighbours here."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        q, k, v = tensors
        return super().import_value([self._with_neighbours(q), self._with_neighbours(k), v])

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        q, k, v = super().export_value(tensor)
        return [self._with_halves(q), self._with_halves(k), v]

    def _with_neighbours(self, x: Tensor) -> Tensor:
        # [heads, 2, d / 2, ...] -> [heads, d / 2, 2, ...]
        return x.unflatten(0, (self.heads, 2, -1)).transpose(1, 2).flatten(0, 2)

    def _with_halves(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True)
class SquareTable(Rule):
    """[side, side, W] there, [side side, W] here. side: of the square of learned positions."""

    side: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].flatten(0, 1)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.unflatten(0, (self.side, self.side))]


def tower_rules(config: MoonVitConfig) -> list[Rule]:
    heads = config.num_attention_heads
    rules: list[Rule] = [
        SquareTable(
            "vision_model.position_embeddings.weight",
            ("vision_tower.patch_embed.pos_emb.weight",),
            side=config.position_side,
        )
    ]
    for kind in KINDS:
        qkv, apart = f"{LAYER}self_attention.linear_qkv.{kind}", [f"{THEIR_LAYER}attn.{x}_proj.{kind}" for x in "qkv"]
        halved = HalvedQKV(qkv, tuple(apart), groups=heads, heads=heads)
        rules += [
            GroupedQKV(qkv, f"{THEIR_LAYER}wqkv.{kind}", groups=heads, heads=heads, others=(halved,)),
            Same(f"vision_model.conv1.{kind}", f"vision_tower.patch_embed.proj.{kind}"),
            Same(f"{LAYER}input_layernorm.{kind}", f"{THEIR_LAYER}norm0.{kind}"),
            Same(f"{LAYER}self_attention.linear_proj.{kind}", f"{THEIR_LAYER}wo.{kind}"),
            Same(f"{LAYER}pre_mlp_layernorm.{kind}", f"{THEIR_LAYER}norm1.{kind}"),
            Same(f"{LAYER}mlp.linear_fc1.{kind}", f"{THEIR_LAYER}mlp.fc0.{kind}"),
            Same(f"{LAYER}mlp.linear_fc2.{kind}", f"{THEIR_LAYER}mlp.fc1.{kind}"),
            Same(f"vision_model.decoder.final_layernorm.{kind}", f"vision_tower.encoder.final_layernorm.{kind}"),
            Same(f"vision_projection.norm.{kind}", f"mm_projector.pre_norm.{kind}"),
            Same(f"vision_projection.linear_fc1.{kind}", f"mm_projector.proj.0.{kind}"),
            Same(f"vision_projection.linear_fc2.{kind}", f"mm_projector.proj.2.{kind}"),
        ]
    # Expanded for the tower's layers here: the whole model's NameMap has 0 layers, as its parts differ in depth.
    return NameMap(rules, config.num_layers).rules


def beside_tower(rule: Rule) -> Rule:
    """The rule of a decoder that is a part of the model."""
    return replace(
        rule,
        ours=DECODER + rule.ours,
        theirs=tuple(DECODER + name for name in rule.sources),
        others=tuple(map(beside_tower, rule.others)),
    )


def name_map(config: KimiK25Config) -> NameMap:
    decoder = deepseek.name_map(config.decoder)
    ignored = {DECODER + name for name in decoder.ignored - deepseek.TOWER}
    return NameMap([*tower_rules(config.vision_model), *map(beside_tower, decoder.rules)], 0, ignored=ignored)


def copies(config: KimiK25Config) -> Mapping[str, str]:
    """The LM head repeats the token embeddings when the decoder ties the two."""
    return {DECODER + name: DECODER + original for name, original in deepseek.copies(config.decoder).items()}


PREFIXES = {
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
    "language_model.model.blocks.": "language_model.model.layers.",
    "model.vision_tower.layers.": "vision_tower.encoder.blocks.",
    "model.vision_tower.final_layernorm.": "vision_tower.encoder.final_layernorm.",
    "model.vision_tower.patch_embed.": "vision_tower.patch_embed.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    "model.mm_projector.": "mm_projector.",
}
"""Names in the memory of transformers 5, and in what it writes -> those of published files."""
OF_LAYERS = {
    "norm1.": "norm0.",
    "norm2.": "norm1.",
    "attn.proj.": "wo.",
    "mlp.fc1.": "mlp.fc0.",
    "mlp.fc2.": "mlp.fc1.",
}
"""Names within a layer of the tower, in the memory of transformers 5 -> those of published files."""
FURTHER = {
    "vision_tower.patch_embed.pos_emb.position_embeddings": "vision_tower.patch_embed.pos_emb.weight",
    "mm_projector.in_proj.": "mm_projector.proj.0.",
    "mm_projector.out_proj.": "mm_projector.proj.2.",
}


def spelling(config: KimiK25Config, name: str) -> str:
    """The published name, from that of transformers 5."""
    if layer := re.match(r"model\.vision_tower\.layers\.\d+\.", name):
        return layer[0].replace(*("model.vision_tower.layers.", "vision_tower.encoder.blocks.")) + _with(
            name[layer.end() :], OF_LAYERS
        )
    return _with(_with(name, PREFIXES), FURTHER)


def _with(name: str, prefixes: Mapping[str, str]) -> str:
    """With the first prefix that the name has replaced."""
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes.get(prefix, "") + name.removeprefix(prefix)


# -- images ------------------------------------------------------------------------------------------

LARGEST_SIDE = 512
"""Patches of the longer side of an image, at most. data.size_rule=padded counts with it, and with cells of 2 x 2."""
MERGED = 2


def patch_fields(config: Any) -> dict[str, Any]:
    """Raises ConfigError for cells of other than two by two patches."""
    vision = config.vision_model
    require_fields({"merge_size": vision.spatial_merge_size}, {"merge_size": MERGED})
    return {"patch_size": vision.patch_dim, "merge_size": vision.spatial_merge_size}


def write_preprocessor(config: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for images that are sized by another rule."""
    keys = trained_keys(config, data)
    if keys["size_rule"] != "padded":
        raise ConfigError(
            f"data.size_rule={keys['size_rule']} cannot be written as a Kimi_K25ImageProcessor, which has padded"
        )
    return {
        **written_processor("Kimi_K25ImageProcessor", "Kimi_K25Processor", keys),
        **patch_fields(config),
        "max_patches": keys["max_pixels"] // config.vision_model.patch_dim**2,
        "size": {"max_height": LARGEST_SIDE, "max_width": LARGEST_SIDE},
    }


def read_preprocessor(config: Any, external: Mapping[str, Any]) -> dict[str, Any]:
    """From transformers' file, or the `media_proc_cfg` of published ones. Raises ConfigError for patches that are not
    the model's."""
    published = external.get("media_proc_cfg")
    if published is not None:
        names = {"merge_kernel_size": "merge_size", "in_patch_limit": "max_patches"}
        external = {names.get(key, key): value for key, value in published.items()}
        external["size"] = {"max_height": external.get("patch_limit_on_one_side", LARGEST_SIDE)}
    side = (external.get("size") or {}).get("max_height", LARGEST_SIDE)
    require_fields({"size.max_height": side}, {"size.max_height": LARGEST_SIDE})
    keys = read_processor(config, external, patch_fields(config))
    if (patches := external.get("max_patches")) is not None:
        keys["max_pixels"] = patches * config.vision_model.patch_dim**2
    return keys


HUGGING_FACE = HuggingFaceFamily(
    "kimi_k25",
    {"kimi_k25": KIMI_K25},
    name_map,
    copies=copies,
    spelling=spelling,
    held=held,
    architectures={"kimi_k25": "KimiK25ForConditionalGeneration"},
    preprocessor=Preprocessor(write_preprocessor, read_preprocessor),
)
