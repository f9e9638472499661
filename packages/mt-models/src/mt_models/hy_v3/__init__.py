"""Hy3: grouped queries with normalized heads, many small experts with sigmoid scores beside a shared one."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="hy_v3",
    doc="Hy3: normalized heads, 192 experts with sigmoid scores and a shared one, multi-token prediction",
    config_type=Lazy("mt_models.hy_v3.config:HyV3Config"),
    build=Lazy("mt_models.hy_v3.model:build_hy_v3"),
    check=Lazy("mt_models.hy_v3.config:check_hy_v3"),
    presets=Lazy("mt_models.hy_v3.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.hy_v3.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.hy_v3.gguf:GGUF"),
        "megatron": Lazy("mt_models.hy_v3.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:predicting_training_flops"),
)
