"""Gemma 4 with pictures: a vision transformer of variable resolution in front of Gemma 4."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="gemma4_vl",
    doc="Gemma 4 with pictures: images of any size as patches, pooled three by three, in front of Gemma 4",
    config_type=Lazy("mt_models.gemma4_vl.config:Gemma4VLConfig"),
    build=Lazy("mt_models.gemma4_vl.model:build_gemma4_vl"),
    check=Lazy("mt_models.gemma4_vl.config:check_gemma4_vl"),
    shrink=Lazy("mt_models.gemma4_vl.config:shrink_gemma4_vl"),
    presets=Lazy("mt_models.gemma4_vl.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.gemma4_vl.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.gemma4_vl.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.gemma4_vl.config:training_flops"),
)
