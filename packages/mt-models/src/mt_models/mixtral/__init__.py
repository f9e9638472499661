"""Mixtral: Mistral with MoE in every layer."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="mixtral",
    doc="Mixtral: Mistral with 8 experts in every layer",
    config_type=Lazy("mt_models.mixtral.config:MixtralConfig"),
    build=Lazy("mt_models.blocks.decoder:build_rotary_decoder"),
    check=Lazy("mt_models.blocks.config:check_moe_decoder"),
    presets=Lazy("mt_models.mixtral.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.mixtral.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.mixtral.gguf:GGUF"),
        "megatron": Lazy("mt_models.mixtral.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
