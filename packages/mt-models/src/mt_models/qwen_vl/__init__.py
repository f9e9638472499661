"""Qwen2.5-VL: a vision transformer of variable resolution, and a Qwen2 decoder with multimodal rotary positions."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="qwen_vl",
    doc="Qwen2.5-VL: images of any size as patches, merged two by two, in front of Qwen2",
    config_type=Lazy("mt_models.qwen_vl.config:QwenVLConfig"),
    build=Lazy("mt_models.qwen_vl.model:build_qwen_vl"),
    check=Lazy("mt_models.qwen_vl.config:check_qwen_vl"),
    shrink=Lazy("mt_models.qwen_vl.config:shrink_qwen_vl"),
    presets=Lazy("mt_models.qwen_vl.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.qwen_vl.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.qwen_vl.gguf:GGUF"),
        "megatron": Lazy("mt_models.qwen_vl.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.qwen_vl.config:training_flops"),
)
