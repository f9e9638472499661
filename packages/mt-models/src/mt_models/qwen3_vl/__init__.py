"""Qwen3-VL: a vision transformer whose middle states reach the first layers of a Qwen3 decoder (deepstack)."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="qwen3_vl",
    doc="Qwen3-VL: images of any size as patches, deepstack features, in front of Qwen3, dense or with experts",
    config_type=Lazy("mt_models.qwen3_vl.config:Qwen3VLConfig"),
    build=Lazy("mt_models.qwen3_vl.model:build_qwen3_vl"),
    check=Lazy("mt_models.qwen3_vl.config:check_qwen3_vl"),
    shrink=Lazy("mt_models.qwen3_vl.config:shrink_qwen3_vl"),
    presets=Lazy("mt_models.qwen3_vl.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.qwen3_vl.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.qwen3_vl.gguf:GGUF"),
        "megatron": Lazy("mt_models.qwen3_vl.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.qwen3_vl.config:training_flops"),
)
