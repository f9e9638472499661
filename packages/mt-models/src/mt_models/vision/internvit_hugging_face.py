"""InternViT in Hugging Face's format, `internvl_vision`: a part of `internvl` alone.

The tower of 300 million parameters. That of 6 billion has norms of whole queries and keys, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.hugging_face import NOT_A_CHOICE
from mt_models.vision.config import VisionEncoderConfig
from mt_models.vision.hugging_face import (
    OUR_LAYER,
    OURS,
    SIZES,
    TOWER_IGNORED,
    export_sizes,
    import_sizes,
    layer_rules,
    tower_fields,
    with_bias,
)

MODEL_TYPE = "internvl_vision"

# -- configuration -----------------------------------------------------------------------------------

DEFAULTS = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
"""Where the class's defaults are not those of SigLIP."""


def import_tower(external: Mapping[str, Any]) -> dict[str, Any]:
    # The class's default is no bias, which the layers here always have.
    if not external.get("attention_bias", False):
        raise ConfigError("vision_config.attention_bias=False is not supported; it can be True")
    sizes = {"image_size": external.get("image_size", 448), "patch_size": external.get("patch_size", 14)}
    return {"vision_model_type": "internvit", "use_scaled_init_method": False, **import_sizes(sizes, patch=14)}


def export_tower(model: Mapping[str, Any]) -> dict[str, Any]:
    sizes = export_sizes(model)
    pairs = {key: [sizes[key], sizes[key]] for key in SIZES}
    return {**sizes, **pairs, "attention_bias": True}


TOWER = ConfigMap(
    architecture=MODEL_TYPE,
    fields=(
        *(
            replace(field, default=DEFAULTS.get(field.theirs, field.default))
            for field in tower_fields(activation="gelu", epsilon=1e-6)
        ),
        Field("layer_scale_init_value", "layer_scale_init_value", float, default=0.1),
        Field("initializer_range", "init_method_std", float, default=0.02),
    ),
    fixed=(
        Fixed("use_qk_norm", (False,)),
        Fixed("norm_type", ("layer_norm",)),
        Fixed("use_absolute_position_embeddings", (True,)),
        Fixed("use_mask_token", (False,)),
        Fixed("use_mean_pooling", (True,)),
        *(Fixed(key, (0.0,), written=False) for key in ("dropout", "hidden_dropout_prob", "projection_dropout")),
        *NOT_A_CHOICE,
    ),
    ignored=TOWER_IGNORED,
    import_extra=import_tower,
    import_extra_keys=(*SIZES, "attention_bias"),
    export_extra=export_tower,
)

# -- names -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unsqueezed(Rule):
    """One tensor, with `leading` dimensions of size 1 in front there."""

    leading: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        # [1, S, H] -> [S, H], or [1, 1, H] -> [H]
        return tensors[0].flatten(0, self.leading)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.reshape((1,) * self.leading + tuple(tensor.shape))]


THEIR_LAYER = "encoder.layer.{i}."
LAYER = (
    ("input_layernorm", "layernorm_before"),
    ("self_attention.linear_proj", "attention.projection_layer"),
    ("pre_mlp_layernorm", "layernorm_after"),
    ("mlp.linear_fc1", "mlp.fc1"),
    ("mlp.linear_fc2", "mlp.fc2"),
)


def tower_map(config: VisionEncoderConfig) -> NameMap:
    """Names within the tower; models with one add a prefix to theirs."""
    rules: list[Rule] = [
        *with_bias(f"{OURS}conv1", "embeddings.patch_embeddings.projection"),
        Unsqueezed(f"{OURS}position_embeddings.weight", "embeddings.position_embeddings"),
        Unsqueezed(f"{OURS}class_token", "embeddings.cls_token", leading=2),
        *(Same(f"{OUR_LAYER}ls{number}.weight", f"{THEIR_LAYER}lambda_{number}") for number in (1, 2)),
        *layer_rules(config, THEIR_LAYER, "attention", LAYER),
    ]
    return NameMap(rules, config.num_layers)
