"""Qwen3-Omni's thinker: sound, pictures and videos in front of Qwen3 with experts."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="qwen3_omni",
    doc="Qwen3-Omni's thinker: sound, images and videos of any size in front of Qwen3 with experts",
    config_type=Lazy("mt_models.qwen3_omni.config:Qwen3OmniConfig"),
    build=Lazy("mt_models.qwen3_omni.model:build_qwen3_omni"),
    check=Lazy("mt_models.qwen3_omni.config:check_qwen3_omni"),
    shrink=Lazy("mt_models.qwen3_omni.config:shrink_qwen3_omni"),
    presets=Lazy("mt_models.qwen3_omni.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.qwen3_omni.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.qwen3_omni.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.qwen3_omni.flops:training_flops"),
)
