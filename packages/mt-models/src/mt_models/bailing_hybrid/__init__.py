"""Ling 3.0: Kimi delta attention with a bounded decay, rotary latent attention with a gate of each head, experts."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="bailing_hybrid",
    doc="Ling 3.0: Kimi delta attention with bounded decays, latent attention with a gate of each head, shared experts",
    config_type=Lazy("mt_models.bailing_hybrid.config:BailingHybridConfig"),
    build=Lazy("mt_models.bailing_hybrid.model:build_bailing_hybrid"),
    check=Lazy("mt_models.bailing_hybrid.config:check_bailing_hybrid"),
    presets=Lazy("mt_models.bailing_hybrid.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.bailing_hybrid.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.bailing_hybrid.gguf:GGUF"),
        "megatron": Lazy("mt_models.kimi_linear.config:MEGATRON"),
    },
    shrink=Lazy("mt_models.bailing_hybrid.config:shrink_bailing_hybrid"),
    training_flops=Lazy("mt_models.bailing_hybrid.flops:training_flops"),
)
