"""GPT-OSS: MoE with attention sinks, sliding windows in every second layer, and biases everywhere."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="gpt_oss",
    doc="GPT-OSS: attention sinks, windows in turn, clamped SwiGLU, biases",
    config_type=Lazy("mt_models.gpt_oss.config:GptOssConfig"),
    build=Lazy("mt_models.gpt_oss.model:build_gpt_oss"),
    check=Lazy("mt_models.gpt_oss.config:check_gpt_oss"),
    presets=Lazy("mt_models.gpt_oss.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.gpt_oss.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.gpt_oss.gguf:GGUF"),
        "megatron": Lazy("mt_models.gpt_oss.megatron:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
