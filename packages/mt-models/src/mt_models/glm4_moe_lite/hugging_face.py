"""GLM-4.7-Flash (`glm4_moe_lite`) in Hugging Face's format: DeepSeek-V3's names, and keys with other defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_models.blocks.hugging_face_decoder import ROPE_KEYS, decoder_fields
from mt_models.blocks.hugging_face_moe import BIAS_KEY, MOE_IGNORED
from mt_models.deepseek import hugging_face as deepseek
from mt_models.deepseek.config import DeepseekConfig
from mt_models.hugging_face import IGNORED, HuggingFaceFamily

LITE = "glm4_moe_lite"
DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 47,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
}
"""Defaults of the class, where DeepSeek-V3's has another."""


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    _require_dense_layers(external)
    _require_whole_rotation(external)
    stated = {key: value for key, value in external.items() if value is not None}
    defaults = dict(DEFAULTS)
    if deepseek.KINDS in stated:
        del defaults["first_k_dense_replace"]
    return deepseek.v3_import_extra({**defaults, **stated})


def _require_dense_layers(external: Mapping[str, Any]) -> None:
    """The class does not read first_k_dense_replace, other programs do: they have to agree."""
    dense = external.get("first_k_dense_replace")
    if external.get(deepseek.KINDS) is None and dense not in (None, DEFAULTS["first_k_dense_replace"]):
        raise ConfigError(
            f"first_k_dense_replace={dense} without {deepseek.KINDS} is not supported: the class reads the latter "
            "alone, and has one dense layer without it"
        )


def _require_whole_rotation(external: Mapping[str, Any]) -> None:
    tables = {"": external, **{f"{key}.": external.get(key) or {} for key in ("rope_parameters", "rope_scaling")}}
    for prefix, table in tables.items():
        if (share := table.get("partial_rotary_factor")) not in (None, 1.0):
            raise ConfigError(f"{prefix}partial_rotary_factor={share} is not supported; it can be 1.0")


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = DeepseekConfig.model_validate(model)
    return {**deepseek.v3_export_extra(model, LITE, listed=True), **deepseek.export_kinds(config)}


SIZES = {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}
GLM = ConfigMap(
    architecture=LITE,
    fields=(
        *decoder_fields(tied=False, positions=202752, epsilon=1e-5),
        *(Field(field.theirs, field.ours, default=SIZES.get(field.theirs, field.default)) for field in deepseek.FIELDS),
    ),
    fixed=(*deepseek.FIXED, Fixed("scoring_func", ("sigmoid",)), Fixed("rope_interleave", (True,))),
    ignored={**IGNORED, **MOE_IGNORED, **deepseek.DERIVED},
    import_extra=import_extra,
    import_extra_keys=(
        *ROPE_KEYS, *deepseek.MOE_KEYS, *deepseek.ATTENTION_KEYS, "norm_topk_prob", BIAS_KEY, deepseek.KINDS,
        "partial_rotary_factor",
    ),
    export_extra=export_extra,
    spellings=deepseek.SPELLINGS,
)  # fmt: skip

HUGGING_FACE = HuggingFaceFamily(
    family="glm4_moe_lite",
    model_types={LITE: GLM},
    name_map=deepseek.name_map,
    copies=deepseek.copies,
    architectures={LITE: "Glm4MoeLiteForCausalLM"},
    held=deepseek.held,
)
