"""Kimi K3 (text): Kimi delta attention, gated latent attention, attention residuals, experts on latents."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="kimi_k3",
    doc="Kimi K3 (text): Kimi delta attention, gated latent attention, attention residuals, experts on latents",
    config_type=Lazy("mt_models.kimi_k3.config:KimiK3Config"),
    build=Lazy("mt_models.kimi_k3.model:build_kimi_k3"),
    check=Lazy("mt_models.kimi_linear.config:check_kimi_linear"),
    presets=Lazy("mt_models.kimi_k3.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.kimi_k3.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.kimi_k3.gguf:GGUF"),
        "megatron": Lazy("mt_models.kimi_linear.config:MEGATRON"),
    },
    shrink=Lazy("mt_models.kimi_k3.config:shrink_kimi_k3"),
    training_flops=Lazy("mt_models.kimi_k3.flops:training_flops"),
)
