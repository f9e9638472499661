"""Mistral: Llama with sliding window attention."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="mistral",
    doc="Mistral 7B: Llama with attention over a sliding window",
    config_type=Lazy("mt_models.mistral.config:MistralConfig"),
    build=Lazy("mt_models.blocks.decoder:build_rotary_decoder"),
    check=Lazy("mt_models.blocks.config:check_decoder"),
    presets=Lazy("mt_models.mistral.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.mistral.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.mistral.gguf:GGUF"),
        "megatron": Lazy("mt_models.mistral.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
