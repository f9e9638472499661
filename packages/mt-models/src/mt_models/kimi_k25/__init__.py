"""Kimi K2.5 with pictures: MoonViT in front of a DeepSeek-V3."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="kimi_k25",
    doc="Kimi K2.5 and K2.6 with pictures: images of any size as patches, merged two by two, in front of DeepSeek-V3",
    config_type=Lazy("mt_models.kimi_k25.config:KimiK25Config"),
    build=Lazy("mt_models.kimi_k25.model:build_kimi_k25"),
    check=Lazy("mt_models.kimi_k25.config:check_kimi_k25"),
    shrink=Lazy("mt_models.kimi_k25.config:shrink_kimi_k25"),
    presets=Lazy("mt_models.kimi_k25.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.kimi_k25.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.kimi_k25.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.kimi_k25.config:training_flops"),
)
