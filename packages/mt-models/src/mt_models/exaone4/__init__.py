"""EXAONE 4: norms of what is added, windows with positions and global layers without; K-EXAONE: with experts."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="exaone4",
    doc="EXAONE 4 and K-EXAONE: norms behind blocks or before them, global layers without positions, experts",
    config_type=Lazy("mt_models.exaone4.config:Exaone4Config"),
    build=Lazy("mt_models.exaone4.model:build_exaone4"),
    check=Lazy("mt_models.exaone4.config:check_exaone4"),
    presets=Lazy("mt_models.exaone4.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.exaone4.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.exaone4.gguf:GGUF"),
        "megatron": Lazy("mt_models.exaone4.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.exaone4.config:training_flops"),
)
