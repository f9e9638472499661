"""LLaVA: a vision tower, a projection, and any decoder, whose inputs are image features and token embeddings."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="llava",
    doc="LLaVA: a tower of the family vision in front of any decoder",
    config_type=Lazy("mt_models.llava.config:LlavaConfig"),
    build=Lazy("mt_models.llava.model:build_llava"),
    check=Lazy("mt_models.llava.config:check_llava"),
    shrink=Lazy("mt_models.llava.config:shrink_llava"),
    presets=Lazy("mt_models.llava.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.llava.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.llava.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.llava.config:training_flops"),
)
