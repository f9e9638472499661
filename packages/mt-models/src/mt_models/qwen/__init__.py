"""Qwen 2, 2.5 and 3: Llama with biases on queries, keys and values, or with normalized queries and keys."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="qwen",
    doc="Qwen 2, 2.5 and 3, dense: Llama with biases on queries, keys and values, or normalized heads",
    config_type=Lazy("mt_models.qwen.config:QwenConfig"),
    build=Lazy("mt_models.blocks.decoder:build_rotary_decoder"),
    check=Lazy("mt_models.qwen.config:check_qwen"),
    presets=Lazy("mt_models.qwen.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.qwen.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.qwen.gguf:GGUF"),
        "megatron": Lazy("mt_models.qwen.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
