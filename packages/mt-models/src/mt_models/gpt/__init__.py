"""GPT: a decoder general enough for GPT-2, GPT-3 and Llama-like models."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="gpt",
    doc="GPT-2, GPT-3, StarCoder, BLOOM, GPT-NeoX, Nemotron: decoder-only transformer, composed by keys",
    config_type=Lazy("mt_models.gpt.config:GPTConfig"),
    build=Lazy("mt_models.gpt.model:build_gpt"),
    check=Lazy("mt_models.gpt.config:check_gpt"),
    presets=Lazy("mt_models.gpt.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.gpt.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.gpt.gguf:GGUF"),
        "megatron": Lazy("mt_models.gpt.megatron:MEGATRON"),
    },
    training_flops=Lazy("mt_models.gpt.flops:training_flops"),
)
