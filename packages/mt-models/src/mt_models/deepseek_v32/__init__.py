"""DeepSeek-V3.2 and GLM-5: latent attention over the keys that an indexer chooses."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="deepseek_v32",
    doc="DeepSeek-V3.2 and GLM-5: latent attention over the keys that an indexer chooses",
    config_type=Lazy("mt_models.deepseek_v32.config:DeepseekV32Config"),
    build=Lazy("mt_models.deepseek_v32.model:build_deepseek_v32"),
    check=Lazy("mt_models.deepseek_v32.config:check_deepseek_v32"),
    presets=Lazy("mt_models.deepseek_v32.presets:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.deepseek_v32.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.deepseek_v32.gguf:GGUF"),
        "megatron": Lazy("mt_models.deepseek_v32.megatron:MEGATRON"),
    },
    shrink=Lazy("mt_models.deepseek_v32.config:shrink_indexers"),
    training_flops=Lazy("mt_models.deepseek_v32.flops:training_flops"),
)
