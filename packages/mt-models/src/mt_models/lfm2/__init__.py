"""LFM2: gated short convolutions in most layers, attention in the others, dense or with experts."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="lfm2",
    doc="LFM2 and LFM2.5: gated short convolutions in most layers, attention in the others, dense or with experts",
    config_type=Lazy("mt_models.lfm2.config:Lfm2Config"),
    build=Lazy("mt_models.lfm2.model:build_lfm2"),
    check=Lazy("mt_models.lfm2.config:check_lfm2"),
    shrink=Lazy("mt_models.lfm2.config:shrink_lfm2"),
    presets=Lazy("mt_models.lfm2.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.lfm2.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.lfm2.gguf:GGUF"),
        "megatron": Lazy("mt_models.lfm2.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.lfm2.config:training_flops"),
)
