"""SmolLM3: Llama without positions in every fourth layer."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="smollm3",
    doc="SmolLM3: Llama without positions in every fourth layer",
    config_type=Lazy("mt_models.smollm3.config:SmolLM3Config"),
    build=Lazy("mt_models.blocks.decoder:build_rotary_decoder"),
    check=Lazy("mt_models.smollm3.config:check_smollm3"),
    presets=Lazy("mt_models.smollm3.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.smollm3.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.smollm3.gguf:GGUF"),
        "megatron": Lazy("mt_models.smollm3.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
