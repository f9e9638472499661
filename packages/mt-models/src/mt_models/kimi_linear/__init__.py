"""Kimi Linear: Kimi delta attention, latent attention without positions, shared experts."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="kimi_linear",
    doc="Kimi Linear: Kimi delta attention, latent attention without positions in every fourth layer, shared experts",
    config_type=Lazy("mt_models.kimi_linear.config:KimiLinearConfig"),
    build=Lazy("mt_models.kimi_linear.model:build_kimi_linear"),
    check=Lazy("mt_models.kimi_linear.config:check_kimi_linear"),
    presets=Lazy("mt_models.kimi_linear.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.kimi_linear.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.kimi_linear.gguf:GGUF"),
        "megatron": Lazy("mt_models.kimi_linear.config:MEGATRON"),
    },
    shrink=Lazy("mt_models.kimi_linear.config:shrink_kimi_linear"),
    training_flops=Lazy("mt_models.kimi_linear.flops:training_flops"),
)
