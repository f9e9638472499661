"""Ministral 3 in Hugging Face's format: the text model alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_models.blocks.hugging_face_decoder import (
    ROPE_KEYS,
    decoder_fields,
    export_scaling,
    export_shape,
    import_rope,
    rope_table,
)
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.ministral3.config import Ministral3Config
from mt_models.mistral.hugging_face import name_map

BETA, POSITIONS = "llama_4_scaling_beta", "max_position_embeddings"
ORIGINAL = "original_max_position_embeddings"
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    ORIGINAL: 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}
"""What a file without a table means."""


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    if all(external.get(key) is None for key in ("rope_parameters", "rope_scaling")):
        external = {**external, "rope_parameters": DEFAULT_ROPE}
    table = rope_table(external)
    table.pop(POSITIONS, None)  # repeats the field beside the table
    beta = float(table.pop(BETA))
    return {**import_rope({"rope_parameters": table}), "query_scaling_beta": beta}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Ministral3Config.model_validate(model)
    original = config.original_max_position_embeddings or config.max_position_embeddings
    table = export_scaling(config) or {"rope_type": "default"}
    return {
        **export_shape(config),
        # The class takes the length of the scaling of queries from the table.
        "rope_parameters": {
            **table,
            ORIGINAL: original,
            "rope_theta": config.rotary_base,
            BETA: config.query_scaling_beta,
        },
    }


MINISTRAL3 = ConfigMap(
    architecture="ministral3",
    fields=(
        *decoder_fields(tied=False, epsilon=1e-5, positions=262144),
        Field("num_key_value_heads", "num_query_groups", default=8),
        Field("head_dim", "kv_channels", default=128),
        Field("sliding_window", "sliding_window"),
    ),
    fixed=(Fixed("hidden_act", ("silu", "swish")), *NOT_A_CHOICE),
    ignored=IGNORED,
    import_extra=import_extra,
    import_extra_keys=ROPE_KEYS,
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="ministral3",
    model_types={"ministral3": MINISTRAL3},
    name_map=name_map,
    copies=tied_output,
    architectures={"ministral3": "Ministral3ForCausalLM"},
)
