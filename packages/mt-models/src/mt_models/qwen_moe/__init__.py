"""Qwen2-MoE, Qwen3-MoE and GLM-4.5: Qwen with many small experts."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="qwen_moe",
    doc="Qwen2-MoE, Qwen3-MoE, GLM-4.5 to 4.7: many small experts, with a shared one in Qwen2 and GLM",
    config_type=Lazy("mt_models.qwen_moe.config:QwenMoeConfig"),
    build=Lazy("mt_models.qwen_moe.model:build_qwen_moe"),
    check=Lazy("mt_models.qwen_moe.config:check_qwen_moe"),
    presets=Lazy("mt_models.qwen_moe.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.qwen_moe.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.qwen_moe.gguf:GGUF"),
        "megatron": Lazy("mt_models.qwen_moe.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:predicting_training_flops"),
)
