"""SmolVLM and Idefics3: a SigLIP tower, pixel shuffle with one matrix, and a decoder of the family llama."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="smolvlm",
    doc="SmolVLM and Idefics3: a SigLIP tower that reads images in tiles, pixel shuffle, one matrix, a decoder",
    config_type=Lazy("mt_models.smolvlm.config:SmolVLMConfig"),
    build=Lazy("mt_models.smolvlm.model:build_smolvlm"),
    check=Lazy("mt_models.smolvlm.config:check_smolvlm"),
    shrink=Lazy("mt_models.llava.config:shrink_squares"),
    presets=Lazy("mt_models.smolvlm.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.smolvlm.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.smolvlm.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.llava.config:training_flops"),
)
