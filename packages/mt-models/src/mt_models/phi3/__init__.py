"""Phi-3 and Phi-4: Llama with a share of each head rotated, longrope, and fused projections in files."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="phi3",
    doc="Phi-3 and Phi-4: Llama with partial rotary positions and longrope",
    config_type=Lazy("mt_models.phi3.config:Phi3Config"),
    build=Lazy("mt_models.blocks.decoder:build_rotary_decoder"),
    check=Lazy("mt_models.blocks.config:check_decoder"),
    presets=Lazy("mt_models.phi3.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.phi3.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.phi3.gguf:GGUF"),
        "megatron": Lazy("mt_models.phi3.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
