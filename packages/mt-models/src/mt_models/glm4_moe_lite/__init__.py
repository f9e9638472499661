"""GLM-4.7-Flash: DeepSeek-V3's layers with other sizes."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="glm4_moe_lite",
    doc="GLM-4.7-Flash: the layers of DeepSeek-V3 with other sizes",
    config_type=Lazy("mt_models.glm4_moe_lite.config:Glm4MoeLiteConfig"),
    build=Lazy("mt_models.deepseek.model:build_deepseek"),
    check=Lazy("mt_models.deepseek.config:check_deepseek"),
    presets=Lazy("mt_models.glm4_moe_lite.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.glm4_moe_lite.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.glm4_moe_lite.gguf:GGUF"),
        "megatron": Lazy("mt_models.glm4_moe_lite.config:MEGATRON"),
    },
    shrink=Lazy("mt_models.deepseek.config:shrink_deepseek"),
    training_flops=Lazy("mt_models.deepseek.config:training_flops"),
)
