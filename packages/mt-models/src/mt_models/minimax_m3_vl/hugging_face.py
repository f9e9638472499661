"""MiniMax-M3 with pictures in Hugging Face's format, `minimax_m3_vl`.

Names are those of published files, which transformers 5 reads and writes; its modules have other ones, which are read
too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed, require_known
from mt_core.errors import ConfigError
from mt_core.name_map import GroupedQKV, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import one_of
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, Preprocessor, tied_output
from mt_models.llava.image_processor import trained_keys, written_processor
from mt_models.minimax_m3 import hugging_face as minimax_m3
from mt_models.minimax_m3_vl.config import MiniMaxM3VLConfig, MiniMaxVisionConfig
from mt_models.qwen_vl.hugging_face import PIXELS, patch_fields, read_preprocessor

KIND, TOWER_KIND = "minimax_m3_vl", "minimax_m3_vl_vision"
TOWER_KINDS = (TOWER_KIND, "clip_vision_model")
"""Types of vision_config; the second is that of published files."""
OF_VIDEOS = "stands for videos there; here the image token does, whose embeddings are replaced as well"

# -- configuration -----------------------------------------------------------------------------------

COMPRESSION = "img_token_compression_config"
METHOD = "image_token_compression_method"


def import_tower(external: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of patches, which published files have in a table, and the base of the positions."""
    rope, table = external.get("rope_parameters") or {}, dict(external.get(COMPRESSION) or {})
    if (kind := rope.get("rope_type", "axial")) != "axial":
        raise ConfigError(f"vision_config.rope_parameters.rope_type={kind!r} is not supported; it can be 'axial'")
    if (method := table.pop(METHOD, "patch_merge")) != "patch_merge":
        raise ConfigError(f"{COMPRESSION}.{METHOD}={method!r} is not supported; it can be 'patch_merge'")
    sizes = {}
    for key in ("spatial_merge_size", "temporal_patch_size"):
        # What a file leaves out is 2 in transformers, which does not read the table.
        stated = {key: external.get(key, 2), f"{COMPRESSION}.{key}": table.pop(key, None)}
        sizes[key] = one_of(stated, tuple(stated), 2)
    if table:
        raise ConfigError(f"{COMPRESSION} has keys that are not known: {', '.join(sorted(table))}")
    base = one_of({"rope_theta": external.get("rope_theta"), "rope_parameters.rope_theta": rope.get("rope_theta")},
                  ("rope_theta", "rope_parameters.rope_theta"), 10000.0)  # fmt: skip
    return {**sizes, "rotary_base": float(base)}


def export_tower(model: Mapping[str, Any]) -> dict[str, Any]:
    tower = MiniMaxVisionConfig.model_validate(model)
    return {
        "intermediate_size": tower.ffn_size,
        "spatial_merge_size": tower.spatial_merge_size,
        "temporal_patch_size": tower.temporal_patch_size,
        "rope_parameters": {"rope_type": "axial", "rope_theta": tower.rotary_base},
    }


VISION = ConfigMap(
    architecture=TOWER_KIND,
    fields=(
        Field("num_hidden_layers", "num_layers", default=32),
        Field("hidden_size", "hidden_size", default=1280),
        Field("num_attention_heads", "num_attention_heads", default=16),
        Field("intermediate_size", "ffn_hidden_size", default=5120),
        Field("patch_size", "patch_dim", default=14),
        Field("num_channels", "num_channels", default=3),
        Field("layer_norm_eps", "norm_epsilon", float, default=1e-5),
        Field("initializer_range", "init_method_std", float, default=0.02),
    ),
    fixed=(
        Fixed("hidden_act", ("gelu", "gelu_python")),
        Fixed("attention_dropout", (0.0,)),
        Fixed("position_embedding_type", ("rope",), written=False),
        Fixed("rope_mode", ("3d",), written=False),
        # Views that see one another: the data set cuts videos so.
        Fixed("vision_segment_max_frames", (4,), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        "image_size": "of the image processor",
        "projection_dim": "repeats the hidden_size of the decoder",
        "initializer_factor": "of initial weights",
        "vocab_size": "a tower reads no words",
        "tie_word_embeddings": "a tower reads no words",
    },
    import_extra=import_tower,
    import_extra_keys=("spatial_merge_size", "temporal_patch_size", COMPRESSION, "rope_parameters", "rope_theta"),
    export_extra=export_tower,
)


def import_parts(external: Mapping[str, Any]) -> dict[str, Any]:
    vision = dict(external.get("vision_config") or {})
    require_known("vision_config.model_type", str(vision.get("model_type", TOWER_KIND)), TOWER_KINDS)
    # Published files repeat this table beside vision_config.
    if (table := external.get(COMPRESSION)) is not None and vision.setdefault(COMPRESSION, table) != table:
        raise ConfigError(f"{COMPRESSION}={table} and vision_config.{COMPRESSION} differ; remove what is wrong")
    decoder = minimax_m3.import_text(external)
    return {
        "vision_model": {"use_scaled_init_method": False, **VISION.import_value(vision)},
        "vocab_size": decoder.pop("vocab_size"),
        "language_model": decoder,
    }


def export_parts(model: Mapping[str, Any]) -> dict[str, Any]:
    config = MiniMaxM3VLConfig.model_validate(model)
    text = minimax_m3.HUGGING_FACE.write_config(config.decoder)
    vision = VISION.export_value(config.vision_model.model_dump(mode="json"))
    return {
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": {"model_type": TOWER_KIND, **vision},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


MINIMAX_M3_VL = ConfigMap(
    architecture=KIND,
    fields=(
        Field("image_token_index", "image_token_index", default=200025),
        Field("projector_hidden_size", "projection_hidden_size", default=6144),
    ),
    fixed=(
        Fixed("multimodal_projector_bias", (True,), written=False),
        Fixed("projector_hidden_act", ("gelu",), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        "video_token_index": OF_VIDEOS,
        "video_token_id": OF_VIDEOS,
        "image_seq_length": "of the image processor",
        "merged_hidden_size": "follows from the decoder's width and the merged patches",
    },
    import_extra=import_parts,
    import_extra_keys=("vision_config", "text_config", "tie_word_embeddings", COMPRESSION),
    export_extra=export_parts,
    spellings={"image_token_id": "image_token_index"},
)

# -- names -------------------------------------------------------------------------------------------

DECODER = "language_model."
TOWER = "vision_tower.vision_model."
LAYER, THEIR_LAYER = "vision_model.decoder.layers.{i}.", f"{TOWER}encoder.layers.{{i}}."
KINDS = ("weight", "bias")
PROJECTION = {
    "linear_fc1": "multi_modal_projector.linear_1",
    "linear_fc2": "multi_modal_projector.linear_2",
    "merge_fc1": "patch_merge_mlp.linear_1",
    "merge_fc2": "patch_merge_mlp.linear_2",
}


def tower_rules(config: MiniMaxVisionConfig) -> list[Rule]:
    heads = config.num_attention_heads
    rules: list[Rule] = [Same("vision_model.conv1.weight", f"{TOWER}embeddings.patch_embedding.weight")]
    for kind in KINDS:
        apart = tuple(f"{THEIR_LAYER}self_attn.{x}_proj.{kind}" for x in "qkv")
        rules += [
            GroupedQKV(f"{LAYER}self_attention.linear_qkv.{kind}", apart, groups=heads, heads=heads),
            Same(f"{LAYER}self_attention.linear_proj.{kind}", f"{THEIR_LAYER}self_attn.out_proj.{kind}"),
            Same(f"{LAYER}input_layernorm.{kind}", f"{THEIR_LAYER}layer_norm1.{kind}"),
            Same(f"{LAYER}pre_mlp_layernorm.{kind}", f"{THEIR_LAYER}layer_norm2.{kind}"),
            Same(f"{LAYER}mlp.linear_fc1.{kind}", f"{THEIR_LAYER}mlp.fc1.{kind}"),
            Same(f"{LAYER}mlp.linear_fc2.{kind}", f"{THEIR_LAYER}mlp.fc2.{kind}"),
            Same(f"vision_model.ln_pre.{kind}", f"{TOWER}pre_layrnorm.{kind}"),
            *(Same(f"vision_projection.{ours}.{kind}", f"{theirs}.{kind}") for ours, theirs in PROJECTION.items()),
        ]
    # Expanded for the tower's layers here: the whole model's NameMap has 0 layers, as its parts differ in depth.
    return NameMap(rules, config.num_layers).rules


PUBLISHED = {
    r"\.mlp\.gate\.e_score_correction_bias$": ".block_sparse_moe.e_score_correction_bias",
    r"\.mlp\.(experts|gate|shared_experts)\.": r".block_sparse_moe.\1.",
    r"\.self_attn\.indexer\.([qk]_(?:proj|norm))\.": r".self_attn.index_\1.",
}
"""Names within a layer of the decoder in the memory of transformers -> those of published files."""


def published(name: str) -> str:
    """The name in published files, from that in a file of the decoder alone."""
    for pattern, instead in PUBLISHED.items():
        name = re.sub(pattern, instead, name)
    return DECODER + name


def beside_tower(rule: Rule) -> Rule:
    """The rule of a decoder that is a part of the model, in the form that published files have."""
    if rule.others:
        # The decoder alone is written as transformers holds it in memory.
        apart, *others = rule.others
        rule = replace(apart, others=(replace(rule, others=()), *others))
    return _renamed(rule)


def _renamed(rule: Rule) -> Rule:
    return replace(
        rule,
        ours=DECODER + rule.ours,
        theirs=tuple(map(published, rule.sources)),
        others=tuple(map(_renamed, rule.others)),
    )


def name_map(config: MiniMaxM3VLConfig) -> NameMap:
    decoder = minimax_m3.name_map(config.decoder)
    ignored = {DECODER + name for name in decoder.ignored - minimax_m3.TOWER} | minimax_m3.PREDICTION
    return NameMap([*tower_rules(config.vision_model), *map(beside_tower, decoder.rules)], 0, ignored=ignored)


def copies(config: MiniMaxM3VLConfig) -> Mapping[str, str]:
    """The LM head repeats the token embeddings when the decoder ties the two."""
    return {DECODER + name: DECODER + original for name, original in tied_output(config.decoder).items()}


TOWER_PREFIXES = {
    "model.vision_tower.embeddings.proj.": f"{TOWER}embeddings.patch_embedding.",
    "model.vision_tower.layers.": f"{TOWER}encoder.layers.",
    "model.vision_tower.": TOWER,
    "model.multi_modal_projector.merge_linear_": "patch_merge_mlp.linear_",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
"""Names in the memory of transformers -> those of published files."""
OF_TOWER = (TOWER, "multi_modal_projector.", "patch_merge_mlp.")


def spelling(config: MiniMaxM3VLConfig, name: str) -> str:
    """The published name, from that of transformers 5."""
    prefix = next((prefix for prefix in TOWER_PREFIXES if name.startswith(prefix)), None)
    if prefix is not None:
        return TOWER_PREFIXES[prefix] + name.removeprefix(prefix)
    return name if name.startswith(OF_TOWER) else published(minimax_m3.alone(name))


# -- images ------------------------------------------------------------------------------------------

OUTDATED_SIZE = [672, 672]
"""What published files say, in place of the sizes that images had; transformers reads it as its own default."""


def write_preprocessor(config: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    keys = trained_keys(config, data)
    return {
        **written_processor("MiniMaxM3VLImageProcessor", "MiniMaxM3VLProcessor", keys),
        **{key: keys[key] for key in PIXELS},
        **patch_fields(config),
    }


def read_published(config: Any, external: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for patches that are not the model's."""
    size = external.get("size")
    return read_preprocessor(config, {**external, "size": None if size == OUTDATED_SIZE else size})


HUGGING_FACE = HuggingFaceFamily(
    "minimax_m3_vl",
    {KIND: MINIMAX_M3_VL},
    name_map,
    copies=copies,
    spelling=spelling,
    architectures={KIND: "MiniMaxM3SparseForConditionalGeneration"},
    preprocessor=Preprocessor(write_preprocessor, read_published),
)
