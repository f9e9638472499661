"""Mistral: Llama with sliding window attention."""

from mt_core.specs import Lazy, ModelSpec

SPEC = ModelSpec(
    name="mistral",
    doc="Mistral 7B: Llama with attention over a sliding window",
    config_type=Lazy("mt_models.mistral.config:MistralConfig"),
    build=Lazy("mt_models.mistral.model:build_mistral"),
    check=Lazy("mt_models.mistral.config:check_mistral"),
    presets=Lazy("mt_models.mistral.presets:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.mistral.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.megatron:ROTARY"),
    },
    training_flops=Lazy("mt_models.training_flops:decoder_flops"),
)
