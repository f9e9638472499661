"""Llama 1, 2 and 3: RMSNorm, SwiGLU, grouped queries, rotary positions and their scalings."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="llama",
    doc="Llama 1, 2 and 3: grouped queries, SwiGLU, rotary positions with their scalings",
    config_type=Lazy("mt_models.llama.config:LlamaConfig"),
    build=Lazy("mt_models.blocks.decoder:build_rotary_decoder"),
    check=Lazy("mt_models.blocks.config:check_decoder"),
    presets=Lazy("mt_models.llama.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.llama.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.llama.gguf:GGUF"),
        "megatron": Lazy("mt_models.llama.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
