"""Ministral 3: Mistral whose queries grow with their positions."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="ministral3",
    doc="Ministral 3: Mistral with YaRN and queries that grow with their positions",
    config_type=Lazy("mt_models.ministral3.config:Ministral3Config"),
    build=Lazy("mt_models.blocks.decoder:build_rotary_decoder"),
    check=Lazy("mt_models.blocks.config:check_decoder"),
    presets=Lazy("mt_models.ministral3.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.ministral3.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.ministral3.gguf:GGUF"),
        "megatron": Lazy("mt_models.ministral3.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
