"""Mistral 3 with pictures: Pixtral's vision transformer of variable resolution in front of Mistral, Ministral 3
or Mistral 4."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="mistral3",
    doc="Mistral Small 3.1 and 4 and Ministral 3 with pictures: images of any size as patches in front of Mistral",
    config_type=Lazy("mt_models.mistral3.config:Mistral3Config"),
    build=Lazy("mt_models.mistral3.model:build_mistral3"),
    check=Lazy("mt_models.mistral3.config:check_mistral3"),
    shrink=Lazy("mt_models.mistral3.config:shrink_mistral3"),
    presets=Lazy("mt_models.mistral3.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.mistral3.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.mistral3.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.mistral3.config:training_flops"),
)
