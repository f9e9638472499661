"""InternVL: an InternViT tower, pixel shuffle, a norm and two matrices, and any decoder."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="internvl",
    doc="InternVL 3: an InternViT tower that reads images in tiles, pixel shuffle, two matrices, a decoder",
    config_type=Lazy("mt_models.internvl.config:InternVLConfig"),
    build=Lazy("mt_models.internvl.model:build_internvl"),
    check=Lazy("mt_models.internvl.config:check_internvl"),
    shrink=Lazy("mt_models.llava.config:shrink_squares"),
    presets=Lazy("mt_models.internvl.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.internvl.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.internvl.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.llava.config:training_flops"),
)
