"""Seed-OSS: Llama with biases on queries, keys and values."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="seed_oss",
    doc="Seed-OSS: Llama with biases on queries, keys and values",
    config_type=Lazy("mt_models.seed_oss.config:SeedOssConfig"),
    build=Lazy("mt_models.blocks.decoder:build_rotary_decoder"),
    check=Lazy("mt_models.blocks.config:check_decoder"),
    presets=Lazy("mt_models.seed_oss.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.seed_oss.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.seed_oss.gguf:GGUF"),
        "megatron": Lazy("mt_models.seed_oss.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
