"""DeepSeek-V2 and V3, Kimi K2: latent attention, many small experts with shared experts, multi-token prediction."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="deepseek",
    doc="DeepSeek-V2 and V3, Kimi K2: latent attention, shared experts, multi-token prediction",
    config_type=Lazy("mt_models.deepseek.config:DeepseekConfig"),
    build=Lazy("mt_models.deepseek.model:build_deepseek"),
    check=Lazy("mt_models.deepseek.config:check_deepseek"),
    presets=Lazy("mt_models.deepseek.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.deepseek.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.deepseek.gguf:GGUF"),
        "megatron": Lazy("mt_models.deepseek.megatron:MEGATRON"),
    },
    shrink=Lazy("mt_models.deepseek.config:shrink_deepseek"),
    training_flops=Lazy("mt_models.deepseek.config:training_flops"),
)
