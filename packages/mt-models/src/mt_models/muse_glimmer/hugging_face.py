"""Muse Glimmer's decoder in Hugging Face's format.

Files hold the decoder beside an image tower, and transformers has no class for the decoder alone. The decoder is read;
it is written for the same class with a tower of no layers, so that the class answers text alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mt_core.config.layer_pattern import pattern_of
from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    FULL,
    OURS,
    ROPE_KEYS,
    SLIDING,
    THEIRS,
    decoder_fields,
    decoder_name_map,
    export_rope,
    export_shape,
    feed_forward_rules,
    import_rope,
    layer_types,
    norm_rules,
)
from mt_models.blocks.hugging_face_tower import decoder_within
from mt_models.gemma.hugging_face import NORMS
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.muse_glimmer.config import GLOBAL, NO_ROPE, MuseGlimmerConfig, every_from_last

KIND = "muse_glimmer"
TOWER = frozenset(f"model.{part}.*" for part in ("vision_tower", "vision_adapter", "vision_projection"))
"""Tensors of the image tower, which this family does not have."""


# -- tensors -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupedQueriesAndGates(Rule):
    """q_proj, gate_proj, k_proj and v_proj there; here the rows of each key-value group: its queries, their gates, its
    key, its value."""

    groups: int = 1
    heads: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        # [groups, rows of a group, in] each
        return torch.cat([tensor.unflatten(0, (self.groups, -1)) for tensor in tensors], 1).flatten(0, 1)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        grouped, per_group = tensor.unflatten(0, (self.groups, -1)), self.heads // self.groups
        size = grouped.shape[1] // (2 * per_group + 2)
        parts = grouped.split([per_group * size, per_group * size, size, size], 1)
        return [part.flatten(0, 1).contiguous() for part in parts]


def name_map(config: MuseGlimmerConfig) -> NameMap:
    names = decoder_name_map(config, [*norm_rules(NORMS), *row_rules(config), *feed_forward_rules()])
    return NameMap([within(rule) for rule in names.rules], 0, names.ignored | TOWER)


def row_rules(config: MuseGlimmerConfig) -> list[Rule]:
    """The matrices of attention."""
    qkv = GroupedQueriesAndGates(
        f"{OURS}self_attention.linear_qkv.weight",
        tuple(f"{THEIRS}self_attn.{name}_proj.weight" for name in ("q", "gate", "k", "v")),
        groups=config.query_groups,
        heads=config.num_attention_heads,
    )
    return [qkv, Same(f"{OURS}self_attention.linear_proj.weight", f"{THEIRS}self_attn.o_proj.weight")]


def within(rule: Rule) -> Rule:
    """The rule for files that hold a tower too, from that for files of a decoder alone."""
    names = tuple(_within(name) for name in rule.sources)
    return replace(rule, theirs=names, others=tuple(within(other) for other in rule.others))


def _within(name: str) -> str:
    return name if name.startswith("lm_head.") else name.replace("model.", "model.language_model.", 1)


def copies(config: MuseGlimmerConfig) -> dict[str, str]:
    return {_within(name): _within(original) for name, original in tied_output(config).items()}


# -- configuration -----------------------------------------------------------------------------------

KEYS = ("layer_types", "layer_rope_theta", "sliding_window", "num_hidden_layers")
LAYERS, WINDOW = 52, 2048
"""Defaults of the class."""


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    rope = import_rope(external)
    return {**rope, **import_windows(external), NO_ROPE: import_positions(external, rope["rotary_base"])}


def import_windows(external: Mapping[str, Any]) -> dict[str, Any]:
    layers, kinds = external.get("num_hidden_layers", LAYERS), external.get("layer_types")
    window = external.get("sliding_window", WINDOW)
    if kinds is not None and (len(kinds) != layers or set(kinds) - {FULL, SLIDING}):
        raise ConfigError(
            f"layer_types={kinds} is not supported; it needs {FULL} or {SLIDING} for each of num_hidden_layers={layers}"
        )
    marked = every_from_last(4, layers) if kinds is None else [kind == FULL for kind in kinds]
    if window is None and not all(marked):
        raise ConfigError(f"sliding_window=None is not supported with {SLIDING} in layer_types; it can be 1 or more")
    return {GLOBAL: frequency(marked), "sliding_window": WINDOW if window is None else window}


def import_positions(external: Mapping[str, Any], base: float) -> int | str | None:
    """`no_rope_freq`. Raises ConfigError for bases that differ between layers, which the class does not use."""
    layers, bases = external.get("num_hidden_layers", LAYERS), external.get("layer_rope_theta")
    if bases is None:
        return frequency(every_from_last(4, layers))
    others = {float(theta) for theta in bases} - {0.0, base}
    if others or len(bases) < layers:
        raise ConfigError(
            f"layer_rope_theta={bases} is not supported; it needs 0 (no positions) or the rope_theta={base} of "
            f"rope_parameters for each of num_hidden_layers={layers}"
        )
    without = [not theta for theta in bases[:layers]]
    return frequency(without) if any(without) else None


def frequency(marked: list[bool]) -> int | str:
    """A number where every n-th layer from the last is marked and no other, else a pattern."""
    every = 1 + marked[::-1][1:].index(True) if True in marked[:-1] else len(marked)
    return every if marked == every_from_last(every, len(marked)) else pattern_of(marked)


def export_text(model: Mapping[str, Any]) -> dict[str, Any]:
    config = MuseGlimmerConfig.model_validate(model)
    rotates = [config.rotates(layer) for layer in range(config.num_layers)]
    return {
        **export_shape(config),
        **export_rope(config),
        "layer_types": layer_types(config),
        "layer_rope_theta": [config.rotary_base if turned else 0 for turned in rotates],
    }


def real(value: Any) -> float:
    return float(value)


TEXT = ConfigMap(
    architecture="muse_glimmer (text_config)",
    fields=(
        *decoder_fields(tied=False, epsilon=1e-5, positions=131072),
        Field("num_key_value_heads", "num_query_groups", default=2),
        Field("head_dim", "kv_channels", default=128),
        Field("sliding_window", "sliding_window", default=WINDOW),
        Field("post_norm_eps", "post_norm_epsilon", import_value=real, default=1e-8),
        Field("qk_scale_factor", "qk_scale_factor", import_value=real, default=3.87),
        Field("output_multiplier", "output_multiplier", import_value=real, default=0.19611613513818404),
        Field("final_logit_softcapping", "final_logit_softcapping", import_value=real, default=20.0),
    ),
    fixed=(Fixed("hidden_activation", ("silu", "swish")), Fixed("attention_bias", (False,)), *NOT_A_CHOICE),
    ignored=IGNORED,
    import_extra=import_extra,
    import_extra_keys=(*ROPE_KEYS, *KEYS),
    export_extra=export_text,
)
PROJECTOR = ("out_hidden_size", "projector_hidden_size", "projector_hidden_act")
NO_TOWER = {
    "model_type": "muse_glimmer_vision",
    "num_hidden_layers": 0,
    "hidden_size": 16,
    "num_attention_heads": 1,
    "intermediate_size": 16,
    "pos_emb_height": 1,
    "pos_emb_width": 1,
}
"""An image tower of no layers. Its small tensors are not in the file: the class makes random ones, which text does not
reach."""


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    text = TEXT.export_value(model)
    tied = text["tie_word_embeddings"]
    return {
        "text_config": {"model_type": f"{KIND}_text", **text},
        "vision_config": NO_TOWER,
        "out_hidden_size": 64,
        "projector_hidden_size": 16,
        "tie_word_embeddings": tied,
        **{key: text["vocab_size"] if model[key] is None else model[key] for key in PICTURES},
    }


PICTURES = {"image_token_id": 200092, "video_token_id": 200091}
"""Defaults of the class."""
WITH_TOWER = decoder_within(KIND, TEXT, KIND, PROJECTOR)


def import_whole(external: Mapping[str, Any]) -> dict[str, Any]:
    assert WITH_TOWER.import_extra is not None
    text = WITH_TOWER.import_extra(external)
    ids = {key: external.get(key, default) for key, default in PICTURES.items()}
    # One beyond the vocabulary stands for none.
    return {**text, **{key: number for key, number in ids.items() if 0 <= number < text["vocab_size"]}}


MUSE_GLIMMER = replace(
    WITH_TOWER,
    import_extra=import_whole,
    import_extra_keys=(*WITH_TOWER.import_extra_keys, *PICTURES),
    export_extra=export_extra,
    written=True,
)

HUGGING_FACE = HuggingFaceFamily(
    family=KIND,
    model_types={KIND: MUSE_GLIMMER},
    name_map=name_map,
    copies=copies,
    architectures={KIND: "MuseGlimmerForConditionalGeneration"},
)
