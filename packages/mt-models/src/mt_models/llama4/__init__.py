"""Llama 4, text: attention within chunks, layers without positions, one expert and a shared one for a token."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="llama4",
    doc="Llama 4, text: attention within chunks, layers without positions, one expert a token",
    config_type=Lazy("mt_models.llama4.config:Llama4Config"),
    build=Lazy("mt_models.llama4.model:build_llama4"),
    check=Lazy("mt_models.llama4.config:check_llama4"),
    presets=Lazy("mt_models.llama4.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.llama4.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.llama4.gguf:GGUF"),
        "megatron": Lazy("mt_models.llama4.megatron:MEGATRON"),
    },
    training_flops=Lazy("mt_models.llama4.config:training_flops"),
)
