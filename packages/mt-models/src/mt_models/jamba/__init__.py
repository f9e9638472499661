"""Jamba: Mamba-1 in most layers, attention without positions in the others, experts in every second one."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="jamba",
    doc="Jamba: Mamba-1 in most layers, attention without positions in the others, experts in every second one",
    config_type=Lazy("mt_models.jamba.config:JambaConfig"),
    build=Lazy("mt_models.jamba.model:build_jamba"),
    check=Lazy("mt_models.jamba.config:check_jamba"),
    presets=Lazy("mt_models.jamba.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.jamba.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.jamba.gguf:GGUF"),
        "megatron": Lazy("mt_models.jamba.config:MEGATRON"),
    },
    shrink=Lazy("mt_models.jamba.config:shrink_jamba"),
    training_flops=Lazy("mt_models.jamba.config:training_flops"),
)
