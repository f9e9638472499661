"""Falcon-H1: Mamba-2 and attention side by side in every layer."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="falcon_h1",
    doc="Falcon-H1: Mamba-2 and attention side by side in every layer, and factors on what they read and add",
    config_type=Lazy("mt_models.falcon_h1.config:FalconH1Config"),
    build=Lazy("mt_models.falcon_h1.model:build_falcon_h1"),
    check=Lazy("mt_models.falcon_h1.config:check_falcon_h1"),
    presets=Lazy("mt_models.falcon_h1.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.falcon_h1.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.falcon_h1.gguf:GGUF"),
        "megatron": Lazy("mt_models.falcon_h1.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.falcon_h1.config:training_flops"),
)
