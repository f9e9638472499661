"""Vision transformers: the image towers of CLIP and SigLIP, alone or with a classification head."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="vision",
    doc="CLIP and SigLIP: image towers, alone or with a head that predicts the class of an image",
    config_type=Lazy("mt_models.vision.config:VisionConfig"),
    build=Lazy("mt_models.vision.model:build_vision"),
    default_loss="classification",
    check=Lazy("mt_models.vision.config:check_vision"),
    presets=Lazy("mt_models.vision.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.vision.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.vision.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.vision.config:training_flops"),
)
