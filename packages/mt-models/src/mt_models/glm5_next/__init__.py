"""GLM-5.3-Flash: Kimi delta attention, latent attention over pools of keys, hyper-connections, shared experts."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="glm5_next",
    doc="GLM-5.3-Flash (text): Kimi delta attention, latent attention over pools of keys, hyper-connections, experts",
    config_type=Lazy("mt_models.glm5_next.config:Glm5NextConfig"),
    build=Lazy("mt_models.glm5_next.model:build_glm5_next"),
    check=Lazy("mt_models.glm5_next.config:check_glm5_next"),
    presets=Lazy("mt_models.glm5_next.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.glm5_next.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.glm5_next.gguf:GGUF"),
        "megatron": Lazy("mt_models.kimi_linear.config:MEGATRON"),
    },
    shrink=Lazy("mt_models.glm5_next.config:shrink_glm5_next"),
    training_flops=Lazy("mt_models.glm5_next.flops:training_flops"),
)
