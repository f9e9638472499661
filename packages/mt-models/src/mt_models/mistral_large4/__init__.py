"""Mistral Large 4: latent attention over chosen keys, with and without positions, and latents that layers share."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="mistral_large4",
    doc="Mistral Large 4: latent attention over chosen keys, every fourth layer without positions, shared latents",
    config_type=Lazy("mt_models.mistral_large4.config:MistralLarge4Config"),
    build=Lazy("mt_models.mistral_large4.model:build_mistral_large4"),
    check=Lazy("mt_models.mistral_large4.config:check_mistral_large4"),
    presets=Lazy("mt_models.mistral_large4.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.mistral_large4.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.mistral_large4.config:MEGATRON"),
    },
    shrink=Lazy("mt_models.mistral_large4.config:shrink_mistral_large4"),
    training_flops=Lazy("mt_models.mistral_large4.flops:training_flops"),
)
