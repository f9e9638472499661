"""DeepSeek-V4: compressed attention, hyper-connections, experts by token in the first layers."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="deepseek_v4",
    doc="DeepSeek-V4: attention to a window and to compressed entries, hyper-connections, experts by token",
    config_type=Lazy("mt_models.deepseek_v4.config:DeepseekV4Config"),
    build=Lazy("mt_models.deepseek_v4.model:build_deepseek_v4"),
    check=Lazy("mt_models.deepseek_v4.config:check_deepseek_v4"),
    presets=Lazy("mt_models.deepseek_v4.presets:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.deepseek_v4.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.deepseek_v4.gguf:GGUF"),
        "megatron": Lazy("mt_models.deepseek_v4.config:MEGATRON"),
    },
    shrink=Lazy("mt_models.deepseek_v4.config:shrink_deepseek_v4"),
    training_flops=Lazy("mt_models.deepseek_v4.flops:training_flops"),
)
