"""OLMo-Hybrid: gated delta nets, every fourth layer the attention of OLMo 3."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="olmo_hybrid",
    doc="OLMo-Hybrid: gated delta nets, and attention with norms behind it",
    config_type=Lazy("mt_models.olmo_hybrid.config:OlmoHybridConfig"),
    build=Lazy("mt_models.olmo_hybrid.model:build_olmo_hybrid"),
    check=Lazy("mt_models.olmo_hybrid.config:check_olmo_hybrid"),
    presets=Lazy("mt_models.olmo_hybrid.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.olmo_hybrid.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.olmo_hybrid.config:MEGATRON"),
    },
    shrink=Lazy("mt_models.olmo_hybrid.config:shrink_olmo_hybrid"),
    training_flops=Lazy("mt_models.olmo_hybrid.config:training_flops"),
)
