"""Qwen3.5 and 3.6 with pictures: the vision transformer of Qwen3-VL in front of gated delta nets and attention."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="qwen_next_vl",
    doc="Qwen3.5 and 3.6 with pictures: images of any size as patches in front of gated delta nets and attention",
    config_type=Lazy("mt_models.qwen_next_vl.config:QwenNextVLConfig"),
    build=Lazy("mt_models.qwen_next_vl.model:build_qwen_next_vl"),
    check=Lazy("mt_models.qwen_next_vl.config:check_qwen_next_vl"),
    shrink=Lazy("mt_models.qwen_next_vl.config:shrink_qwen_next_vl"),
    presets=Lazy("mt_models.qwen_next_vl.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.qwen_next_vl.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.qwen_next_vl.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.qwen3_vl.config:training_flops"),
)
