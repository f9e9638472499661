"""Hybrids: Mamba-2, attention and feed-forward layers in the order of a pattern."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="hybrid",
    doc="Nemotron-H and 3, Bamba, Granite 4.0 H: Mamba-2, attention, feed-forward and MoE layers in any order",
    config_type=Lazy("mt_models.hybrid.config:HybridConfig"),
    build=Lazy("mt_models.hybrid.model:build_hybrid"),
    check=Lazy("mt_models.hybrid.config:check_hybrid"),
    presets=Lazy("mt_models.hybrid.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.hybrid.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.hybrid.gguf:GGUF"),
        "megatron": Lazy("mt_models.hybrid.megatron:MEGATRON"),
    },
    training_flops=Lazy("mt_models.hybrid.config:training_flops"),
)
